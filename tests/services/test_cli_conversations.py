"""`kvlease renew` and `kvlease end` against real services."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


async def test_a_renewal_that_was_cut_says_so(plane: ControlPlane) -> None:
    await plane.lease.Grant(grant_request(await plane.register()), timeout=5)

    result = await kvlease(plane, "renew", "c1", "--for", "99999", "--tenant", "acme")

    assert result.exit_code == 0
    assert "for 1 h 00 min, less than the 1 d 3 h asked for" in result.output
    assert "max_retention" in result.output


@pytest.mark.parametrize("command", [["end", "c1"], ["renew", "c1", "--for", "60"]])
async def test_a_model_that_nobody_serves_is_told_with_those_that_are(
    plane: ControlPlane, command: list[str]
) -> None:
    nobody = await kvlease(plane, *command, "--model", "gpt-4")
    await plane.register(other_models=["sql-lora"])
    unknown = await kvlease(plane, *command, "--model", "gpt-4")
    adapter = await kvlease(plane, *command, "--model", "sql-lora")

    assert "there are:" not in nobody.output
    assert unknown.exit_code == 1
    assert "no engine serves the model 'gpt-4'; there are: qwen, sql-lora" in unknown.output
    assert "there are:" not in adapter.output
    if command[0] == "end":
        assert (nobody.exit_code, adapter.exit_code) == (0, 0)


async def test_an_end_needs_no_registry_where_the_model_is_named(plane: ControlPlane) -> None:
    where = f"lease_endpoint={plane.addresses['lease'][0]}"
    arguments = ["end", "c1", "--model", "m", "--set", where]
    result = await asyncio.to_thread(
        CliRunner().invoke, cli, [*arguments, "--set", "registry_endpoint=127.0.0.1:1"]
    )
    assert result.exit_code == 0
    assert "it held no lease" in result.output


async def test_a_conversation_s_name_does_not_steer_the_terminal(plane: ControlPlane) -> None:
    await plane.register()
    evil = "a\n\x1b[31mb"

    for command in (["end", evil], ["end", evil, "--model", evil], ["renew", evil, "--for", "9"]):
        result = await kvlease(plane, *command)
        assert result.output.count("\n") == 1
        assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["engines", "--model", "gpt-4"], "no engine serves the model 'gpt-4'; there are: qwen"),
        (["leases", "--engine", "nope"], "there is no engine 'nope'; there are: decode-0"),
        (
            ["leases", "--tenant", "acme", "--model", "gpt-4"],
            "no engine serves the model 'gpt-4'; there are: qwen",
        ),
        (["engines", "--model", "qwen"], ""),
        (["leases", "--engine", "decode-0"], ""),
    ],
)
async def test_an_empty_table_says_whose_name_is_unknown(
    plane: ControlPlane, arguments: list[str], said: str
) -> None:
    await plane.register()

    table = await kvlease(plane, *arguments)
    as_json = await kvlease(plane, *arguments, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0)
    assert table.stderr == as_json.stderr == (f"kvlease: {said}\n" if said else "")
    value, _ = json.JSONDecoder().raw_decode(as_json.stdout, as_json.stdout.index("["))
    assert len(value) == (arguments[0] == "engines" and not said)


@pytest.fixture
def http_port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def test_another_service_at_the_address_is_told_with_the_setting(
    plane: ControlPlane, http_port: int
) -> None:
    registry, lease = plane.addresses["registry"][0], plane.addresses["lease"][0]
    wrong = [
        (["engines"], "registry", "registry_endpoint", 7401, lease),
        (["engines"], "registry", "registry_endpoint", 7401, f"127.0.0.1:{http_port}"),
        (["leases"], "lease service", "lease_endpoint", 7402, registry),
        (["end", "c", "--model", "m"], "lease service", "lease_endpoint", 7402, registry),
    ]
    for command, name, setting, port, address in wrong:
        result = await asyncio.to_thread(
            CliRunner().invoke, cli, [*command, "--set", f"{setting}={address}"]
        )
        assert result.exit_code == 1
        assert (
            f"what answers at {address} is not the {name}: name its gRPC address with --set "
            f"{setting}=HOST:PORT (its default port is {port})"
        ) in result.output


async def test_end_ends_a_lease_and_is_no_error_without_one(plane: ControlPlane) -> None:
    await plane.lease.Grant(grant_request(await plane.register()), timeout=5)

    first = await kvlease(plane, "end", "c1", "--tenant", "acme")
    second = await kvlease(plane, "end", "c1", "--tenant", "acme")

    assert first.output == "end: the lease of c1 is ended\n"
    assert "it held no lease" in second.output
