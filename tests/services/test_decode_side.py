"""A decode engine's leases from its own side: granted, renewed, given up and ended, against
a real lease service. Only vLLM's block pool is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from contract.tcp_proxy import TcpProxy
from control_plane import (
    ControlPlane,
    claim_request,
    complete_request,
    conversation,
    until,
    watching,
)
from decode_engine import DecodeEngine

from kvlease import times
from kvlease.v1 import lease_pb2, registry_pb2
from kvlease_connector import grants
from kvlease_connector.decode import PATIENCE_S
from kvlease_connector.retention import Phase
from kvlease_connector.revocations import SURE_S
from kvlease_connector.served import other_models

GRACE_S = 2.0
SESSION_S = 3

StartEngine = Callable[..., Awaitable[DecodeEngine]]


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    started = ControlPlane(
        {"session_ttl": SESSION_S, "claim_grace": GRACE_S, "retention_ttl": 60, "claim_margin": 0}
    )
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def proxies(plane: ControlPlane) -> AsyncIterator[dict[str, TcpProxy]]:
    """The engine's way to the registry and to the lease service."""
    made = {
        name: TcpProxy(int(addresses[0].rpartition(":")[2]))
        for name, addresses in plane.addresses.items()
    }
    for proxy in made.values():
        await proxy.start()
    yield made
    for proxy in made.values():
        await proxy.stop()


@pytest.fixture
async def start_engine(
    plane: ControlPlane, proxies: dict[str, TcpProxy]
) -> AsyncIterator[StartEngine]:
    started: list[DecodeEngine] = []

    async def start(total_blocks: int = 100, **settings: Any) -> DecodeEngine:
        ways = {f"{name}_endpoint": proxy.endpoint for name, proxy in proxies.items()}
        engine = DecodeEngine(plane.settings.model_copy(update={**ways, **settings}), total_blocks)
        await engine.start()
        started.append(engine)
        await until(lambda: engine.has_session)
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
async def engine(start_engine: StartEngine) -> DecodeEngine:
    """One with 100 blocks of 4 tokens, of which leases may take 50."""
    return await start_engine()


async def test_an_engine_registers_the_adapters_that_its_http_server_lists(
    plane: ControlPlane,
) -> None:
    addresses = {f"{name}_endpoint": value[0] for name, value in plane.addresses.items()}
    engine = DecodeEngine(
        plane.settings.model_copy(update=addresses), served=["qwen", "qwen-latest", "sql-adapter"]
    )
    await engine.start()
    try:
        await until(lambda: engine.has_session)
        request = registry_pb2.ListEnginesRequest(model="sql-adapter")
        (found,) = (await plane.registry.ListEngines(request, timeout=5)).engines
        assert (found.model, list(found.other_models)) == ("qwen", ["qwen-latest", "sql-adapter"])
    finally:
        await engine.stop()


async def test_an_engine_whose_models_are_not_told_registers_without_adapters() -> None:
    gone = registry_pb2.Engine(model="qwen", http_address="http://127.0.0.1:1")
    assert await other_models(gone) == []


async def granted(engine: DecodeEngine, *names: str) -> None:
    """Until these are held, as the engine knows."""
    await until(lambda: all(engine.phases.get(name) is Phase.HELD for name in names))


async def stored(plane: ControlPlane) -> dict[str, lease_pb2.Lease]:
    """The leases in the store."""
    answer = await plane.lease.ListLeases(lease_pb2.ListLeasesRequest(), timeout=5)
    return {lease.conversation.conversation_id: lease for lease in answer.leases}


async def claimed(plane: ControlPlane, name: str, num_tokens: int = 40) -> Any:
    """A reader's ticket."""
    request = claim_request(conversation(name), range(num_tokens))
    answer = await plane.lease.Claim(request, timeout=5)
    assert answer.ticket.ticket_id, answer.detail
    return answer


async def complete(plane: ControlPlane, answer: Any, name: str) -> None:
    await plane.lease.Complete(complete_request(answer, conversation(name)), timeout=5)


async def end(plane: ControlPlane, name: str) -> None:
    request = lease_pb2.EndConversationRequest(conversation=conversation(name))
    await plane.lease.EndConversation(request, timeout=5)


# --- from grant to end ------------------------------------------------------------------


async def test_a_turns_blocks_are_kept_and_shown(plane: ControlPlane, engine: DecodeEngine) -> None:
    engine.turn("c1", num_tokens=42)
    await granted(engine, "c1")

    lease = (await stored(plane))["c1"]
    assert (lease.num_tokens, lease.num_blocks) == (42, 11)
    assert engine.free == 89

    async def shown() -> bool:
        answer = await plane.registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5)
        usage = answer.engines[0].usage
        return (usage.total_blocks, usage.free_blocks, usage.retained_blocks) == (100, 89, 11)

    await until(shown, deadline_s=1.0)


async def test_an_end_frees_the_blocks_of_an_idle_engine_within_a_second(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1")
    await granted(engine, "c1")

    await end(plane, "c1")

    # no step is made: this is what is reported, and what the next request can have
    await until(lambda: engine.usage.free_blocks == 100, deadline_s=1.0)
    assert engine.usage.retained_blocks == engine.usage.retained_leases == 0
    assert engine.free == 100


async def test_an_end_waits_for_readers(plane: ControlPlane, engine: DecodeEngine) -> None:
    engine.turn("c1")
    await granted(engine, "c1")
    ticket = await claimed(plane, "c1")

    await end(plane, "c1")
    await until(lambda: engine.phases["c1"] is Phase.ENDED)
    assert engine.free == 90

    await complete(plane, ticket, "c1")
    await until(lambda: engine.free == 100, deadline_s=1.0)


async def test_a_new_grant_supersedes_the_old_one_at_once(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1", number=1)
    await granted(engine, "c1")
    first = (await stored(plane))["c1"].lease_id

    engine.turn("c1", num_tokens=60, number=2)

    await until(lambda: engine.free == 85, deadline_s=1.0)
    assert (await stored(plane))["c1"].lease_id != first
    assert engine.usage.retained_leases == 1


async def test_a_refused_grant_frees_its_blocks(plane: ControlPlane, engine: DecodeEngine) -> None:
    engine.turn("c1", number=2)
    await granted(engine, "c1")

    engine.turn("c1", number=1)  # an older turn finishes later

    await until(lambda: engine.free == 90, deadline_s=1.0)
    assert (await stored(plane))["c1"].turn == 2


async def test_the_last_turn_keeps_nothing(plane: ControlPlane, engine: DecodeEngine) -> None:
    engine.turn("c1", end=True)

    assert engine.free == 100
    assert engine.usage.retained_leases == 0


async def test_a_turn_can_ask_for_a_longer_retention(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1", retention_s=600.0)
    await granted(engine, "c1")

    lease = (await stored(plane))["c1"]
    kept_s = times.moment(lease.expire_time) - times.moment(lease.grant_time)
    assert kept_s == pytest.approx(600.0, abs=0.01)


async def test_blocks_are_free_when_the_retention_is_over(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1", retention_s=1.0)
    await granted(engine, "c1")
    began = time.monotonic()

    await until(lambda: engine.usage.free_blocks == 100)

    assert 0.9 < time.monotonic() - began < 2.0
    assert await stored(plane) == {}


async def test_a_renewed_lease_is_kept_for_longer(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1", retention_s=1.0)
    await granted(engine, "c1")
    began = time.monotonic()

    request = lease_pb2.RenewRequest(conversation=conversation("c1"), retention=times.duration(2.5))
    await plane.lease.Renew(request, timeout=5)

    await until(lambda: engine.free == 100)
    assert 2.3 < time.monotonic() - began < 4.0
    assert await stored(plane) == {}


# --- the budget -------------------------------------------------------------------------


async def test_a_turn_that_is_larger_than_the_budget_is_not_kept(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("small")
    await granted(engine, "small")

    engine.turn("large", num_tokens=204)  # 51 blocks

    assert engine.free == 90
    assert list(await stored(plane)) == ["small"]
    assert engine.usage.turns_over_budget == 1
    assert engine.usage.retention_budget_blocks == 50


async def test_a_full_budget_gives_the_cheapest_lease_up_for_a_new_one(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    names = [f"c{number}" for number in range(5)]
    for name in names:
        engine.turn(name)
        await granted(engine, name)
        await asyncio.sleep(0.01)
    assert engine.usage.retained_blocks == 50

    engine.turn("new")
    await granted(engine, "new")

    # the oldest has gone, in the store as well
    await until(lambda: engine.usage.retained_blocks == 50, deadline_s=1.0)
    assert set(await stored(plane)) == {*names[1:], "new"}
    assert engine.free == 50


async def test_a_conversations_next_turn_needs_no_more_budget_than_it_adds(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("other", num_tokens=80)
    first = engine.turn("c1", num_tokens=100)
    await granted(engine, "other", "c1")

    # 20 + 25 blocks are kept; the next turn has 30, of which 25 from the prefix cache
    engine.turn("c1", num_tokens=120, shared=first)
    await granted(engine, "c1", "other")

    await until(lambda: engine.usage.retained_blocks == 50, deadline_s=1.0)
    assert set(await stored(plane)) == {"other", "c1"}


async def test_a_lease_that_is_being_read_is_not_given_up(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("read", num_tokens=160)
    await granted(engine, "read")
    ticket = await claimed(plane, "read", 160)
    await until(lambda: engine.side._table.revocable() == [])

    engine.turn("new", num_tokens=80)  # does not fit beside it
    engine.side.make_room(100)

    assert engine.free == 60
    assert list(await stored(plane)) == ["read"]
    await complete(plane, ticket, "read")


async def test_a_lease_whose_turn_has_come_goes_first(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("waits")
    await granted(engine, "waits")
    await asyncio.sleep(0.05)
    engine.turn("comes")
    await granted(engine, "comes")
    # the younger one's turn comes and is read; its own lease will follow
    await complete(plane, await claimed(plane, "comes"), "comes")
    await until(lambda: any(kept.num_claims for kept in engine.side._kept.values()))
    await until(lambda: len(engine.side._table.revocable()) == 2)

    engine.side.make_room(81)

    await until(lambda: engine.free == 90, deadline_s=1.0)
    assert list(await stored(plane)) == ["waits"]


async def test_a_request_that_is_larger_than_what_is_free_gets_the_retained_blocks(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    for name in ("c1", "c2", "c3", "c4"):
        engine.turn(name)
    await granted(engine, "c1", "c2", "c3", "c4")
    assert engine.pool.allocate("request", 75) is None

    began = time.monotonic()
    assert engine.side.make_room(75, 0, "request")

    # two of four leases make room for it and for the reserve of 5 blocks
    await until(lambda: engine.free >= 75, deadline_s=1.0)
    assert time.monotonic() - began < 0.25
    assert engine.pool.allocate("request", 75) is not None
    assert len(await stored(plane)) == 2


async def test_a_request_that_still_waits_gets_room_for_its_cached_blocks_too(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1")
    await granted(engine, "c1")

    # Free blocks that are cached count as free until the request takes them.
    assert not engine.side.make_room(95, 20, "request")
    assert engine.side.make_room(95, 20, "request")

    await until(lambda: engine.free == 100, deadline_s=1.0)


async def test_a_request_that_waits_on_gets_everything(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    # given leases, and a request that fits but that vLLM does not admit
    engine.turn("c1")
    engine.turn("c2")
    await granted(engine, "c1", "c2")

    async def gone() -> bool:
        engine.side.make_room(10, 0, "request")
        return engine.free == 100

    began = time.monotonic()
    await until(gone, deadline_s=3.0)
    assert time.monotonic() - began > PATIENCE_S


async def test_blocks_that_a_running_request_uses_too_are_not_given_up_for_nothing(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    # given a lease whose blocks the conversation's next turn uses, and another one
    first = engine.turn("runs")
    await granted(engine, "runs")
    await asyncio.sleep(0.01)
    engine.turn("idle")
    await granted(engine, "idle")
    assert engine.pool.allocate("request", 20, shared=first) is not None

    engine.side.make_room(71)

    await until(lambda: engine.free == 80, deadline_s=1.0)
    assert list(await stored(plane)) == ["runs"]


async def test_a_free_reserve_is_kept(plane: ControlPlane, engine: DecodeEngine) -> None:
    engine.turn("c1")
    await granted(engine, "c1")
    assert engine.pool.allocate("request", 85) is not None
    assert engine.free == 5  # the reserve
    assert engine.pool.allocate("more", 1) is not None

    await until(lambda: engine.free == 14, deadline_s=1.0)


async def test_a_running_request_waits_for_blocks_that_come_back(
    plane: ControlPlane, engine: DecodeEngine
) -> None:
    engine.turn("c1")
    await granted(engine, "c1")
    assert engine.pool.allocate("running", 90) is not None
    assert engine.pool.allocate("more", 1) is None

    # when vLLM asks before it preempts
    began = time.monotonic()
    asked = 0
    while engine.pool.allocate("more", 1) is None:
        assert engine.side.room_is_coming(), "it would have been preempted"
        asked += 1
        await asyncio.sleep(0.001)
    # then a step or a few later the block is there
    assert time.monotonic() - began < 0.25
    assert asked >= 2
    # and with nothing left to free it says so
    assert engine.pool.allocate("rest", 9) is not None
    assert not engine.side.room_is_coming()


async def test_blocks_of_a_turn_that_has_just_ended_come_back_too(engine: DecodeEngine) -> None:
    # given a lease that is still being granted, and nothing else to free
    assert engine.pool.allocate("running", 90) is not None
    engine.turn("c1")
    assert engine.phases == {"c1": Phase.GRANTING}

    while engine.pool.allocate("more", 1) is None:
        assert engine.side.room_is_coming(), "it would have been preempted"
        await asyncio.sleep(0.001)


# --- when the lease service does not answer ---------------------------------------------


async def test_without_the_lease_service_nothing_is_waited_for(
    engine: DecodeEngine, proxies: dict[str, TcpProxy]
) -> None:
    # given retained blocks whose lease cannot be revoked
    engine.turn("c1")
    await granted(engine, "c1")
    await proxies["lease"].stop()
    assert engine.pool.allocate("running", 90) is not None

    # then a running request waits for a moment, and is then preempted
    began = time.monotonic()
    while engine.side.room_is_coming():
        assert time.monotonic() - began < 2 * SURE_S
        await asyncio.sleep(0.001)
    # and the blocks stay: the lease may be claimed
    assert engine.free == 0

    # when it answers again, they come back
    await proxies["lease"].start()
    await until(lambda: engine.free == 10)


async def test_without_the_lease_service_a_full_budget_keeps_nothing_more(
    engine: DecodeEngine, proxies: dict[str, TcpProxy]
) -> None:
    engine.turn("c1", num_tokens=200)
    await granted(engine, "c1")
    await proxies["lease"].stop()

    engine.turn("c2")  # c1 is revoked for it, which cannot be confirmed
    await asyncio.sleep(2 * SURE_S)
    engine.turn("c3")

    assert "c3" not in engine.phases
    assert engine.free == 40


async def test_the_blocks_of_a_lost_session_are_free_after_the_grace(
    engine: DecodeEngine, proxies: dict[str, TcpProxy]
) -> None:
    engine.turn("c1")
    await granted(engine, "c1")
    cut = time.monotonic()
    for proxy in proxies.values():
        await proxy.stop()

    await until(lambda: engine.phases["c1"] is Phase.ENDED)
    assert engine.free == 90
    await until(lambda: engine.free == 100)

    # not before the session's TTL, after the last renewal that was sent, and the grace
    assert time.monotonic() - cut > SESSION_S / 2 + GRACE_S
    engine.turn("c2")
    assert engine.free == 100, "without a session nothing is kept"


async def test_a_grant_whose_answer_is_lost_is_settled_by_asking_again(
    plane: ControlPlane,
    engine: DecodeEngine,
    proxies: dict[str, TcpProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grants, "CALL_TIMEOUT_S", 1.0)
    engine.turn("c0")
    await granted(engine, "c0")  # so there is a connection
    proxies["lease"].drop_responses = True
    engine.turn("c1")
    await until(lambda: _in_store(plane, "c1"))
    assert engine.phases == {"c0": Phase.HELD, "c1": Phase.GRANTING}

    proxies["lease"].cut()
    proxies["lease"].drop_responses = False

    await granted(engine, "c1")
    assert engine.free == 80


async def test_a_grant_that_arrives_after_it_was_given_up_is_refused(
    plane: ControlPlane,
    engine: DecodeEngine,
    proxies: dict[str, TcpProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grants, "GRANT_TRIES_S", 0.3)
    proxy = proxies["lease"]
    # given a grant that hangs in the network, and is given up
    proxy.hold_requests = True
    engine.turn("c1")
    await until(lambda: proxy.held_bytes > 0)
    late = proxy.cut_clients()
    await asyncio.sleep(0.5)
    proxy.hold_requests = False
    proxy.cut_clients()
    # then its blocks are free once it has been revoked
    await until(lambda: engine.free == 100)
    # and when it arrives, it is not stored
    async with watching(plane.lease.WatchLeases(lease_pb2.WatchLeasesRequest())) as take:
        await take(1)
        proxy.release(late)
        with pytest.raises(TimeoutError):
            await take(1, timeout_s=0.5)


async def _in_store(plane: ControlPlane, name: str) -> bool:
    return name in await stored(plane)
