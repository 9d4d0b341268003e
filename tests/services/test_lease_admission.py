"""Calls that a first token waits for pass all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from control_plane import (
    CALL_S,
    ControlPlane,
    claim_request,
    complete_request,
    conversation,
    grant_request,
    until,
)

from kvlease import rpc, serving
from kvlease.lease import server
from kvlease.store.base import Committed, Conflict, StoreUnavailable, Write
from kvlease.store.memory import MemoryStore
from kvlease.v1 import common_pb2, lease_pb2

WAITING = 3

OPEN = conversation("open")


class Held(MemoryStore):
    """Commits to conversations called "busy..." wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []
        self.go_on = asyncio.Event()
        self.lost = False

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        name = writes[0].key.rpartition("/")[2]
        if name.startswith("busy"):
            self.reached.append(name)
            await self.go_on.wait()
        return await super().commit(expect, writes)

    async def check(self) -> None:
        if self.lost:
            raise StoreUnavailable("the test has taken it away")


class Full:
    """A lease service all of whose places are taken by grants that the store holds up, and
    at whose gate more of them wait; the conversation :data:`OPEN` has a lease."""

    def __init__(self, plane: ControlPlane, store: Held) -> None:
        self.plane = plane
        self.store = store
        self.calls: list[asyncio.Task[Any]] = []
        self.session_id = ""

    async def fill(self) -> None:
        holder = await self.plane.register()
        self.session_id = holder.session_id
        await self.plane.lease.Grant(grant_request(holder, OPEN), timeout=CALL_S)
        for number in range(server.PLACES + WAITING):
            request = grant_request(holder, conversation(f"busy{number}"))
            self.calls.append(asyncio.create_task(self._grant(request)))
        await until(lambda: len(self.store.reached) >= server.PLACES)

    async def _grant(self, request: lease_pb2.GrantRequest) -> None:
        await self.plane.lease.Grant(request, timeout=CALL_S)


@contextlib.asynccontextmanager
async def full() -> AsyncIterator[Full]:
    plane, store = ControlPlane({}), Held()
    plane._shared = store
    await plane.start()
    service = Full(plane, store)
    try:
        await service.fill()
        yield service
    finally:
        store.go_on.set()
        await asyncio.gather(*service.calls, return_exceptions=True)
        await plane.stop()


async def refused(call: Any) -> str:
    """Why the store was not there for a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value.details()
    assert rpc.reason_of(caught.value) == "STORE_UNAVAILABLE"
    return caught.value.details() or ""


async def test_turns_start_and_claims_and_revocations_are_answered_while_places_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LENT_S", 60.0)
    async with full() as service:
        lease, store = service.plane.lease, service.store
        for _ in range(3):
            answer = await lease.Claim(claim_request(OPEN), timeout=CALL_S)
            assert answer.outcome == common_pb2.OUTCOME_HIT
            await lease.StartTurn(lease_pb2.StartTurnRequest(conversation=OPEN), timeout=CALL_S)
        completing = asyncio.ensure_future(
            lease.Complete(complete_request(answer, OPEN), timeout=CALL_S)
        )
        revoking = lease.Revoke(
            lease_pb2.RevokeRequest(
                conversation=OPEN,
                lease_id=answer.lease_id,
                session_id=service.session_id,
                reason=lease_pb2.END_REASON_BUDGET,
            ),
            timeout=CALL_S,
        )
        assert len((await revoking).open_tickets) == 3
        assert len(store.reached) == server.PLACES
        assert not completing.done()
        store.go_on.set()
        await asyncio.gather(completing, *service.calls)
        listed = await lease.ListLeases(lease_pb2.ListLeasesRequest(), timeout=CALL_S)
        assert len(listed.leases) == server.PLACES + WAITING + 1


async def test_calls_that_waited_while_the_store_was_lost_learn_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LENT_S", 1.0)
    monkeypatch.setattr(serving, "CHECK_PERIOD_S", 0.05)
    async with full() as service:
        service.store.lost = True
        await until(lambda: _unhealthy(service.plane))
        for call in service.calls[server.PLACES :]:
            assert "taken it away" in await asyncio.wait_for(refused(call), CALL_S)
        assert len(service.store.reached) == server.PLACES


async def _unhealthy(plane: ControlPlane) -> bool:
    return not await plane.health("lease")
