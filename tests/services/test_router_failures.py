"""What goes wrong around a turn, and that the client does not notice where it need not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import pytest
from router_stack import Stack, events, running, running_pair, until
from sim_engine import Cut, Fault, Hang, SimEngine, Slow, Status

from kvlease.serving import MARGIN_S
from kvlease.store.base import Committed, Conflict, StoreUnavailable, Write
from kvlease.store.memory import MemoryStore
from kvlease.v1 import registry_pb2, registry_pb2_grpc

CHAT = "/v1/chat/completions"


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """One prefill and one decode engine."""
    async with running_pair(prefill_timeout=0.5) as made:
        yield made


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [], "conversation_id": "c", **fields}


async def ask(stack: Stack, **fields: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    async with stack.client.post(stack.url + CHAT, json=chat(**fields)) as response:
        return response, await response.read()


def outcome(response: aiohttp.ClientResponse) -> tuple[int, str]:
    return response.status, response.headers["x-kvlease-outcome"]


def served(*engines: SimEngine) -> list[int]:
    return [len(engine.seen) for engine in engines]


# --- prefill engines --------------------------------------------------------------------


@pytest.mark.parametrize("fault", [None, Status(500), Cut(before_head=True)])
async def test_another_prefill_engine_takes_over(stack: Stack, fault: Fault | None) -> None:
    engines = [stack.engines["prefill-0"], await stack.add("prefill", "prefill-1")]
    await ask(stack)
    preferred = max(engines, key=lambda engine: len(engine.seen))
    if fault is None:
        await preferred.kill()
    else:
        preferred.faults.append(fault)

    response, _ = await ask(stack)

    assert outcome(response) == (200, "miss_no_lease")
    assert sorted(served(*engines)) == ([1, 1] if fault is None else [1, 2])


async def test_a_prefill_that_is_tried_again_has_a_request_id_of_its_own(stack: Stack) -> None:
    first, second = stack.engines["prefill-0"], await stack.add("prefill", "prefill-1")
    first.faults.append(Status(503))
    second.faults.append(Status(503))
    headers = {"X-Request-Id": "mine"}

    async with stack.client.post(stack.url + CHAT, json=chat(), headers=headers) as response:
        await response.read()

    asked = sorted([*first.seen, *second.seen], key=lambda seen: seen.began)
    assert [seen.headers["X-Request-Id"] for seen in asked] == ["mine", "mine-r1"]
    # Both have failed: the decode engine computes, under an id that no engine has seen.
    assert outcome(response) == (200, "miss_engine")
    (decoded,) = stack.engines["decode-0"].seen
    assert decoded.headers["X-Request-Id"] == "mine-r2"


async def test_without_a_prefill_engine_the_decode_engine_computes_and_grants(
    stack: Stack,
) -> None:
    await stack.engines["prefill-0"].kill()

    response, _ = await ask(stack)

    assert outcome(response) == (200, "miss_engine")
    (decoded,) = stack.engines["decode-0"].seen
    assert decoded.kv["do_remote_prefill"] is False
    assert "remote_block_ids" not in decoded.kv
    assert decoded.told["conversation_id"] == "c"
    sample = 'kvlease_engine_errors_total{engine_id="prefill-0",reason="refused",role="prefill"}'
    assert await stack.metric(sample) == 1


async def test_a_prefill_engine_that_hangs_costs_its_deadline_and_no_error(stack: Stack) -> None:
    prefill = stack.engines["prefill-0"]
    prefill.faults.append(Hang())

    began = time.monotonic()
    response, _ = await ask(stack)

    assert outcome(response) == (200, "miss_engine")
    assert 0.5 <= time.monotonic() - began < 1.5
    await until(lambda: prefill.seen[0].aborted, "the prefill engine was not told to stop")


async def test_a_connection_that_the_only_prefill_engine_closes_is_tried_once_more(
    stack: Stack,
) -> None:
    stack.engines["prefill-0"].faults.append(Cut(before_head=True))

    response, _ = await ask(stack)

    assert outcome(response) == (200, "miss_no_lease")
    assert served(stack.engines["prefill-0"]) == [2]


async def test_a_prefill_engine_that_hands_nothing_over_leaves_the_prompt_to_decode(
    stack: Stack,
) -> None:
    stack.engines["prefill-0"].hands_over = False

    response, _ = await ask(stack)

    assert outcome(response) == (200, "off")
    assert stack.engines["decode-0"].seen[0].kv["do_remote_prefill"] is False


async def test_a_request_that_kills_its_engines_does_not_go_through_all_of_them(
    stack: Stack,
) -> None:
    engines = [stack.engines["prefill-0"]]
    engines += [await stack.add("prefill", f"prefill-{i}") for i in range(1, 6)]
    for engine in engines:
        engine.fault = Status(500)

    response, _ = await ask(stack)

    assert outcome(response) == (200, "miss_engine")
    assert sum(served(*engines)) == 3


# --- decode engines ---------------------------------------------------------------------


async def test_a_decode_engine_that_is_gone_is_replaced_with_the_same_handoff(
    stack: Stack,
) -> None:
    gone, other = stack.engines["decode-0"], await stack.add("decode", "decode-1")
    await ask(stack)
    await stack.grant(gone, "c", turn=1)
    prefilled = len(stack.engines["prefill-0"].seen)
    before = len(other.seen)
    await gone.kill()  # its session is still there

    response, raw = await ask(stack, stream=True)

    assert response.status == 200
    assert events(raw)[-1] == "[DONE]"
    assert len(stack.engines["prefill-0"].seen) == prefilled + 1
    assert len(other.seen) == before + 1
    assert other.seen[-1].kv["remote_request_id"] == f"req-{prefilled + 1}"


async def test_a_dead_decode_engine_is_not_tried_by_every_turn(stack: Stack) -> None:
    gone, _ = stack.engines["decode-0"], await stack.add("decode", "decode-1")
    await ask(stack)
    await stack.grant(gone, "c", turn=1)
    await gone.kill()
    refusals = 'kvlease_engine_errors_total{engine_id="decode-0",reason="refused",role="decode"}'

    for _ in range(5):
        response, _ = await ask(stack)
        assert response.status == 200

    assert await stack.metric(refusals) == 1


@pytest.mark.parametrize("fault", [Cut(before_head=True), Cut(chunks=0), Status(500)])
async def test_a_decode_engine_that_fails_before_its_first_byte_has_the_turn_done_again(
    stack: Stack, fault: Fault
) -> None:
    prefill = stack.engines["prefill-0"]
    first, second = stack.engines["decode-0"], await stack.add("decode", "decode-1")
    first.faults.append(fault)
    second.faults.append(fault)
    first_try = [*served(prefill, first, second)]

    response, raw = await ask(stack, stream=True)

    # Whichever was first has failed; the other one fails too, and nobody is left.
    assert first_try == [0, 0, 0]
    assert served(prefill, first, second) == [2, 1, 1]
    assert response.status >= 500
    assert b"[DONE]" not in raw
    used = [engine.seen[0].kv["remote_request_id"] for engine in (first, second)]
    assert sorted(used) == ["req-1", "req-2"]  # blocks that may have been freed are not read

    response, raw = await ask(stack, stream=True)
    assert response.status == 200
    assert events(raw)[-1] == "[DONE]"


async def test_one_failure_before_the_first_byte_is_not_seen_by_the_client(stack: Stack) -> None:
    engines = [stack.engines["decode-0"], await stack.add("decode", "decode-1")]
    await ask(stack)
    await stack.grant(engines[0], "c", turn=1)
    engines[0].faults.append(Cut(chunks=0))

    response, raw = await ask(stack, stream=True)

    assert response.status == 200
    assert events(raw)[-1] == "[DONE]"
    assert raw.count(b"[DONE]") == 1
    assert response.headers["x-kvlease-turn"] == "2"


async def test_the_only_decode_engine_gets_a_second_chance_if_it_accepts_connections(
    stack: Stack,
) -> None:
    stack.engines["decode-0"].faults.append(Cut(before_head=True))

    response, _ = await ask(stack)

    assert response.status == 200
    assert served(stack.engines["prefill-0"], stack.engines["decode-0"]) == [2, 2]


async def test_the_decode_engine_s_server_error_is_passed_on_if_there_is_no_other(
    stack: Stack,
) -> None:
    fault = Status(500, {"error": {"message": "out of memory"}})
    stack.engines["decode-0"].faults.append(fault)

    async with stack.client.post(stack.url + CHAT, json=chat()) as response:
        assert (response.status, await response.json()) == (500, fault.body)


async def test_with_all_decode_engines_gone_the_client_is_told_what_to_do(stack: Stack) -> None:
    await stack.engines["decode-0"].kill()

    async with stack.client.post(stack.url + CHAT, json=chat()) as response:
        answer = await response.json()

    assert response.status == 503
    assert "decode-0 does not accept connections" in answer["error"]["message"]
    assert answer["error"]["code"] == "no_decode_engine"


async def test_no_prompt_is_computed_for_decode_engines_that_are_known_to_be_gone(
    stack: Stack,
) -> None:
    await stack.engines["decode-0"].kill()
    await ask_raw(stack)  # now it is known

    status, answer = await ask_raw(stack)

    assert status == 503
    assert "start a decode engine" in answer["error"]["message"]
    assert served(stack.engines["prefill-0"]) == [1]


async def ask_raw(stack: Stack) -> tuple[int, Any]:
    async with stack.client.post(stack.url + CHAT, json=chat()) as response:
        return response.status, await response.json()


async def test_a_stream_that_breaks_off_ends_with_an_error_event(stack: Stack) -> None:
    stack.engines["decode-0"].faults.append(Cut(chunks=3))

    response, raw = await ask(stack, stream=True)

    assert response.status == 200
    *content, last = events(raw)
    assert len(content) == 3
    assert last["error"]["code"] == "engine_lost"
    assert "Send the request again" in last["error"]["message"]
    labels = 'end="failed",model="sim",outcome="miss_no_lease"'
    assert await stack.metric(f"kvlease_turns_total{{{labels}}}") == 1


@pytest.mark.parametrize(("fault", "stream"), [(Cut(chunks=3, inside=True), True), (Cut(), False)])
async def test_an_answer_that_breaks_off_within_its_content_is_cut(
    stack: Stack, fault: Fault, stream: bool
) -> None:
    stack.engines["decode-0"].faults.append(fault)

    with pytest.raises(aiohttp.ClientError):
        await ask(stack, stream=stream)


async def test_comments_before_the_first_event_do_not_tie_a_turn_to_its_engine(
    stack: Stack,
) -> None:
    engines = [stack.engines["decode-0"], await stack.add("decode", "decode-1")]
    await ask(stack)
    await stack.grant(engines[0], "c", turn=1)
    engines[0].faults.append(Cut(chunks=0, comments=2))

    response, raw = await ask(stack, stream=True)

    assert response.status == 200
    assert raw.startswith(b": keep-alive\n\n")
    assert events(raw)[-1] == "[DONE]"
    labels = 'model="sim",outcome="miss_no_lease"'
    assert await stack.metric(f"kvlease_turn_ttft_seconds_count{{{labels}}}") == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_hangs_is_left_when_its_session_ends(role: Any) -> None:
    async with running(prefill_timeout=60) as stack:
        names = {"prefill": ["prefill-0", "prefill-1"], "decode": ["decode-0", "decode-1"]}
        for kind, engine_ids in names.items():
            for engine_id in engine_ids:
                await stack.add(kind, engine_id)  # type: ignore[arg-type]
        engines = [stack.engines[name] for name in names[role]]
        for engine in engines:
            engine.fault = Hang()

        turn = asyncio.ensure_future(ask(stack))
        await until(lambda: any(served(*engines)), "no engine was asked")
        hung = next(engine for engine in engines if engine.seen)
        (other,) = (engine for engine in engines if engine is not hung)
        other.fault = None
        await hung.deregister(stack.registry_channel)

        response, _ = await turn
        assert response.status == 200
        assert other.seen


# --- the client goes away ---------------------------------------------------------------


async def leave(stack: Stack, **fields: Any) -> None:
    """Asks, and breaks the connection off once an engine has the request."""
    before = sum(served(*stack.engines.values()))
    turn = asyncio.ensure_future(ask(stack, **fields))
    await until(lambda: sum(served(*stack.engines.values())) > before, "no engine was asked")
    await asyncio.sleep(0.05)
    turn.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turn


async def test_a_client_that_leaves_during_prefill_ends_it_and_there_is_no_decode(
    stack: Stack,
) -> None:
    prefill = stack.engines["prefill-0"]
    prefill.fault = Hang()

    await leave(stack)

    await until(lambda: prefill.seen[0].aborted, "the prefill goes on", timeout_s=0.4)
    assert served(stack.engines["decode-0"]) == [0]
    await until(lambda: _disconnected(stack), "the turn is not counted")
    assert await stack.metric("kvlease_turns_in_flight") == 0


@pytest.mark.parametrize(
    ("fault", "stream"), [(Hang(), True), (Hang(), False), (Slow(chunk_s=5.0), True)]
)
async def test_a_client_that_leaves_during_decode_ends_it(
    stack: Stack, fault: Fault, stream: bool
) -> None:
    decode = stack.engines["decode-0"]
    decode.fault = fault
    turn = asyncio.ensure_future(ask(stack, stream=stream))
    await until(lambda: decode.seen, "the decode engine was not asked")
    await asyncio.sleep(0.05)

    turn.cancel()

    await until(lambda: decode.seen[0].aborted, "the decode goes on", timeout_s=1.0)
    await until(lambda: _disconnected(stack), "the turn is not counted")
    with contextlib.suppress(asyncio.CancelledError):
        await turn


async def test_a_client_that_leaves_while_it_sends_its_request_costs_no_engine(
    stack: Stack,
) -> None:
    host, port = stack.router.addresses["router_http"].split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await until(lambda: _in_flight(stack, 1), "the request did not arrive")

    writer.transport.abort()

    await until(lambda: _in_flight(stack, 0), "the turn goes on")
    assert served(*stack.engines.values()) == [0, 0]


async def _in_flight(stack: Stack, count: int) -> bool:
    return await stack.metric("kvlease_turns_in_flight") == count


async def _disconnected(stack: Stack) -> bool:
    return 'kvlease_turns_total{end="disconnected"' in await stack.metrics()


# --- the control plane ------------------------------------------------------------------


async def test_without_the_lease_service_turns_are_served_and_counted_again_later(
    stack: Stack,
) -> None:
    await ask(stack)
    await stack.lease.stop()

    began = time.monotonic()
    for _ in range(5):
        response, _ = await ask(stack)
        assert (response.status, response.headers["x-kvlease-turn"]) == (200, "0")
    assert time.monotonic() - began < 0.5

    await stack.start("lease")
    await until(lambda: _counted(stack), "turns are not counted again", timeout_s=5)


async def _counted(stack: Stack) -> bool:
    response, _ = await ask(stack)
    return int(response.headers["x-kvlease-turn"]) > 1


class StuckStore(MemoryStore):
    """A store that takes writes and does not answer before its own deadline, once it is
    stuck."""

    stuck = False
    deadline_s = 1.5

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        if self.stuck:
            await asyncio.sleep(self.deadline_s)
            raise StoreUnavailable("simulated")
        return await super().commit(expect, writes)


async def test_a_lease_service_that_hangs_costs_its_deadline_twice_not_every_turn() -> None:
    store = StuckStore()
    async with running(store, start_turn_timeout=0.2, session_ttl=15) as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        store.stuck = True

        times = []
        for _ in range(6):
            began = time.monotonic()
            response, _ = await ask(stack)
            times.append(time.monotonic() - began)
            assert (response.status, response.headers["x-kvlease-turn"]) == (200, "0")

        # The service gives up a moment before the caller's deadline.
        assert sum(seconds >= 0.2 - 1.5 * MARGIN_S for seconds in times) == 2
        assert max(times[2:]) < 0.1
        assert await stack.metric("kvlease_start_turn_failures_total") == 6
        store.stuck = False
        await until(lambda: _counted(stack), "turns are not counted again", timeout_s=8)


async def _ready(stack: Stack) -> bool:
    async with stack.client.get(f"{stack.url}/ready") as response:
        return response.status == 200


async def test_without_the_registry_the_last_known_engines_serve(stack: Stack) -> None:
    await stack.registry.stop()

    response, _ = await ask(stack)
    assert response.status == 200

    await stack.start("registry")
    await stack.add("decode", "decode-1")  # news arrive again


async def test_a_registry_that_has_forgotten_its_engines_fails_no_turn() -> None:
    async with running(session_ttl=15) as stack:  # engines renew only every 5 s
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        await stack.registry.stop()
        empty = MemoryStore()
        again = await stack.start("registry", empty)
        await until(lambda: _departed(stack), "the router did not see the new registry")

        assert await _ready(stack)
        response, _ = await ask(stack)

        assert response.status == 200
        await again.stop()
        await empty.close()


async def _departed(stack: Stack, count: int = 2) -> bool:
    return (await stack.metrics()).count('state="departed"') == count


async def test_a_router_that_is_started_anew_knows_the_conversation(stack: Stack) -> None:
    holder = await stack.add("decode", "decode-1")
    await ask(stack)
    await stack.grant(holder, "c", turn=1)
    before = len(holder.seen)
    await stack.router.stop()
    await stack.start("router")
    await until(lambda: _ready(stack), "the new router is not ready")

    response, _ = await ask(stack)

    assert response.headers["x-kvlease-turn"] == "2"
    assert len(holder.seen) == before + 1


async def test_a_draining_engine_gets_no_new_turns(stack: Stack) -> None:
    draining, other = stack.engines["decode-0"], await stack.add("decode", "decode-1")
    await ask(stack)
    await stack.grant(draining, "c", turn=1)
    before = len(draining.seen)
    await drain(stack, registry_pb2.ENGINE_ROLE_DECODE, "decode-0")

    await ask(stack)

    assert len(draining.seen) == before
    assert other.seen


async def drain(stack: Stack, role: Any, engine_id: str) -> None:
    """The router knows it when this returns."""
    stub = registry_pb2_grpc.RegistryStub(stack.registry_channel)
    await stub.Drain(registry_pb2.DrainRequest(role=role, engine_id=engine_id), timeout=5)
    await until(lambda: _draining(stack), "the router does not know it")


async def _draining(stack: Stack) -> bool:
    return 'state="draining"' in await stack.metrics()


# --- ready is what a turn would meet ----------------------------------------------------


async def ready(stack: Stack) -> tuple[int, Any]:
    async with stack.client.get(f"{stack.url}/ready") as response:
        return response.status, await response.json()


async def test_not_ready_as_soon_as_the_only_decode_engine_accepts_no_connection() -> None:
    async with running(session_ttl=60) as stack:  # its session outlives it
        await stack.add("prefill", "prefill-0")
        engine = await stack.add("decode", "decode-0")
        assert (await ready(stack))[0] == 200
        await engine.kill()

        status, answer = await ready(stack)

        assert (status, (await ask_raw(stack))[0]) == (503, 503)
        message = answer["error"]["message"]
        assert "no connection is accepted by decode-0" in message
        assert message.endswith("Start a decode engine.")
        assert served(stack.engines["prefill-0"]) == [0]  # nor is a prompt computed any more

        await stack.add("decode", "decode-1")
        assert ((await ready(stack))[0], (await ask_raw(stack))[0]) == (200, 200)


async def test_not_ready_once_the_only_decode_engine_s_session_has_ended(stack: Stack) -> None:
    await stack.engines["decode-0"].kill()
    await until(lambda: _departed(stack, 1), "its session does not end")

    assert ((await ready(stack))[0], (await ask_raw(stack))[0]) == (503, 503)


async def test_not_ready_while_all_decode_engines_drain_and_they_are_named(stack: Stack) -> None:
    await drain(stack, registry_pb2.ENGINE_ROLE_DECODE, "decode-0")

    for status, answer in (await ready(stack), await ask_raw(stack)):
        assert status == 503
        assert "are draining (decode-0)" in answer["error"]["message"]


async def test_ready_without_a_prefill_engine_that_was_there_since_turns_are_answered(
    stack: Stack,
) -> None:
    await drain(stack, registry_pb2.ENGINE_ROLE_PREFILL, "prefill-0")

    status, answer = await ready(stack)
    response, _ = await ask(stack)

    assert (status, outcome(response)) == (200, (200, "miss_engine"))
    assert answer["draining"] == ["prefill-0"]
    (warning,) = answer["warnings"]
    assert "all prefill engines of this model are draining (prefill-0)" in warning

    await stack.engines["prefill-0"].kill()
    await until(lambda: _departed(stack, 1), "its session does not end")
    status, answer = await ready(stack)
    response, _ = await ask(stack)
    assert (status, outcome(response)) == (200, (200, "miss_engine"))
    assert answer["warnings"]


async def test_a_restarted_engine_replaces_its_old_incarnation(stack: Stack) -> None:
    decode = stack.engines["decode-0"]
    await ask(stack)
    await decode.kill()
    old, decode.incarnation = decode.incarnation, "new"
    await decode.start()
    await decode.register(stack.registry_channel)
    await stack.until_known("decode-0")

    response, _ = await ask(stack)

    assert response.status == 200
    assert old not in await stack.metrics()


async def test_a_router_that_stops_lets_a_running_turn_end(stack: Stack) -> None:
    stack.engines["decode-0"].fault = Slow(chunk_s=0.1)
    turn = asyncio.ensure_future(ask(stack, stream=True))
    await until(lambda: stack.engines["decode-0"].seen, "the decode engine was not asked")

    await stack.router.stop()

    response, raw = await turn
    assert response.status == 200
    assert events(raw)[-1] == "[DONE]"
