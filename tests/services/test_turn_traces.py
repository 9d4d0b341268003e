"""The trace of a turn, span by span, for every way in which a turn can go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from otlp_receiver import Receiver, Span, tree
from router_stack import Stack, ask_traced, running_pair, until
from sim_engine import Cut, Fault, Hang, Slow, Status

from kvlease import outcomes

CHAT = "/v1/chat/completions"
HIT, OFF = "hit", "off"
MISSES = sorted(set(outcomes.ALL_WORDS) - {HIT, OFF})

WHOLE = {
    "turn": "",
    "ttft": "turn",
    "route": "turn",
    "lease_service.start_turn": "route",
    "prefill": "turn",
    "decode": "turn",
}
"""Span → parent of a turn that is answered. What engines add: tests/engines/test_trace.py."""


@pytest.fixture
async def stack(receiver: Receiver) -> AsyncIterator[Stack]:
    async with running_pair(prefill_timeout=5) as made:
        yield made


async def trace(stack: Stack, receiver: Receiver, trace_id: str) -> dict[str, Span]:
    """All spans of a turn that is over, by name; the services have told everything."""
    await stack.router.stop()
    await stack.lease.stop()
    found = receiver.trace(trace_id)
    check(found)
    return {span.name: span for span in found}


def check(found: list[Span]) -> None:
    """What holds for every trace: each span has ended, in its parent's time, under it."""
    by_id = {span.span_id: span for span in found}
    for span in found:
        assert span.end_ns >= span.start_ns
        assert span.failed == bool(span.status), span
        if span.name != "turn":
            parent = by_id[span.parent_id]
            assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns, span.name
    (turn,) = [span for span in found if span.name == "turn"]
    assert [s.start_ns for s in found if s.name == "ttft"] in ([], [turn.start_ns])


def reports(stack: Stack, **report: Any) -> None:
    """What the prefill engine tells of the next turns."""
    engine = stack.engines["prefill-0"]
    assert engine.report is not None
    engine.report = {**engine.report, **report}


# --- Turns that are answered ---------------------------------------------------------------


@pytest.mark.parametrize("outcome", [*MISSES, HIT, OFF])
async def test_every_outcome_is_one_whole_trace(
    stack: Stack, receiver: Receiver, outcome: str
) -> None:
    reused = 64 if outcome == HIT else 0
    granted = f"00-{'c' * 32}-{'d' * 16}-01"
    reports(
        stack,
        outcome=outcome,
        detail=f"why {outcome}",
        reused_tokens=reused,
        lease_traceparent=granted,
    )

    trace_id = await ask_traced(stack, stream=True)

    found = await trace(stack, receiver, trace_id)
    assert tree(list(found.values())) == WHOLE
    assert not any(span.failed for span in found.values())
    turn = found["turn"].attributes
    assert {
        "kvlease.conversation": "c",
        "gen_ai.conversation.id": "c",
        "kvlease.tenant": "default",
        "gen_ai.request.model": "sim",
        "kvlease.turn": 1,
        "kvlease.outcome": outcome,
        "kvlease.detail": f"why {outcome}",
        "kvlease.prompt_tokens": 100,
        "kvlease.reused_tokens": reused,
        "kvlease.computed_tokens": 100 - reused,
        "kvlease.prefill.engine_id": "prefill-0",
        "kvlease.decode.engine_id": "decode-0",
        "http.response.status_code": 200,
        "kvlease.end": "ok",
    }.items() <= turn.items()
    assert turn["kvlease.ttft_s"] == pytest.approx(found["ttft"].seconds, abs=1e-6)
    assert found["ttft"].attributes["kvlease.outcome"] == outcome
    assert found["prefill"].attributes["kvlease.outcome"] == outcome
    # A link is to the turn whose blocks were read; a lease that was not read is none.
    assert found["turn"].links == (("d" * 16,) if outcome == HIT else ())
    # and its parts come after one another
    route, prefill, decode = found["route"], found["prefill"], found["decode"]
    assert route.end_ns <= prefill.start_ns < prefill.end_ns <= decode.start_ns
    assert decode.start_ns < found["ttft"].end_ns <= decode.end_ns


async def test_each_service_says_who_it_is(stack: Stack, receiver: Receiver) -> None:
    found = await trace(stack, receiver, await ask_traced(stack))

    router, lease = found["turn"].resource, found["lease_service.start_turn"].resource
    assert router["service.name"] == "kvlease-router"
    assert lease["service.name"] == "kvlease-lease-service"
    for resource in (router, lease):
        assert resource["service.namespace"] == "kvlease"
        assert resource["service.version"]
    assert router["service.instance.id"] != lease["service.instance.id"]


async def test_an_answer_that_is_not_streamed_has_its_first_token_when_it_begins(
    stack: Stack, receiver: Receiver
) -> None:
    stack.engines["decode-0"].fault = Slow(head_s=0.2)

    found = await trace(stack, receiver, await ask_traced(stack))

    assert (
        0.2
        <= found["ttft"].seconds
        == pytest.approx(found["turn"].attributes["kvlease.ttft_s"], abs=1e-6)
    )


async def test_a_request_that_cannot_be_split_has_no_prefill(
    stack: Stack, receiver: Receiver
) -> None:
    found = await trace(stack, receiver, await ask_traced(stack, use_beam_search=True))

    assert set(found) == set(WHOLE) - {"prefill"}
    assert found["turn"].attributes["kvlease.outcome"] == "miss_unsupported"
    assert not found["turn"].failed


async def test_a_turn_done_twice_links_once(stack: Stack, receiver: Receiver) -> None:
    await stack.add("decode", "decode-1")
    for name in ("decode-0", "decode-1"):
        stack.engines[name].faults.append(Cut(before_head=True))
    granted = f"00-{'c' * 32}-{'d' * 16}-01"
    reports(stack, outcome=HIT, reused_tokens=64, lease_traceparent=granted)

    found = await trace(stack, receiver, await ask_traced(stack))

    names = [span.name for span in receiver.trace(found["turn"].trace_id)]
    assert names.count("decode") == names.count("prefill") >= 2
    assert found["turn"].links == ("d" * 16,)


async def test_a_lease_service_that_is_gone_is_in_the_trace(
    stack: Stack, receiver: Receiver
) -> None:
    await stack.lease.stop()

    found = await trace(stack, receiver, await ask_traced(stack))

    assert set(found) == set(WHOLE) - {"lease_service.start_turn"}
    assert found["route"].attributes["kvlease.start_turn.failure"]
    assert found["turn"].attributes["kvlease.turn"] == 0
    assert not found["turn"].failed


# --- Turns that are not answered -----------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "status", "spans", "end", "error"),
    [
        (
            {"prefill-0": Status(400)},
            400,
            set(WHOLE) - {"decode"},
            "client_error",
            "the prefill engine answered with status 400, BadRequestError",
        ),
        (
            {"decode-0": Status(422)},
            422,
            set(WHOLE),
            "client_error",
            "the decode engine answered with status 422, BadRequestError",
        ),
        (
            {"decode-0": Status(500)},
            500,
            set(WHOLE),
            "failed",
            "the decode engine answered with status 500",
        ),
    ],
)
async def test_an_engine_s_error_fails_the_turn_and_its_half(
    stack: Stack,
    receiver: Receiver,
    faults: dict[str, Fault],
    status: int,
    spans: set[str],
    end: str,
    error: str,
) -> None:
    for name, fault in faults.items():
        stack.engines[name].fault = fault
        half = name.removesuffix("-0")

    found = await trace(stack, receiver, await ask_traced(stack))

    assert set(found) == spans
    assert found["turn"].status == error
    assert found["turn"].attributes["error.type"] == str(status)
    assert found["turn"].attributes["http.response.status_code"] == status
    assert found["turn"].attributes["kvlease.end"] == end
    assert found[half].status.endswith(error.removeprefix(f"the {half} engine "))
    assert found["ttft"].status == f"no first token: {error}"
    assert "kvlease.ttft_s" not in found["turn"].attributes


async def test_a_turn_that_nobody_can_decode_fails_in_its_route(
    stack: Stack, receiver: Receiver
) -> None:
    await stack.add("prefill", "prefill-1", model="lonely")

    found = await trace(stack, receiver, await ask_traced(stack, model="lonely"))

    assert set(found) == {"turn", "ttft", "route", "lease_service.start_turn"}
    assert found["turn"].status.startswith("The model 'lonely' cannot be served")
    assert found["route"].status == found["turn"].status
    assert found["turn"].attributes["error.type"] == "no_decode_engine"
    assert found["turn"].attributes["http.response.status_code"] == 503


async def test_a_request_that_is_not_understood_has_no_ttft(
    stack: Stack, receiver: Receiver
) -> None:
    found = await trace(stack, receiver, await ask_traced(stack, conversation_id=7))

    assert set(found) == {"turn"}
    assert found["turn"].attributes["http.response.status_code"] == 400
    assert found["turn"].attributes["error.type"] == "invalid_request"


async def test_an_answer_that_breaks_off_has_a_ttft(stack: Stack, receiver: Receiver) -> None:
    stack.engines["decode-0"].fault = Cut(chunks=2)

    found = await trace(stack, receiver, await ask_traced(stack, stream=True))

    assert set(found) == set(WHOLE)
    assert not found["ttft"].failed
    assert "incomplete" in found["turn"].status
    assert found["turn"].attributes["error.type"] == "engine_lost"
    assert found["turn"].attributes["http.response.status_code"] == 200
    assert found["turn"].attributes["kvlease.end"] == "failed"
    assert found["decode"].failed


# --- Clients that go away ------------------------------------------------------------------

TRACE, SPAN = "a" * 32, "b" * 16
TRACED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.mark.parametrize(
    ("where", "spans"),
    [("prefill", set(WHOLE) - {"decode"}), ("decode", set(WHOLE))],
)
async def test_a_client_that_leaves_before_the_first_token_has_seen_none(
    stack: Stack, receiver: Receiver, where: str, spans: set[str]
) -> None:
    engine = stack.engines[f"{where}-0"]
    engine.fault = Hang()
    turn = asyncio.ensure_future(ask_traced(stack, TRACED))
    await until(lambda: engine.seen, "the engine was not asked")

    turn.cancel()

    found = await trace(stack, receiver, TRACE)
    assert set(found) == spans
    assert found["turn"].status == found[where].status == "the client went away"
    assert found["turn"].attributes["error.type"] == "disconnected"
    assert found["turn"].attributes["kvlease.end"] == "disconnected"
    assert found["turn"].attributes["kvlease.turn"] == 1
    assert "http.response.status_code" not in found["turn"].attributes
    # and the time that it waited is not told as a time to first token
    assert found["ttft"].status == "no first token: the client went away"
    assert "kvlease.ttft_s" not in {**found["ttft"].attributes, **found["turn"].attributes}


async def test_a_client_that_leaves_in_the_middle_has_had_its_first_token(
    stack: Stack, receiver: Receiver
) -> None:
    stack.engines["decode-0"].fault = Slow(chunk_s=5)
    body = {"model": "sim", "messages": [], "conversation_id": "c", "stream": True}
    async with stack.client.post(stack.url + CHAT, json=body, headers=TRACED) as response:
        await response.content.readany()
        response.close()

    found = await trace(stack, receiver, TRACE)
    assert set(found) == set(WHOLE)
    assert not found["ttft"].failed
    assert found["turn"].attributes["kvlease.ttft_s"] > 0
    assert found["turn"].status == found["decode"].status == "the client went away"
    assert found["turn"].attributes["http.response.status_code"] == 200
