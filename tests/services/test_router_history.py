"""What the router tells of turns, as GetConversation shows it. Engines are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from router_stack import Stack, running_pair, until
from sim_engine import Slow, Status

from kvlease.router import history
from kvlease.router.history import EndedTurn, Entry, TurnLog
from kvlease.router.leases import ServiceDown
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvlease.v1.lease_pb2 import ConversationInfo, TurnRecord

CHAT = "/v1/chat/completions"


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_pair() as made:
        yield made


async def ask(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "sim", "messages": [], "conversation_id": "c", **fields}
    async with stack.client.post(stack.url + CHAT, json=body, headers=headers) as response:
        await response.read()
        return response


async def conversation(stack: Stack, tenant: str = "default") -> ConversationInfo:
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    name = common_pb2.Conversation(tenant=tenant, model="sim", conversation_id="c")
    request = lease_pb2.GetConversationRequest(conversation=name)
    answer: ConversationInfo = await stub.GetConversation(request, timeout=5, wait_for_ready=True)
    return answer


async def told(stack: Stack, count: int, tenant: str = "default") -> list[TurnRecord]:
    found: list[TurnRecord] = []

    async def enough() -> bool:
        found[:] = (await conversation(stack, tenant)).turns
        return len(found) >= count

    await until(enough, f"only {len(found)} of {count} turns were recorded")
    return found


async def test_every_turn_is_told_with_its_facts(stack: Stack) -> None:
    prefill = stack.engines["prefill-0"]
    first = await ask(stack)
    prefill.report = {
        "outcome": "hit",
        "reused_tokens": 64,
        "prompt_tokens": 100,
        "detail": "64 of 90 kept tokens are proven equal",
        "handoff_ttl_s": 60.0,
    }
    second = await ask(stack)

    one, two = await told(stack, 2)

    assert (one.turn, two.turn) == (1, 2)
    assert one.outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    assert one.detail == "the conversation has no lease"
    assert one.trace_id == first.headers["x-kvlease-trace-id"]
    assert two.outcome == common_pb2.OUTCOME_HIT
    assert two.detail == "64 of 90 kept tokens are proven equal"
    assert (two.prompt_tokens, two.reused_tokens, two.computed_tokens) == (100, 64, 36)
    assert (two.prefill_engine_id, two.decode_engine_id) == ("prefill-0", "decode-0")
    assert two.end == lease_pb2.TURN_END_OK
    assert two.ttft.ToTimedelta().total_seconds() > 0
    assert two.trace_id == second.headers["x-kvlease-trace-id"]
    assert one.start_time.ToNanoseconds() < two.start_time.ToNanoseconds()


async def test_a_turn_that_fails_says_how(stack: Stack) -> None:
    stack.engines["decode-0"].fault = Status(500)
    await ask(stack)
    (turn,) = await told(stack, 1)
    assert turn.end == lease_pb2.TURN_END_FAILED
    assert turn.error == "the decode engine answered with status 500"
    assert not turn.HasField("ttft")


async def test_a_turn_that_no_engine_takes_is_told_too(stack: Stack) -> None:
    await stack.engines["decode-0"].deregister(stack.registry_channel)
    await stack.engines["decode-0"].kill()
    assert (await ask(stack)).status == 503
    (turn,) = await told(stack, 1)
    assert turn.end == lease_pb2.TURN_END_FAILED
    assert turn.outcome == common_pb2.OUTCOME_UNSPECIFIED
    assert "cannot be served" in turn.error


async def test_a_client_that_goes_away_is_told(stack: Stack) -> None:
    stack.engines["decode-0"].fault = Slow(head_s=30)
    turn_task = asyncio.create_task(ask(stack))
    await until(lambda: stack.engines["decode-0"].seen, "the turn did not reach the engine")
    turn_task.cancel()
    (turn,) = await told(stack, 1)
    assert turn.end == lease_pb2.TURN_END_DISCONNECTED


async def test_a_turn_that_asked_for_recomputation_says_so(stack: Stack) -> None:
    await ask(stack, headers={"x-kvlease-reuse": "off"})
    (turn,) = await told(stack, 1)
    assert turn.outcome == common_pb2.OUTCOME_OFF
    assert turn.detail == "the request said x-kvlease-reuse: off"


async def test_turns_of_no_conversation_are_not_recorded(stack: Stack) -> None:
    await ask(stack, conversation_id="")
    await ask(stack)
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    await told(stack, 1)
    answer = await stub.ListConversations(lease_pb2.ListConversationsRequest(), timeout=5)
    assert answer.total_size == 1


async def test_what_is_told_outlives_routers_and_lease_services(stack: Stack) -> None:
    await ask(stack)
    await stack.router.stop()  # it tells the rest before it stops
    await stack.lease.stop()
    await stack.start("lease")
    assert [turn.turn for turn in (await conversation(stack)).turns] == [1]
    await stack.start("router")
    await stack.until_known("prefill-0")
    await stack.until_known("decode-0")
    await ask(stack)
    assert [turn.turn for turn in await told(stack, 2)] == [1, 2]


async def test_turns_wait_while_the_lease_service_is_away(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RETRY_S", 0.1)
    await ask(stack)
    await told(stack, 1)
    await stack.lease.stop()
    assert (await ask(stack)).status == 200
    await stack.start("lease")
    first, second = await told(stack, 2)
    assert (first.turn, second.turn) == (1, 0)  # nobody could count it


# The log by itself


def ended(number: int) -> EndedTurn:
    name = common_pb2.Conversation(tenant="t", model="m", conversation_id="c")
    return EndedTurn(name, number, 1.0, "ok", "0" * 32)


async def test_what_waits_is_bounded_and_the_oldest_go() -> None:
    sent: list[int] = []
    dropped: list[int] = []

    async def send(entries: Sequence[Entry]) -> None:
        sent.extend(entry.turn.turn for entry in entries)

    log = TurnLog(send, dropped.append)
    for number in range(history.MAX_WAITING + 3):
        log.add(ended(number))
    await log.close()
    assert sum(dropped) == 3
    assert sent == list(range(3, history.MAX_WAITING + 3))


async def test_turns_are_sent_in_batches() -> None:
    sizes: list[int] = []

    async def send(entries: Sequence[Entry]) -> None:
        sizes.append(len(entries))

    log = TurnLog(send, lambda _: None)
    for number in range(history.BATCH + 1):
        log.add(ended(number))
    await log.close()
    assert sizes == [history.BATCH, 1]


async def test_what_could_not_be_sent_is_sent_later_in_order() -> None:
    sent: list[int] = []
    calls = 0

    async def send(entries: Sequence[Entry]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            log.add(ended(2))
            raise ServiceDown("down")
        sent.extend(entry.turn.turn for entry in entries)

    log = TurnLog(send, lambda _: None)
    log.add(ended(1))
    await log.close()
    assert sent == []
    await log.close()
    assert sent == [1, 2]
