"""What a holder learns by watching its leases, on both stores."""

from __future__ import annotations

import asyncio
import time
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
    watching,
)

from kvlease.lease import watches
from kvlease.lease.knowledge import LeaseView, mirror_of_leases
from kvlease.mirror import Change, Mirror
from kvlease.store.base import Changed, Synced, Versioned
from kvlease.store.memory import MemoryStore
from kvlease.v1 import lease_pb2, registry_pb2
from kvlease.v1.lease_pb2 import WatchLeasesResponse
from kvlease.v1.registry_pb2 import Engine

UPSERT = WatchLeasesResponse.KIND_UPSERT
DELETE = WatchLeasesResponse.KIND_DELETE
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # in no stub
SYNCED = WatchLeasesResponse.KIND_SYNCED


def watch(plane: ControlPlane, holder: Engine | None = None, replica: int = 0) -> Any:
    request = lease_pb2.WatchLeasesRequest(holder_session_id=holder.session_id if holder else "")
    return watching(plane.leases[replica].WatchLeases(request))


async def grant(plane: ControlPlane, holder: Engine, **fields: Any) -> lease_pb2.GrantRequest:
    request = grant_request(holder, **fields)
    await plane.lease.Grant(request, timeout=CALL_S)
    return request


async def claim(plane: ControlPlane) -> lease_pb2.ClaimResponse:
    answer: lease_pb2.ClaimResponse = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    return answer


async def test_a_holder_sees_its_tickets_open_and_close(plane: ControlPlane) -> None:
    holder = await plane.register()
    async with watch(plane, holder) as take:
        (synced,) = await take(1)
        assert synced.kind == SYNCED

        granted = await grant(plane, holder)
        (new,) = await take(1)
        assert (new.kind, new.lease.lease_id) == (UPSERT, granted.lease_id)
        assert not new.lease.HasField("proof")
        assert new.lease.kv_transfer_params_json == ""

        reading = await claim(plane)
        (opened,) = await take(1)
        assert list(opened.lease.tickets) == [reading.ticket]

        await plane.lease.Complete(complete_request(reading), timeout=CALL_S)
        (closed,) = await take(1)
        assert (closed.kind, len(closed.lease.tickets)) == (UPSERT, 0)

        end = lease_pb2.EndConversationRequest(conversation=conversation())
        await plane.lease.EndConversation(end, timeout=CALL_S)
        (gone,) = await take(1)
        assert (gone.kind, gone.lease.lease_id, gone.after_gap) == (
            DELETE,
            granted.lease_id,
            False,
        )
        assert gone.lease.conversation == conversation()


async def test_a_watch_begins_with_what_is_there_even_if_just_granted_elsewhere(
    start_plane: Any,
) -> None:
    plane = await start_plane(leases=2)
    holder = await plane.register()
    for number in range(10):
        # The other replica's watch of the store is always some time behind.
        await grant(plane, holder, talk=conversation(f"c{number}"))
        async with watch(plane, holder, replica=1) as take:
            events = await take(number + 2)
        assert [event.kind for event in events] == [UPSERT] * (number + 1) + [SYNCED]


async def test_a_holder_hears_nothing_of_others(plane: ControlPlane) -> None:
    holder = await plane.register()
    other = await plane.register(engine_id="decode-1")
    await grant(plane, other, talk=conversation("others"))
    async with watch(plane, holder) as take, watch(plane) as take_all:
        assert (await take(1))[0].kind == SYNCED
        assert [event.kind for event in await take_all(2)] == [UPSERT, SYNCED]
        await grant(plane, other, talk=conversation("others-2"))
        mine = await grant(plane, holder)
        assert (await take(1))[0].lease.lease_id == mine.lease_id
        seen = {event.lease.conversation.conversation_id for event in await take_all(2)}
        assert seen == {"others-2", "c1"}


async def test_a_superseded_holder_keeps_seeing_its_readers_and_then_goes(
    plane: ControlPlane,
) -> None:
    holder = await plane.register()
    other = await plane.register(engine_id="decode-1")
    old = await grant(plane, holder, turn=1)
    reading = await claim(plane)
    async with watch(plane, holder) as take:
        await take(2)
        new = await grant(plane, other, turn=2)
        (superseded,) = await take(1)
        assert (superseded.kind, superseded.lease.lease_id) == (UPSERT, new.lease_id)
        (retiring,) = superseded.lease.retiring
        assert (retiring.lease_id, len(retiring.tickets)) == (old.lease_id, 1)
        assert retiring.holder_session_id == holder.session_id

        await plane.lease.Complete(complete_request(reading), timeout=CALL_S)
        (over,) = await take(1)
        assert (over.kind, over.lease.lease_id) == (UPSERT, new.lease_id)
        assert not over.lease.retiring

        # then it is another's, and of no concern
        await grant(plane, other, turn=3)
        await grant(plane, holder, talk=conversation("c2"))
        (mine,) = await take(1)
        assert mine.lease.conversation.conversation_id == "c2"


async def test_a_holder_superseded_without_readers_is_told_at_once(plane: ControlPlane) -> None:
    holder = await plane.register()
    other = await plane.register(engine_id="decode-1")
    old = await grant(plane, holder, turn=1)
    async with watch(plane, holder) as take:
        await take(2)
        new = await grant(plane, other, turn=2)
        (gone,) = await take(1)
        assert (gone.kind, gone.lease.lease_id) == (UPSERT, new.lease_id)
        assert gone.lease.superseded_lease_id == old.lease_id


async def test_leases_disappear_with_their_holders_session(plane: ControlPlane) -> None:
    holder = await plane.register()
    for number in range(3):
        await grant(plane, holder, talk=conversation(f"c{number}"))
    async with watch(plane, holder) as take:
        await take(4)
        request = registry_pb2.DeregisterRequest(session_id=holder.session_id)
        await plane.registry.Deregister(request, timeout=CALL_S)
        assert [event.kind for event in await take(3)] == [DELETE] * 3


async def test_watches_end_cleanly_when_the_service_stops(plane: ControlPlane) -> None:
    call = plane.lease.WatchLeases(lease_pb2.WatchLeasesRequest())
    assert (await call.read()).kind == SYNCED
    started = time.monotonic()
    await plane.stops["lease"][0]()
    assert time.monotonic() - started < 2.0
    assert await call.read() is END
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["cancels", "closes its connection"])
async def test_a_client_that_vanishes_leaves_nothing_behind(
    plane: ControlPlane, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlease.mirror import Mirror

    mirrors: set[Mirror[Any]] = set()
    subscribe = Mirror.subscribe

    def spy(mirror: Mirror[Any], topic: str = "") -> Any:
        mirrors.add(mirror)
        return subscribe(mirror, topic)

    monkeypatch.setattr(Mirror, "subscribe", spy)

    def subscriptions() -> int:
        return sum(len(each) for mirror in mirrors for each in mirror._subscriptions.values())

    call = plane.lease.WatchLeases(lease_pb2.WatchLeasesRequest())
    await call.read()
    with_it = subscriptions()
    if how == "cancels":
        call.cancel()
    else:
        await plane.channels["lease"][0].close(None)
    await until(lambda: subscriptions() == with_it - 1)


async def test_a_watch_that_is_not_read_does_not_stop_the_service(plane: ControlPlane) -> None:
    holder = await plane.register()
    call = plane.lease.WatchLeases(lease_pb2.WatchLeasesRequest())  # nobody reads it
    for turn in range(1, 30):
        await grant(plane, holder, turn=turn)
    answers = await asyncio.gather(*(claim(plane) for _ in range(10)))
    assert len({answer.ticket.ticket_id for answer in answers}) == 10
    call.cancel()


def test_a_gap_is_passed_on() -> None:
    view = LeaseView(lease_pb2.Lease(lease_id="l", holder_session_id="s"))
    event = watches.event(Change("key", view, None, after_gap=True), "s")
    assert event is not None
    assert (event.kind, event.after_gap) == (DELETE, True)
    assert watches.event(Change("key", view, None), "another") is None


async def test_a_watch_that_may_have_missed_something_ends() -> None:
    # given a watch of a mirror, whose store loses a part of its history
    mirror = mirror_of_leases(MemoryStore())
    mirror._apply(Synced())
    events = watches.events(mirror, "s")
    assert (await anext(events)).kind == SYNCED
    lease = lease_pb2.Lease(lease_id="l", holder_session_id="s")
    mirror._apply(Changed(Versioned("/leases/k", lease.SerializeToString(), 2, "s")))
    assert (await anext(events)).kind == UPSERT
    # when the mirror has listed anew
    mirror._apply(Synced())
    # then the watch ends, so that its reader does so too
    with pytest.raises(StopAsyncIteration):
        await anext(events)
