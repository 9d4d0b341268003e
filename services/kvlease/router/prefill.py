"""The prefill half of a turn: one token on a prefill engine, whose blocks the decode
engine reads.

It may be tried again anywhere, since nothing of it reaches the client. So nothing that
goes wrong here fails a turn: in the end the decode engine computes the prompt itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import aiohttp
from opentelemetry.trace import Span

from kvlease import telemetry
from kvlease.router import errors, handoff, rules
from kvlease.router.ask import to_json
from kvlease.router.handoff import Handoff
from kvlease.router.rules import Choice
from kvlease.router.split import Body
from kvlease.router.turn import PREFILL, Prefilled, Tools, Turn
from kvlease.router.upstream import EngineFailed
from kvlease.v1 import registry_pb2

MAX_TRIES = 3
"""Requests to prefill engines, all tries of a turn together. A request that kills its
engine must not go through all of them."""


@dataclass(slots=True)
class Refused(Exception):
    """The engine finds fault with the request. Its answer is the client's, as it is."""

    status: int
    body: bytes
    content_type: str

    def __str__(self) -> str:
        return f"answered with {errors.refusal(self.status, self.body)}"


async def prefill(turn: Turn, tools: Tools) -> Prefilled:
    """Runs the prefill half. Raises :class:`Refused`; all else ends in a handoff."""
    split = turn.ask.split
    if split.prefill is None:
        missed = turn.miss(handoff.MISS_UNSUPPORTED, split.unsplit)
        return Prefilled(missed, turn.next_request_id())
    detail = ""
    failure: EngineFailed | None = None
    while turn.tries < MAX_TRIES:
        candidates = tools.engines.candidates(PREFILL, turn.ask.model)
        choice = rules.choose_prefill(candidates, turn.ask.affinity, turn.failed)
        if choice.engine is None:
            if failure is not None and await turn.forgive(tools, failure):
                continue
            detail = detail or choice.reason
            break
        request_id = turn.next_request_id()
        try:
            answer = await _once(turn, tools, split.prefill, choice, choice.engine, request_id)
        except EngineFailed as error:
            failure = error
            turn.note(tools, "prefill", failure)
            detail = str(failure)
            if failure.reason == "timeout":
                break  # another one would take as long
            continue
        return Prefilled(answer, request_id)
    return Prefilled(turn.miss(handoff.MISS_ENGINE, detail), turn.next_request_id())


async def _once(
    turn: Turn,
    tools: Tools,
    half: Body,
    choice: Choice,
    engine: registry_pb2.Engine,
    request_id: str,
) -> Handoff:
    """One request to one prefill engine."""
    with (
        tools.engines.use(engine),
        turn.trace.prefill(engine, choice.reason, turn.tries) as span,
    ):
        headers = telemetry.inject(span)
        params = handoff.prefill_params(
            turn.info,
            reuse=turn.ask.reuse,
            readers=turn.ask.split.readers,
            traceparent=headers["traceparent"],
        )
        body = to_json({**half, "kv_transfer_params": params})
        headers.update(turn.headers)
        headers["X-Request-Id"] = request_id
        async with (
            tools.upstream.deadline(engine, tools.prefill_timeout_s),
            tools.upstream.post(engine, turn.ask.endpoint, body, headers) as response,
        ):
            raw = await response.read()
        span.set_attribute("http.response.status_code", response.status)
        result = _understood(engine, response, raw)
        tools.engines.trust(engine)
        _describe(span, result)
        tools.metrics.observe(engine.engine_id, result, turn.trace.trace_id)
        return result


def _understood(
    engine: registry_pb2.Engine, response: aiohttp.ClientResponse, raw: bytes
) -> Handoff:
    status = response.status
    if status >= 500:
        raise EngineFailed(engine, "status", f"answered with status {status}", sent=True)
    if status != 200:
        raise Refused(status, raw, response.headers.get("Content-Type", "application/json"))
    try:
        return handoff.from_answer(json.loads(raw))
    except ValueError:
        raise EngineFailed(engine, "status", "answered with broken JSON", sent=True) from None


def _describe(span: Span, result: Handoff) -> None:
    span.set_attributes(
        {
            "kvlease.outcome": result.outcome,
            "kvlease.prompt_tokens": result.prompt_tokens,
            "kvlease.reused_tokens": result.reused_tokens,
            "kvlease.detail": result.detail,
            **result.costs.attributes(),
        }
    )
