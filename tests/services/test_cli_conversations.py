"""`kvlease renew` and `kvlease end` against real services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result
from control_plane import ControlPlane, grant_request

from kvlease import times
from kvlease.cli.main import cli
from kvlease.v1 import lease_pb2


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    started = ControlPlane({})
    await started.start()
    yield started
    await started.stop()


async def kvlease(plane: ControlPlane, *arguments: str) -> Result:
    where = [
        *("--set", f"lease_endpoint={plane.addresses['lease'][0]}"),
        *("--set", f"registry_endpoint={plane.addresses['registry'][0]}"),
    ]
    return await asyncio.to_thread(CliRunner().invoke, cli, [*arguments, *where])


async def test_renew_moves_the_end_of_a_lease(plane: ControlPlane) -> None:
    request = grant_request(await plane.register())
    before = (await plane.lease.Grant(request, timeout=5)).lease

    result = await kvlease(plane, "renew", "c1", "--for", "900", "--tenant", "acme")

    assert result.output == "renew: decode-0 keeps the blocks of c1 for 15 min 00 s\n"
    wanted = lease_pb2.GetLeaseRequest(conversation=request.conversation)
    after = await plane.lease.GetLease(wanted, timeout=5)
    longer_s = times.moment(after.expire_time) - times.moment(before.expire_time)
    assert longer_s == pytest.approx(900 - plane.settings.retention_ttl, abs=2)


async def test_a_conversation_without_a_lease_is_not_renewed(plane: ControlPlane) -> None:
    await plane.register()

    result = await kvlease(plane, "renew", "c2", "--for", "900")

    assert result.exit_code == 1
    assert "there is no lease to renew" in str(result.output)


async def test_end_ends_a_lease_and_is_no_error_without_one(plane: ControlPlane) -> None:
    await plane.lease.Grant(grant_request(await plane.register()), timeout=5)

    first = await kvlease(plane, "end", "c1", "--tenant", "acme")
    second = await kvlease(plane, "end", "c1", "--tenant", "acme")

    assert first.output == "end: the lease of c1 is ended\n"
    assert "it held no lease" in second.output
