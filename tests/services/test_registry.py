"""The registry over real gRPC, on both stores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from control_plane import (
    CALL_S,
    ControlPlane,
    claim_request,
    conversation,
    grant_request,
    new_engine,
    until,
    watching,
)
from prometheus_client import REGISTRY

from kvlease import rpc
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.registry_pb2 import Engine, WatchEnginesResponse

PREFILL = registry_pb2.ENGINE_ROLE_PREFILL
DECODE = registry_pb2.ENGINE_ROLE_DECODE
UPSERT = WatchEnginesResponse.KIND_UPSERT
DELETE = WatchEnginesResponse.KIND_DELETE
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # in no stub
SYNCED = WatchEnginesResponse.KIND_SYNCED
NO_ROLE: Any = 77


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), rpc.reason_of(caught.value)


def keep_alive(engine: Engine, **fields: Any) -> registry_pb2.KeepAliveRequest:
    values: dict[str, Any] = {
        "session_id": engine.session_id,
        "role": engine.role,
        "engine_id": engine.engine_id,
        "incarnation": engine.incarnation,
    }
    return registry_pb2.KeepAliveRequest(**{**values, **fields})


async def get(plane: ControlPlane, engine_id: str = "decode-0") -> Engine:
    request = registry_pb2.GetEngineRequest(role=DECODE, engine_id=engine_id)
    engine: Engine = await plane.registry.GetEngine(request, timeout=CALL_S)
    return engine


async def test_a_registered_engine_is_found_as_it_was_stored(plane: ControlPlane) -> None:
    before = time.time()
    stored = await plane.register(weights_version="w1", kv_bytes_per_token=9)
    assert await get(plane) == stored
    assert stored.session_id
    assert stored.session_ttl.seconds == plane.settings.session_ttl
    assert stored.state == registry_pb2.ENGINE_STATE_SERVING
    assert before - 1 <= stored.register_time.ToSeconds() <= time.time() + 1
    assert (stored.weights_version, stored.kv_bytes_per_token) == ("w1", 9)


async def test_what_the_registry_sets_cannot_be_sent(plane: ControlPlane) -> None:
    stored = await plane.register(
        session_id="mine", state=registry_pb2.ENGINE_STATE_DRAINING, incarnation="i1"
    )
    assert stored.session_id != "mine"
    assert stored.state == registry_pb2.ENGINE_STATE_SERVING


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "x" * 300}, "engine_id"),
        ({"incarnation": ""}, "incarnation"),
        ({"model": ""}, "model"),
        ({"role": 0}, "role"),
        ({"role": 77}, "role"),
        ({"http_address": "10.0.0.7:8000"}, "http_address"),
        ({"side_channel_host": ""}, "side_channel_host"),
        ({"side_channel_port": 0}, "side_channel_port"),
        ({"block_size": 0}, "block_size"),
        ({"other_models": ["a", ""]}, "other_models"),
        ({"compatibility_hash": ""}, "compatibility_hash"),
    ],
)
async def test_an_incomplete_engine_is_refused_with_the_field_to_mend(
    plane: ControlPlane, fields: dict[str, Any], word: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.register(**fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.reason_of(caught.value) == "INVALID_ENGINE"
    assert f"engine.{word}" in (caught.value.details() or "")


async def test_names_cannot_reach_beyond_their_key(plane: ControlPlane) -> None:
    odd = "../prefill/x y%2F\u00e9"
    await plane.register(engine_id=odd)
    await plane.register(engine_id="x", role=PREFILL)
    assert (await get(plane, odd)).engine_id == odd
    answer = await plane.registry.ListEngines(
        registry_pb2.ListEnginesRequest(role=PREFILL), timeout=CALL_S
    )
    assert [engine.engine_id for engine in answer.engines] == ["x"]


# Sessions


async def test_a_session_without_keep_alives_ends_and_its_leases_with_it(start_plane: Any) -> None:
    plane = await start_plane(session_ttl=2)
    engine = await plane.register()
    await plane.lease.Grant(grant_request(engine), timeout=CALL_S)

    async def is_gone() -> bool:
        answer = await plane.registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=CALL_S)
        return not answer.engines

    await until(is_gone)
    leases = await plane.lease.ListLeases(lease_pb2.ListLeasesRequest(), timeout=CALL_S)
    assert not leases.leases
    answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    assert answer.outcome == common_pb2.OUTCOME_MISS_ENGINE
    assert await failure(plane.registry.KeepAlive(keep_alive(engine), timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "SESSION_LOST",
    )


async def test_keep_alives_keep_a_session_beyond_its_ttl(start_plane: Any) -> None:
    plane = await start_plane(session_ttl=2)
    engine = await plane.register()
    for _ in range(7):
        await asyncio.sleep(0.5)
        answer = await plane.registry.KeepAlive(keep_alive(engine), timeout=CALL_S)
        assert 0 < answer.session_ttl.ToTimedelta().total_seconds() <= 10
    assert await get(plane) == engine


async def test_a_keep_alive_publishes_block_usage(plane: ControlPlane) -> None:
    engine = await plane.register()
    usage = registry_pb2.BlockUsage(total_blocks=100, free_blocks=60, retained_blocks=30)
    await plane.registry.KeepAlive(keep_alive(engine, usage=usage), timeout=CALL_S)
    assert (await get(plane)).usage == usage
    await plane.registry.KeepAlive(keep_alive(engine), timeout=CALL_S)
    assert (await get(plane)).usage == usage


async def test_another_incarnation_cannot_keep_the_session(plane: ControlPlane) -> None:
    engine = await plane.register()
    request = keep_alive(engine, incarnation="another")
    assert await failure(plane.registry.KeepAlive(request, timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "SESSION_LOST",
    )


async def test_registering_again_ends_the_earlier_start_and_its_leases(
    plane: ControlPlane,
) -> None:
    first = await plane.register()
    await plane.lease.Grant(grant_request(first), timeout=CALL_S)
    second = await plane.register()
    assert second.session_id != first.session_id
    answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    assert answer.outcome == common_pb2.OUTCOME_MISS_ENGINE
    assert await failure(plane.registry.KeepAlive(keep_alive(first), timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "SESSION_LOST",
    )
    assert await failure(plane.lease.Grant(grant_request(first), timeout=CALL_S)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "SESSION_LOST",
    )
    await plane.lease.Grant(grant_request(second), timeout=CALL_S)


async def test_of_many_that_register_one_name_at_once_one_stays(start_plane: Any) -> None:
    plane = await start_plane(registries=2)
    answers = await asyncio.gather(
        *(
            stub.Register(registry_pb2.RegisterRequest(engine=new_engine()), timeout=CALL_S)
            for stub in plane.registries
            for _ in range(3)
        )
    )
    stored = await get(plane)
    await plane.registry.KeepAlive(keep_alive(stored), timeout=CALL_S)
    losers = [answer.engine for answer in answers if answer.engine != stored]
    assert len(losers) == len(answers) - 1
    for engine in losers:
        assert await failure(plane.registry.KeepAlive(keep_alive(engine), timeout=CALL_S)) == (
            grpc.StatusCode.NOT_FOUND,
            "SESSION_LOST",
        )


async def test_deregistering_takes_record_and_leases_away_at_once(plane: ControlPlane) -> None:
    engine = await plane.register()
    await plane.lease.Grant(grant_request(engine), timeout=CALL_S)
    request = registry_pb2.DeregisterRequest(session_id=engine.session_id)
    await plane.registry.Deregister(request, timeout=CALL_S)
    get_lease = lease_pb2.GetLeaseRequest(conversation=conversation())
    assert await failure(plane.lease.GetLease(get_lease, timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "LEASE_NOT_FOUND",
    )
    assert await failure(get(plane)) == (grpc.StatusCode.NOT_FOUND, "ENGINE_NOT_FOUND")
    await plane.registry.Deregister(request, timeout=CALL_S)  # again: not an error


# Draining


async def test_a_draining_engine_says_so_and_is_not_read_from(plane: ControlPlane) -> None:
    engine = await plane.register()
    await plane.lease.Grant(grant_request(engine), timeout=CALL_S)
    request = registry_pb2.DrainRequest(role=DECODE, engine_id="decode-0")
    for _ in range(2):
        drained = await plane.registry.Drain(request, timeout=CALL_S)
        assert drained.state == registry_pb2.ENGINE_STATE_DRAINING
    told = await plane.registry.KeepAlive(keep_alive(engine), timeout=CALL_S)
    assert told.state == registry_pb2.ENGINE_STATE_DRAINING

    async def is_not_read_from() -> bool:
        answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
        return bool(answer.outcome == common_pb2.OUTCOME_MISS_ENGINE)

    await until(is_not_read_from, 2.0)


async def test_draining_lasts_over_a_new_session_but_not_over_a_restart(
    plane: ControlPlane,
) -> None:
    engine = await plane.register()
    request = registry_pb2.DrainRequest(role=DECODE, engine_id="decode-0")
    await plane.registry.Drain(request, timeout=CALL_S)
    again = await plane.register(incarnation=engine.incarnation)
    assert again.state == registry_pb2.ENGINE_STATE_DRAINING
    restarted = await plane.register()
    assert restarted.state == registry_pb2.ENGINE_STATE_SERVING


async def test_draining_an_unknown_engine_says_how_to_find_the_known(plane: ControlPlane) -> None:
    request = registry_pb2.DrainRequest(role=DECODE, engine_id="nobody")
    with pytest.raises(grpc.aio.AioRpcError, match="`kvlease engines` lists") as caught:
        await plane.registry.Drain(request, timeout=CALL_S)
    assert rpc.reason_of(caught.value) == "ENGINE_NOT_FOUND"


# Lists and watches


async def test_engines_are_listed_by_role_then_name_in_pages(plane: ControlPlane) -> None:
    for name in ("b", "a", "c"):
        await plane.register(engine_id=name)
        await plane.register(engine_id=name, role=PREFILL, model="other")
    seen = []
    token = ""
    while True:
        answer = await plane.registry.ListEngines(
            registry_pb2.ListEnginesRequest(page_size=4, page_token=token), timeout=CALL_S
        )
        seen += [(engine.role, engine.engine_id) for engine in answer.engines]
        token = answer.next_page_token
        if not token:
            break
        assert len(answer.engines) == 4
    assert seen == [(role, name) for role in (DECODE, PREFILL) for name in "abc"]
    only = await plane.registry.ListEngines(
        registry_pb2.ListEnginesRequest(model="other", role=PREFILL, page_size=3), timeout=CALL_S
    )
    assert [engine.engine_id for engine in only.engines] == ["a", "b", "c"]
    assert only.next_page_token == ""


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        ("ListEngines", lambda: registry_pb2.ListEnginesRequest(role=NO_ROLE)),
        ("WatchEngines", lambda: registry_pb2.WatchEnginesRequest(role=NO_ROLE)),
        ("GetEngine", lambda: registry_pb2.GetEngineRequest(role=NO_ROLE, engine_id="a")),
        ("Drain", lambda: registry_pb2.DrainRequest(role=NO_ROLE, engine_id="a")),
        ("Register", lambda: registry_pb2.RegisterRequest(engine=new_engine(role=NO_ROLE))),
        ("KeepAlive", lambda: keep_alive(new_engine(role=NO_ROLE))),
    ],
)
async def test_a_role_that_there_is_not_is_refused_by_name(
    plane: ControlPlane, method: str, request_of: Callable[[], Any]
) -> None:
    call = getattr(plane.registry, method)(request_of(), timeout=CALL_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method == "WatchEngines" else call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "role is 77: give ENGINE_ROLE_PREFILL or ENGINE_ROLE_DECODE" in (
        caught.value.details() or ""
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_token": "nonsense"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": "bm9uc2Vuc2U="}, "INVALID_PAGE_TOKEN"),
        ({"page_size": -1}, "INVALID_PAGE_SIZE"),
    ],
)
async def test_a_page_that_cannot_be_is_refused(
    plane: ControlPlane, fields: dict[str, Any], reason: str
) -> None:
    request = registry_pb2.ListEnginesRequest(**fields)
    assert await failure(plane.registry.ListEngines(request, timeout=CALL_S)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        reason,
    )


async def test_a_watch_tells_what_is_there_and_then_what_changes(start_plane: Any) -> None:
    plane = await start_plane(registries=2)
    first = await plane.register(engine_id="d0")
    await plane.register(engine_id="p0", role=PREFILL)
    request = registry_pb2.WatchEnginesRequest(role=DECODE)
    # Through the other replica, at once: it must know of what this one has just stored.
    async with watching(plane.registries[1].WatchEngines(request)) as take:
        there, synced = await take(2)
        assert (there.kind, there.engine) == (UPSERT, first)
        assert synced.kind == SYNCED

        second = await plane.register(engine_id="d1")
        await plane.register(engine_id="p1", role=PREFILL)
        (new,) = await take(1)
        assert (new.kind, new.engine) == (UPSERT, second)

        drain = registry_pb2.DrainRequest(role=DECODE, engine_id="d1")
        await plane.registry.Drain(drain, timeout=CALL_S)
        (changed,) = await take(1)
        assert changed.kind == UPSERT
        assert changed.engine.state == registry_pb2.ENGINE_STATE_DRAINING

        gone = registry_pb2.DeregisterRequest(session_id=second.session_id)
        await plane.registry.Deregister(gone, timeout=CALL_S)
        (deleted,) = await take(1)
        assert (deleted.kind, deleted.engine.incarnation) == (DELETE, second.incarnation)


async def test_a_watch_of_a_model_sees_an_engine_leave_it(plane: ControlPlane) -> None:
    await plane.register(engine_id="d0", model="qwen")
    request = registry_pb2.WatchEnginesRequest(model="qwen")
    async with watching(plane.registry.WatchEngines(request)) as take:
        await take(2)
        await plane.register(engine_id="d0", model="another")
        (event,) = await take(1)
        assert (event.kind, event.engine.engine_id) == (DELETE, "d0")


async def test_watches_end_cleanly_when_the_registry_stops(plane: ControlPlane) -> None:
    call = plane.registry.WatchEngines(registry_pb2.WatchEnginesRequest())
    assert (await call.read()).kind == SYNCED
    started = time.monotonic()
    await plane.stops["registry"][0]()
    assert time.monotonic() - started < 2.0
    assert await call.read() is END
    assert await call.code() is grpc.StatusCode.OK


async def test_what_retention_costs_adds_up_over_time(plane: ControlPlane) -> None:
    def shown(what: str) -> float | None:
        labels = {"role": "decode", "engine_id": "keeps", "model": "qwen"}
        return REGISTRY.get_sample_value(f"kvlease_engine_{what}", labels)

    engine = await plane.register(engine_id="keeps")
    await until(lambda: shown("retained_blocks") == 0)
    assert shown("retained_block_seconds_total") == 0
    began = time.monotonic()
    usage = registry_pb2.BlockUsage(total_blocks=100, free_blocks=60, retained_blocks=30)
    await plane.registry.KeepAlive(keep_alive(engine, usage=usage), timeout=CALL_S)
    await until(lambda: shown("retained_blocks") == 30)
    await asyncio.sleep(0.05)  # whoever adds up learns of it a moment later
    kept_from = time.monotonic()
    await asyncio.sleep(0.2)
    at_least = 30 * (time.monotonic() - kept_from)
    usage.retained_blocks = 0
    await plane.registry.KeepAlive(keep_alive(engine, usage=usage), timeout=CALL_S)
    await until(lambda: shown("retained_blocks") == 0)
    await asyncio.sleep(0.05)
    total = shown("retained_block_seconds_total")
    assert total is not None
    assert at_least <= total <= 30 * (time.monotonic() - began)
    await asyncio.sleep(0.05)
    assert shown("retained_block_seconds_total") == total
    # an engine that is gone is not shown
    gone = registry_pb2.DeregisterRequest(session_id=engine.session_id)
    await plane.registry.Deregister(gone, timeout=CALL_S)
    await until(lambda: shown("retained_blocks") is None)
    assert shown("retained_block_seconds_total") is None


async def test_session_losses_are_counted_and_orderly_ends_are_not(plane: ControlPlane) -> None:
    def count(what: str, engine_id: str) -> float:
        labels = {"role": "decode", "engine_id": engine_id}
        return REGISTRY.get_sample_value(f"kvlease_engine_{what}_total", labels) or 0.0

    names = ("leaves", "restarts")
    lost = {name: count("sessions_lost", name) for name in names}
    opened = {name: count("registrations", name) for name in names}
    leaving = await plane.register(engine_id="leaves")
    await plane.register(engine_id="restarts")
    request = registry_pb2.WatchEnginesRequest()
    async with watching(plane.registry.WatchEngines(request)) as take:
        await take(3)
        gone = registry_pb2.DeregisterRequest(session_id=leaving.session_id)
        await plane.registry.Deregister(gone, timeout=CALL_S)
        await plane.register(engine_id="restarts")
        await until(lambda: count("sessions_lost", "restarts") > lost["restarts"])
        await take(4)  # draining, deleted, deleted, new
    assert {name: count("sessions_lost", name) - lost[name] for name in names} == {
        "leaves": 0,
        "restarts": 1,
    }
    assert {name: count("registrations", name) - opened[name] for name in names} == {
        "leaves": 1,
        "restarts": 2,
    }


# Routers


async def test_routers_are_listed_by_start_until_their_session_ends(start_plane: Any) -> None:
    plane = await start_plane(session_ttl=2, registries=2)

    def replica(name: str, started: int) -> registry_pb2.Replica:
        record = registry_pb2.Replica(
            replica_id=name, http_address="127.0.0.1:1", grpc_address="127.0.0.1:2"
        )
        record.start_time.FromSeconds(started)
        return record

    async def announce(stub: Any, record: registry_pb2.Replica) -> None:
        request = registry_pb2.AnnounceRouterRequest(replica=record)
        answer = await stub.AnnounceRouter(request, timeout=CALL_S)
        assert answer.session_ttl.ToTimedelta().total_seconds() >= 2

    async def listed() -> list[str]:
        answer = await plane.registry.ListRouters(registry_pb2.ListRoutersRequest(), timeout=CALL_S)
        return [record.replica_id for record in answer.replicas]

    await announce(plane.registries[0], replica("late", 20))
    await announce(plane.registries[0], replica("early", 10))
    assert await listed() == ["early", "late"]
    ends = time.monotonic() + 3.5
    while time.monotonic() < ends:
        # Through whichever replica: which session is whose stands in the store.
        await announce(plane.registries[1], replica("late", 20))
        await asyncio.sleep(0.4)
    await until(lambda: _equals(listed, ["late"]))


async def _equals(call: Any, expected: list[str]) -> bool:
    return bool(await call() == expected)


async def test_an_incomplete_replica_is_refused(plane: ControlPlane) -> None:
    request = registry_pb2.AnnounceRouterRequest(replica=registry_pb2.Replica(replica_id="r"))
    assert await failure(plane.registry.AnnounceRouter(request, timeout=CALL_S)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REPLICA",
    )
