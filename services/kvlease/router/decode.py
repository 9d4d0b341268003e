"""The decode half of a turn: the client's request on a decode engine, its bytes relayed.

Until the first byte of the answer another engine can take over. If the request never
reached the first one (it accepts no connection), the next one gets the same handoff. If
it did, the prefill engine's blocks may have been read and freed by now, and must not be
read again: the whole turn is done again.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import aiohttp
from aiohttp import web

from kvlease import telemetry
from kvlease.router import errors, handoff, rules
from kvlease.router.ask import to_json
from kvlease.router.relay import EngineGone, Relay
from kvlease.router.rules import Choice
from kvlease.router.turn import DECODE, Prefilled, Tools, Turn
from kvlease.router.upstream import EngineFailed
from kvlease.v1 import registry_pb2


class TurnLost(Exception):
    """The handoff cannot be used any more, and the client has got nothing yet: the turn
    has to be done again, with a prefill of its own.

    ``failure``: the decode engine may have begun, and then failed. None: the prefill
    engine has kept the blocks long enough.
    """

    def __init__(self, failure: EngineFailed | None) -> None:
        super().__init__(str(failure or "the prefill engine no longer keeps the blocks"))
        self.failure = failure


async def decode(
    turn: Turn, tools: Tools, prefilled: Prefilled, relay: Relay, *, last_try: bool
) -> web.StreamResponse:
    """Runs the decode half. Returns the client's response, complete.

    Raises :class:`TurnLost`, :class:`errors.HttpError`, :class:`relay.ClientGone`.
    """
    detail = ""
    while True:
        if prefilled.is_over:
            raise TurnLost(None)
        candidates = tools.engines.candidates(DECODE, turn.ask.model)
        choice = rules.choose_decode(candidates, turn.lease, turn.ask.affinity, turn.failed)
        if choice.engine is None:
            raise _none_left(detail or choice.reason)
        try:
            return await _once(
                turn, tools, prefilled, relay, choice, choice.engine, last_try=last_try
            )
        except EngineFailed as failure:
            turn.note(tools, "decode", failure)
            detail = str(failure)
            if failure.sent:
                raise TurnLost(failure) from failure


def _none_left(detail: str) -> errors.HttpError:
    return errors.unavailable(
        f"No decode engine can take the request: {detail}. Try again, or start one.",
        "no_decode_engine",
    )


async def _once(
    turn: Turn,
    tools: Tools,
    prefilled: Prefilled,
    relay: Relay,
    choice: Choice,
    engine: registry_pb2.Engine,
    *,
    last_try: bool,
) -> web.StreamResponse:
    """One request to one decode engine."""

    def another() -> bool:
        return _another(turn, tools, engine)

    with (
        tools.engines.use(engine),
        turn.trace.decode(engine, choice.reason, turn.tries) as span,
    ):
        headers = telemetry.inject(span)
        headers.update(turn.headers)
        headers["X-Request-Id"] = prefilled.request_id
        body = _body(turn, prefilled)
        async with contextlib.AsyncExitStack() as stack:
            # No deadline on the whole: an answer may take as long as it takes. It ends
            # with the client, with the engine's connection, or with the engine's session.
            async with tools.upstream.deadline(engine, None, another):
                upstream = await stack.enter_async_context(
                    tools.upstream.post(engine, turn.ask.endpoint, body, headers)
                )
                span.set_attribute("http.response.status_code", upstream.status)
                if upstream.status >= 500 and not last_try and another():
                    raise EngineFailed(
                        engine, "status", f"answered with status {upstream.status}", sent=True
                    )
                try:
                    await relay.begin(upstream)
                except EngineGone as gone:
                    raise EngineFailed(engine, "lost", str(gone), sent=True) from gone
            if upstream.status < 500:
                tools.engines.trust(engine)
            response = await _rest(turn, tools, relay, engine, upstream)
            if upstream.status >= 400:
                said = errors.refusal(upstream.status, relay.refusal)
                telemetry.fail(
                    span, f"{engine.engine_id} answered with {said}", str(upstream.status)
                )
            return response


async def _rest(
    turn: Turn,
    tools: Tools,
    relay: Relay,
    engine: registry_pb2.Engine,
    upstream: aiohttp.ClientResponse,
) -> web.StreamResponse:
    """After the first byte nobody else can take over."""
    try:
        return await relay.rest(upstream)
    except EngineGone as gone:
        failure = EngineFailed(engine, "lost", str(gone), sent=True)
        turn.note(tools, "decode", failure)
        raise errors.engine_lost(f"{failure}: it is incomplete. Send the request again.") from gone


def _body(turn: Turn, prefilled: Prefilled) -> bytes:
    half = turn.ask.split.decode
    if not turn.ask.split.one_answer:
        return to_json(half)  # there is nothing to read and nothing to grant
    # Of several answers nobody knows which one the client will go on with: none is kept.
    keeps = turn.ask.split.readers == 1
    params = handoff.decode_params(
        turn.info if keeps else replace(turn.info, conversation_id=""),
        prefilled.handoff.params,
        traceparent=turn.trace.traceparent,
        handoff_remaining_s=prefilled.remaining_s,
        retain_s=turn.ask.retain_s,
        end=turn.ask.end,
    )
    return to_json({**half, "kv_transfer_params": params})


def _another(turn: Turn, tools: Tools, engine: registry_pb2.Engine) -> bool:
    """Whether a decode engine is left that has not failed this turn and seems to live."""
    excluded = turn.failed | {engine.incarnation}
    candidates = [
        candidate
        for candidate in tools.engines.candidates(DECODE, turn.ask.model)
        if not candidate.departed
    ]
    return rules.choose_decode(candidates, None, "", excluded).engine is not None
