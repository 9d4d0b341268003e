"""The services while their store is down, and once it is back: a real etcd, ended and
started by the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
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
from etcd_server import Etcd

from kvlease import rpc
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.lease_pb2 import WatchLeasesResponse


@pytest.fixture
async def planed(etcd: Etcd) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane({"etcd_endpoints": etcd.endpoint, "session_ttl": 30})
    await plane.start()
    yield plane
    await plane.stop()


async def refused_for_store(call: Any) -> float:
    """Seconds until the call failed as it should."""
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    taken = time.monotonic() - started
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value.details()
    assert rpc.reason_of(caught.value) == "STORE_UNAVAILABLE"
    return taken


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_calls_say_that_the_store_is_down_and_work_once_it_is_back(
    planed: ControlPlane, etcd: Etcd, how: str
) -> None:
    plane = planed
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    assert await plane.health("lease")

    if how == "killed":
        await asyncio.to_thread(etcd.kill)
    else:
        etcd.pause()
    # At once, and with a claim's deadline: an answer comes before that.
    taken = await refused_for_store(plane.lease.Claim(claim_request(), timeout=0.5))
    assert taken < 0.5
    await until(lambda: _unhealthy(plane))
    # From now on it is known, so nobody waits.
    taken = await refused_for_store(plane.lease.Claim(claim_request(), timeout=CALL_S))
    assert taken < 0.1
    for call in (
        plane.lease.StartTurn(
            lease_pb2.StartTurnRequest(conversation=conversation()), timeout=CALL_S
        ),
        plane.lease.ListLeases(lease_pb2.ListLeasesRequest(), timeout=CALL_S),
        plane.registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=CALL_S),
        plane.registry.Register(registry_pb2.RegisterRequest(engine=holder), timeout=CALL_S),
    ):
        assert await refused_for_store(call) < 0.1

    if how == "killed":
        await asyncio.to_thread(etcd.start)
    else:
        etcd.resume()
    await until(lambda: plane.health("lease"))
    await until(lambda: plane.health("registry"))
    answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    assert answer.outcome == common_pb2.OUTCOME_HIT
    listed = await plane.registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=CALL_S)
    assert [engine.engine_id for engine in listed.engines] == ["decode-0"]


async def _unhealthy(plane: ControlPlane) -> bool:
    return not await plane.health("lease") and not await plane.health("registry")


async def test_a_watch_goes_on_over_a_restart_of_the_store(
    planed: ControlPlane, etcd: Etcd
) -> None:
    plane = planed
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    request = lease_pb2.WatchLeasesRequest(holder_session_id=holder.session_id)
    async with watching(plane.lease.WatchLeases(request)) as take:
        await take(2)
        await asyncio.to_thread(etcd.restart)
        await until(lambda: plane.health("lease"))
        answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
        (opened,) = await take(1)
        assert list(opened.lease.tickets) == [answer.ticket]
        await plane.lease.Complete(complete_request(answer), timeout=CALL_S)
        (closed,) = await take(1)
        assert not closed.lease.tickets


async def test_a_new_replica_takes_over_what_a_dead_one_left(
    planed: ControlPlane, etcd: Etcd
) -> None:
    plane = planed
    holder = await plane.register()
    start = lease_pb2.StartTurnRequest(conversation=conversation())
    await plane.lease.StartTurn(start, timeout=CALL_S)
    await plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S)
    reading = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    await plane.stops["lease"][0]()

    other = ControlPlane({"etcd_endpoints": etcd.endpoint}, registries=0)
    await other.start()
    try:
        second = await other.lease.StartTurn(start, timeout=CALL_S)
        assert (second.turn, second.lease.holder_engine_id) == (2, "decode-0")
        answer = await other.lease.Claim(claim_request(), timeout=CALL_S)
        assert answer.outcome == common_pb2.OUTCOME_HIT
        assert answer.holder.incarnation == holder.incarnation
        for each in (reading, answer):
            await other.lease.Complete(complete_request(each), timeout=CALL_S)
        get = lease_pb2.GetLeaseRequest(conversation=conversation())
        assert not (await other.lease.GetLease(get, timeout=CALL_S)).tickets
    finally:
        await other.stop()


async def test_a_store_that_lost_everything_is_served_from_anew(
    planed: ControlPlane, etcd: Etcd
) -> None:
    """An operator wiped etcd. Nothing that a replica remembers may survive it."""
    plane = planed
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    async with watching(plane.lease.WatchLeases(lease_pb2.WatchLeasesRequest())) as take:
        await take(2)

        def wipe() -> None:
            etcd.kill()
            etcd.wipe()
            etcd.start()

        await asyncio.to_thread(wipe)
        await until(lambda: plane.health("lease"))
        (gone,) = await take(1)
        assert (gone.kind, gone.after_gap) == (WatchLeasesResponse.KIND_DELETE, True)
    answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    assert answer.outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    again = await plane.register()
    started = await plane.lease.StartTurn(
        lease_pb2.StartTurnRequest(conversation=conversation()), timeout=CALL_S
    )
    assert started.turn == 1
    await plane.lease.Grant(grant_request(again, turn=1), timeout=CALL_S)
    answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    assert answer.outcome == common_pb2.OUTCOME_HIT
