"""The router's part of a turn's trace, as a real OTLP receiver gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from otlp_receiver import Receiver, Span, tree
from router_stack import Stack, ask_traced, running, running_pair, until
from sim_engine import Cut, Hang, Slow, Status

CHAT = "/v1/chat/completions"
CLIENT_TRACE, CLIENT_SPAN = "a" * 32, "b" * 16
SERVER, CLIENT = 2, 3  # opentelemetry.proto.trace.v1.Span.SpanKind


@pytest.fixture
async def stack(receiver: Receiver) -> AsyncIterator[Stack]:
    async with running_pair(prefill_timeout=0.5) as made:
        yield made


async def spans(receiver: Receiver, trace_id: str, *names: str) -> dict[str, Span]:
    return await asyncio.to_thread(receiver.wait_for, trace_id, *names)


async def test_a_turn_is_one_trace_of_five_spans(stack: Stack, receiver: Receiver) -> None:
    trace_id = await ask_traced(stack, stream=True)

    found = await spans(receiver, trace_id, "turn", "ttft", "route", "prefill", "decode")

    router = [span for span in receiver.trace(trace_id) if span.service == "kvlease-router"]
    assert tree(router) == {
        "turn": "",
        "ttft": "turn",
        "route": "turn",
        "prefill": "turn",
        "decode": "turn",
    }
    assert found["turn"].kind == SERVER
    assert found["prefill"].kind == found["decode"].kind == CLIENT
    assert not any(span.failed for span in router)


async def test_the_turn_says_what_became_of_it(stack: Stack, receiver: Receiver) -> None:
    prefill = stack.engines["prefill-0"]
    assert prefill.report is not None
    granted = f"00-{'c' * 32}-{'d' * 16}-01"
    prefill.report |= {
        "outcome": "hit", "reused_tokens": 64, "detail": "4 of 4", "lease_traceparent": granted,
        "predicted_pull_s": 0.03, "predicted_compute_s": 1.5, "pull_s": 0.02, "prefill_s": 0.4,
    }  # fmt: skip
    await ask_traced(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)

    trace_id = await ask_traced(stack, stream=True)

    found = await spans(receiver, trace_id, "turn", "prefill")
    costs = {
        "kvlease.predicted_pull_s": 0.03,
        "kvlease.predicted_compute_s": 1.5,
        "kvlease.pull_s": 0.02,
        "kvlease.prefill_s": 0.4,
    }
    assert costs.items() <= found["prefill"].attributes.items()
    turn = found["turn"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "sim",
        "gen_ai.request.stream": True,
        "gen_ai.conversation.id": "c",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "http.response.status_code": 200,
        "kvlease.conversation": "c",
        "kvlease.tenant": "default",
        "kvlease.turn": 2,
        "kvlease.outcome": "hit",
        "kvlease.detail": "4 of 4",
        "kvlease.prompt_tokens": 100,
        "kvlease.reused_tokens": 64,
        "kvlease.computed_tokens": 36,
        "kvlease.prefill.engine_id": "prefill-0",
        "kvlease.decode.engine_id": "decode-0",
        "kvlease.lease.holder": "decode-0",
    }
    assert expected.items() <= turn.attributes.items()
    assert 0 < turn.attributes["kvlease.ttft_s"] < 5
    assert turn.links == ("d" * 16,)


async def test_ttft_lasts_from_arrival_to_the_first_content_byte(
    stack: Stack, receiver: Receiver
) -> None:
    stack.engines["decode-0"].fault = Slow(head_s=0.2, chunk_s=0.1)

    trace_id = await ask_traced(stack, stream=True)

    found = await spans(receiver, trace_id, "turn", "ttft")
    assert found["ttft"].start_ns == found["turn"].start_ns
    assert found["ttft"].seconds >= 0.2
    # The rest of the stream took its time: a pause before each of five more events.
    assert found["turn"].seconds - found["ttft"].seconds > 0.45
    assert found["ttft"].attributes["kvlease.outcome"] == "miss_no_lease"


async def test_the_route_says_who_was_there_and_why_these(stack: Stack, receiver: Receiver) -> None:
    await stack.add("decode", "decode-1")
    await ask_traced(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)

    trace_id = await ask_traced(stack)

    route = (await spans(receiver, trace_id, "route"))["route"]
    assert route.attributes["kvlease.decode.candidates"] == ["decode-0", "decode-1"]
    assert route.attributes["kvlease.decode.reason"] == "decode-0 holds the conversation's blocks"
    assert route.attributes["kvlease.prefill.reason"] == "prefill-0 is the only prefill engine"


async def test_the_client_s_trace_goes_on(stack: Stack, receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "tracestate": "v=1"}

    trace_id = await ask_traced(stack, headers)

    assert trace_id == CLIENT_TRACE
    turn = (await spans(receiver, trace_id, "turn"))["turn"]
    assert turn.parent_id == CLIENT_SPAN
    assert stack.engines["decode-0"].seen[0].headers["tracestate"] == "v=1"


@pytest.mark.parametrize("header", ["nonsense", f"00-{'0' * 32}-{'0' * 16}-01", "00-a-b-01"])
async def test_a_malformed_traceparent_starts_a_trace_of_its_own(
    stack: Stack, receiver: Receiver, header: str
) -> None:
    trace_id = await ask_traced(stack, {"traceparent": header})

    turn = (await spans(receiver, trace_id, "turn"))["turn"]
    assert turn.parent_id == ""


async def test_engines_are_told_the_span_they_work_for(stack: Stack, receiver: Receiver) -> None:
    trace_id = await ask_traced(stack)

    found = await spans(receiver, trace_id, "turn", "prefill", "decode")
    (prefilled,), (decoded,) = (stack.engines[n].seen for n in ("prefill-0", "decode-0"))
    assert _names(prefilled.headers["traceparent"]) == (trace_id, found["prefill"].span_id)
    assert _names(prefilled.told["traceparent"]) == (trace_id, found["prefill"].span_id)
    assert _names(decoded.headers["traceparent"]) == (trace_id, found["decode"].span_id)
    assert _names(decoded.told["traceparent"]) == (trace_id, found["turn"].span_id)


def _names(traceparent: str) -> tuple[str, str]:
    _, trace_id, span_id, _ = traceparent.split("-")
    return trace_id, span_id


async def test_each_try_has_a_span_and_a_failed_one_says_why(
    stack: Stack, receiver: Receiver
) -> None:
    await stack.add("prefill", "prefill-1")
    for name in ("prefill-0", "prefill-1"):
        stack.engines[name].faults.append(Status(500))

    trace_id = await ask_traced(stack)

    await spans(receiver, trace_id, "turn", "decode")
    tries = [span for span in receiver.trace(trace_id) if span.name == "prefill"]
    assert len(tries) == 2
    assert all(span.failed and "answered with status 500" in span.status for span in tries)
    assert sorted(span.attributes["kvlease.engine_id"] for span in tries) == [
        "prefill-0",
        "prefill-1",
    ]
    turn = (await spans(receiver, trace_id, "turn"))["turn"]
    assert turn.attributes["kvlease.outcome"] == "miss_engine"
    assert not turn.failed  # the client noticed nothing


async def test_a_turn_that_breaks_off_is_marked(stack: Stack, receiver: Receiver) -> None:
    stack.engines["decode-0"].faults.append(Cut(chunks=2))

    trace_id = await ask_traced(stack, stream=True)

    found = await spans(receiver, trace_id, "turn", "ttft", "decode")
    assert found["turn"].failed
    assert "incomplete" in found["turn"].status
    assert found["decode"].failed


async def test_all_spans_end_when_the_client_goes_away(stack: Stack, receiver: Receiver) -> None:
    decode = stack.engines["decode-0"]
    decode.fault = Hang()
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    turn = asyncio.ensure_future(ask_traced(stack, headers))
    await until(lambda: decode.seen, "the decode engine was not asked")

    turn.cancel()

    found = await spans(receiver, CLIENT_TRACE, "turn", "route", "prefill", "decode")
    assert found["turn"].status == found["decode"].status == "the client went away"
    ttft = (await spans(receiver, CLIENT_TRACE, "ttft"))["ttft"]
    assert ttft.status == "no first token: the client went away"


async def test_a_refused_request_is_a_trace_too(stack: Stack, receiver: Receiver) -> None:
    trace_id = await ask_traced(stack, model="other")

    turn = (await spans(receiver, trace_id, "turn"))["turn"]
    assert turn.attributes["http.response.status_code"] == 404
    assert turn.failed
    assert "Known models: sim" in turn.status


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_what_an_engine_says_is_wrong_is_in_the_trace_without_its_message(
    stack: Stack, receiver: Receiver, half: str
) -> None:
    said = {"message": "got -5 in 'Hello'", "type": "BadRequestError", "param": "max_tokens"}
    stack.engines[f"{half}-0"].faults.append(Status(400, {"error": {**said, "code": 400}}))

    trace_id = await ask_traced(stack)

    found = await spans(receiver, trace_id, "turn", half)
    told = "answered with status 400, BadRequestError, param max_tokens"
    assert found["turn"].status == f"the {half} engine {told}"
    assert found[half].status.endswith(told)


async def test_a_collector_that_is_gone_slows_no_turn_and_no_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    loop = asyncio.get_running_loop()
    async with running() as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        await ask_traced(stack)
        began = loop.time()
        for _ in range(10):
            await ask_traced(stack)
        assert loop.time() - began < 1.0
        began = loop.time()
        await stack.router.stop()
        assert loop.time() - began < 4.0
