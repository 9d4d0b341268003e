"""What became of a conversation's last turns: recorded, read back, listed."""

from __future__ import annotations

import asyncio
import re
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
    until,
)

from kvlease import rpc, times
from kvlease.lease import history
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import TurnRecord


def turn(number: int, **fields: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "turn": number,
        "start_time": times.timestamp(1_000_000.0 + number),
        "outcome": common_pb2.OUTCOME_MISS_PREFIX,
        "detail": f"why turn {number} missed",
        "end": lease_pb2.TURN_END_OK,
        "trace_id": f"{number:032x}",
    }
    return TurnRecord(**{**values, **fields})


async def record(
    plane: ControlPlane, *turns: TurnRecord, talk: Conversation | None = None, replica: int = 0
) -> None:
    entry = lease_pb2.RecordTurnsRequest.Entry
    talk = talk or conversation()
    request = lease_pb2.RecordTurnsRequest(
        entries=[entry(conversation=talk, turn=each) for each in turns]
    )
    await plane.leases[replica].RecordTurns(request, timeout=CALL_S)


async def start(plane: ControlPlane, talk: Conversation | None = None) -> None:
    request = lease_pb2.StartTurnRequest(conversation=talk or conversation())
    await plane.lease.StartTurn(request, timeout=CALL_S)


async def get(plane: ControlPlane, talk: Conversation | None = None) -> list[TurnRecord]:
    request = lease_pb2.GetConversationRequest(conversation=talk or conversation())
    return list((await plane.lease.GetConversation(request, timeout=CALL_S)).turns)


async def listed(plane: ControlPlane, **fields: Any) -> Any:
    request = lease_pb2.ListConversationsRequest(**fields)
    return await plane.lease.ListConversations(request, timeout=CALL_S)


async def test_a_conversation_tells_why_its_turns_missed(plane: ControlPlane) -> None:
    await start(plane)
    await record(plane, turn(1), turn(2))
    await record(plane, turn(3, outcome=common_pb2.OUTCOME_HIT, ttft=times.duration(0.25)))
    first, second, third = await get(plane)
    assert (first.turn, second.turn) == (1, 2)
    assert second.detail == "why turn 2 missed"
    assert third == turn(3, outcome=common_pb2.OUTCOME_HIT, ttft=times.duration(0.25))


async def test_only_the_last_turns_are_kept(plane: ControlPlane) -> None:
    await start(plane)
    for number in range(1, 30):
        await record(plane, turn(number))
    assert [each.turn for each in await get(plane)] == list(range(14, 30))


async def test_a_turn_that_is_recorded_twice_is_there_once(plane: ControlPlane) -> None:
    await start(plane)
    for _ in range(2):
        await record(plane, turn(1), turn(2))
    assert [each.turn for each in await get(plane)] == [1, 2]


async def test_turns_without_number_and_of_one_trace_are_told_apart(plane: ControlPlane) -> None:
    await start(plane)
    same = [turn(0, start_time=times.timestamp(float(at)), trace_id="a" * 32) for at in (3, 1, 2)]
    await record(plane, *same)
    assert [each.start_time.seconds for each in await get(plane)] == [1, 2, 3]


async def test_histories_outlive_every_lease_service(start_plane: Any) -> None:
    plane = await start_plane(leases=2)
    await start(plane)
    await record(plane, turn(1), replica=1)
    await plane.stops["lease"][1]()
    assert [each.turn for each in await get(plane)] == [1]


async def test_two_replicas_at_once_lose_no_turn(start_plane: Any) -> None:
    plane = await start_plane(leases=2)
    await start(plane)
    await asyncio.gather(*(record(plane, turn(n), replica=n % 2) for n in range(1, 13)))
    assert [each.turn for each in await get(plane)] == list(range(1, 13))


async def test_conversations_are_listed_with_their_leases_latest_first(
    plane: ControlPlane,
) -> None:
    holder = await plane.register()
    names = ["a/b", "ünï", "c"]
    for name in names:
        await record(plane, turn(1), talk=conversation(name))
    await plane.lease.Grant(grant_request(holder, conversation("ünï"), turn=1), timeout=CALL_S)
    await record(plane, turn(2), talk=conversation("a/b"))

    async def names_listed() -> bool:
        answer = await listed(plane)
        found = [each.conversation.conversation_id for each in answer.conversations]
        return answer.total_size == 3 and found == ["a/b", "c", "ünï"]

    await until(names_listed)
    answer = await listed(plane)
    first, _, last = answer.conversations
    assert [each.turn for each in first.turns] == [1, 2]
    assert not first.HasField("lease")
    assert last.lease.holder_engine_id == "decode-0"
    assert not last.lease.kv_transfer_params_json


async def test_a_list_is_of_one_tenant_and_what_is_looked_for(plane: ControlPlane) -> None:
    for tenant in ("acme", "evil"):
        for name in ("books-1", "Books-2", "films"):
            await record(plane, turn(1), talk=conversation(name, tenant))
    await until(lambda: _has(plane, 6))
    mine = await listed(plane, tenant="acme", id_contains="books")
    assert {each.conversation.conversation_id for each in mine.conversations} == {
        "books-1",
        "Books-2",
    }
    assert {each.conversation.tenant for each in mine.conversations} == {"acme"}
    short = await listed(plane, page_size=1)
    assert (len(short.conversations), short.total_size) == (1, 6)


async def _has(plane: ControlPlane, count: int) -> bool:
    return bool((await listed(plane)).total_size == count)


async def test_a_list_nobody_asks_for_costs_nothing_and_comes_back(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "IDLE_S", 0.4)
    await record(plane, turn(1))
    for _ in range(3):
        await until(lambda: _has(plane, 1))
        await asyncio.sleep(0.6)
        await record(plane, turn(2))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            lease_pb2.RecordTurnsRequest(
                entries=[
                    lease_pb2.RecordTurnsRequest.Entry(conversation=conversation(), turn=turn(1))
                    for _ in range(65)
                ]
            ),
            "INVALID_TURNS",
        ),
        (
            lease_pb2.RecordTurnsRequest(
                entries=[lease_pb2.RecordTurnsRequest.Entry(turn=turn(1))]
            ),
            "INVALID_CONVERSATION",
        ),
        (
            lease_pb2.RecordTurnsRequest(
                entries=[
                    lease_pb2.RecordTurnsRequest.Entry(
                        conversation=conversation(), turn=turn(1, end=77)
                    )
                ]
            ),
            "INVALID_TURNS",
        ),
    ],
)
async def test_what_cannot_be_recorded_is_refused(
    plane: ControlPlane, request_: lease_pb2.RecordTurnsRequest, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.lease.RecordTurns(request_, timeout=CALL_S)
    assert rpc.reason_of(caught.value) == reason


async def test_a_miss_says_when_the_holders_session_was_lost(plane: ControlPlane) -> None:
    holder = await plane.register()
    await start(plane)
    await plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S)
    request = registry_pb2.DeregisterRequest(session_id=holder.session_id)
    await plane.registry.Deregister(request, timeout=CALL_S)

    async def told() -> bool:
        answer = await plane.lease.Claim(claim_request(), timeout=CALL_S)
        assert answer.outcome == common_pb2.OUTCOME_MISS_ENGINE
        pattern = r"decode-0, .*lease of turn 1, has lost its session at 20\d\d-\d\d-\d\dT.*Z: "
        return re.match(pattern, answer.detail) is not None

    await until(told)


def test_long_sentences_are_cut() -> None:
    (kept,) = history.appended([], [turn(1, detail="x" * 10_000, error="y" * 10_000)])
    assert (len(kept.detail), len(kept.error)) == (history.MAX_TEXT, history.MAX_TEXT)
