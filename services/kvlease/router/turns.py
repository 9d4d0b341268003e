"""A turn from its arrival to its last byte: read, route, prefill, decode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import structlog
from aiohttp import hdrs, web
from opentelemetry.trace import Tracer

from kvlease import telemetry
from kvlease.router import errors, rules
from kvlease.router.ask import Ask, read_ask
from kvlease.router.decode import TurnLost, decode
from kvlease.router.errors import HttpError
from kvlease.router.handoff import Handoff
from kvlease.router.history import EndedTurn, TurnLog
from kvlease.router.leases import Leases, ServiceDown
from kvlease.router.prefill import Refused, prefill
from kvlease.router.readiness import live_decode
from kvlease.router.relay import ClientGone, Relay
from kvlease.router.spans import CLIENT_GONE, TurnTrace
from kvlease.router.split import Endpoint
from kvlease.router.turn import DECODE, PREFILL, Tools, Turn

TRACE_ID_HEADER = "x-kvlease-trace-id"

_log = structlog.get_logger("kvlease.router")


class Turns:
    """Serves turns. ``keys``: API key → tenant; None where there are none. ``history``
    learns of every turn of a conversation that has ended."""

    def __init__(
        self,
        tools: Tools,
        leases: Leases,
        history: TurnLog,
        tracer: Tracer,
        keys: Mapping[str, str] | None,
        max_body_bytes: int,
    ) -> None:
        self._tools = tools
        self._leases = leases
        self._history = history
        self._tracer = tracer
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for what turns have left to do; it has deadlines."""
        await asyncio.gather(*self._ending)

    async def serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Answers one request, whatever happens."""
        metrics = self._tools.metrics
        answer = _Answer(request, TurnTrace(self._tracer, request.headers, endpoint))
        metrics.in_flight.inc()
        try:
            return await self._answer(answer, endpoint)
        except asyncio.CancelledError:
            answer.end = "disconnected"
            raise
        finally:
            metrics.in_flight.dec()
            trace = answer.trace
            metrics.turns.labels(answer.model, answer.outcome or "none", answer.end).inc()
            if trace.ttft_s is not None:
                ttft = metrics.ttft.labels(answer.model, trace.outcome)
                ttft.observe(trace.ttft_s, {"trace_id": trace.trace_id})
            answer.end_trace()
            answer.log()
            self._end_conversation(answer)
            self._record(answer)

    def _record(self, answer: _Answer) -> None:
        turn, trace = answer.turn, answer.trace
        if turn is None or not turn.ask.conversation_id:
            return
        handoff = trace.handoff
        self._history.add(
            EndedTurn(
                conversation=turn.ask.conversation,
                number=turn.number,
                start=trace.start,
                end=answer.end,
                trace_id=trace.trace_id,
                outcome=answer.outcome,
                detail=_why(turn.ask, handoff) if answer.outcome else "",
                error=answer.error,
                prompt_tokens=handoff.prompt_tokens if handoff else 0,
                reused_tokens=handoff.reused_tokens if handoff else 0,
                ttft_s=trace.ttft_s,
                prefill_engine_id=trace.engine_ids.get("prefill", ""),
                decode_engine_id=trace.engine_ids.get("decode", ""),
            )
        )

    def _end_conversation(self, answer: _Answer) -> None:
        """After a conversation's last turn nothing is kept for it. A turn that has failed
        was not the last: the client will send it again."""
        turn = answer.turn
        if turn is None or not turn.ask.end or not turn.ask.conversation_id:
            return
        if answer.end in ("ok", "disconnected"):
            # In a task: the client has its answer, or is gone.
            task = asyncio.create_task(self._end(turn))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, turn: Turn) -> None:
        try:
            await self._leases.end(turn.ask.conversation, {"traceparent": turn.trace.traceparent})
        except ServiceDown as error:
            _log.warning(
                "conversation not ended: its lease stays until its retention is over",
                detail=str(error),
                **turn.ids,
            )

    async def _answer(self, answer: _Answer, endpoint: Endpoint) -> web.StreamResponse:
        try:
            ask = await self._read(answer.request, endpoint)
            answer.trace.asked(ask)
            answer.model = ask.model
            return await self._run(await self._route(ask, answer), answer)
        except HttpError as error:
            return await answer.fail(error)
        except rules.InvalidRequest as error:
            return await answer.fail(
                HttpError(400, str(error), "invalid_request", param=error.param)
            )
        except Refused as refused:
            return answer.refuse(refused)
        except ClientGone:
            answer.end = "disconnected"
            assert answer.relay is not None
            assert answer.relay.response is not None
            return answer.relay.response
        except Exception as error:
            # The last resort: a client gets an answer, and the trace id finds the cause.
            _log.exception("turn failed", **answer.ids)
            return await answer.fail(
                HttpError(
                    500,
                    f"The router failed ({type(error).__name__}). Report it with the trace id "
                    f"{answer.trace.trace_id}.",
                    "internal_error",
                    kind="server_error",
                )
            )

    async def _read(self, request: web.Request, endpoint: Endpoint) -> Ask:
        try:
            tenant = rules.tenant_of(request.headers.get("Authorization", ""), self._keys)
        except rules.UnknownKey:
            raise errors.unauthorized() from None
        _check_content_type(request)
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise errors.too_large(self._max_body_bytes) from None
        except web.RequestPayloadError:
            raise rules.InvalidRequest(
                "The request body cannot be decoded: check its Content-Encoding."
            ) from None
        ask = read_ask(endpoint, raw, request.headers, tenant)
        engines = self._tools.engines
        known = engines.models()
        if ask.model in known:
            return ask
        if not known:
            raise errors.unavailable(engines.unready_reason(), "no_engine")
        if ask.model:
            raise errors.unknown_model(ask.model, list(known))
        if len({engine.model for engine in known.values()}) > 1:
            raise rules.InvalidRequest(f"model is missing: name one of {', '.join(known)}", "model")
        return replace(ask, model=next(iter(known.values())).model)

    async def _route(self, ask: Ask, answer: _Answer) -> Turn:
        """Counts the turn and makes sure that it can be served. The engines that are
        picked here are a forecast: each half picks again when it comes to it."""
        trace = answer.trace
        turn = Turn(ask, trace, self._passed_on(answer.request))
        engines = self._tools.engines
        with trace.route() as span:
            if ask.conversation_id:
                started = await self._leases.start_turn(ask.conversation, telemetry.inject(span))
                turn.number, turn.lease = started.number, started.lease
                if started.failure:
                    span.set_attribute("kvlease.start_turn.failure", started.failure)
                    self._tools.metrics.start_turn_failures.inc()
            trace.started(turn.number, turn.lease)
            answer.turn = turn
            prefill_found = engines.candidates(PREFILL, ask.model)
            decode_found = engines.candidates(DECODE, ask.model)
            decode_choice = await live_decode(
                engines, self._tools.upstream, ask.model, turn.lease, ask.affinity
            )
            halves = {
                "prefill": (prefill_found, rules.choose_prefill(prefill_found, ask.affinity)),
                "decode": (decode_found, decode_choice),
            }
            for half, (candidates, choice) in halves.items():
                names = [candidate.engine.engine_id for candidate in candidates]
                span.set_attribute(f"kvlease.{half}.candidates", names)
                span.set_attribute(f"kvlease.{half}.reason", choice.reason)
                if choice.engine is not None:
                    span.set_attribute(f"kvlease.{half}.engine_id", choice.engine.engine_id)
            if decode_choice.engine is None:
                raise errors.unavailable(
                    f"The model {ask.model!r} cannot be served: {decode_choice.reason}. "
                    "Try again, or start a decode engine.",
                    "no_decode_engine",
                )
        return turn

    def _passed_on(self, request: web.Request) -> dict[str, str]:
        """Of the client's headers, engines get none but the credentials that they may
        check themselves: others change what vLLM does (X-data-parallel-rank,
        X-Vllm-Priority, X-Session-ID)."""
        if self._keys is None and "Authorization" in request.headers:
            return {"Authorization": request.headers["Authorization"]}
        return {}

    async def _run(self, turn: Turn, answer: _Answer) -> web.StreamResponse:
        relay = answer.relay = Relay(answer.request, answer.headers, turn.trace.first_content)
        for last_try in (False, True):
            prefilled = await prefill(turn, self._tools)
            answer.handed_over(prefilled.handoff.reused_tokens)
            turn.trace.handed_over(prefilled.handoff)
            try:
                response = await decode(turn, self._tools, prefilled, relay, last_try=last_try)
            except TurnLost as lost:
                if last_try:
                    raise errors.engine_lost(f"{lost}. Send the request again.") from lost
                await self._prepare_again(turn, lost)
                continue
            metrics, handoff = self._tools.metrics, prefilled.handoff
            metrics.prompt_tokens.labels(answer.model).inc(handoff.prompt_tokens)
            metrics.reused_tokens.labels(answer.model).inc(handoff.reused_tokens)
            answer.finished(response)
            return response
        raise AssertionError("unreachable: the last try returns or raises")

    async def _prepare_again(self, turn: Turn, lost: TurnLost) -> None:
        """Before the prompt is computed once more: is there anyone to answer?"""
        candidates = self._tools.engines.candidates(DECODE, turn.ask.model)
        choice = rules.choose_decode(candidates, turn.lease, turn.ask.affinity, turn.failed)
        if choice.engine is not None:
            return
        if lost.failure is None or not await turn.forgive(self._tools, lost.failure):
            raise errors.engine_lost(f"{lost}, and {choice.reason}. Send the request again.")


def _check_content_type(request: web.Request) -> None:
    """Raises :class:`HttpError` for what is said not to be JSON; an absent type is fine."""
    said = request.content_type
    is_json = said == "application/json" or said.endswith("+json")
    if hdrs.CONTENT_TYPE in request.headers and not is_json:
        raise errors.not_json(said)


class _Answer:
    """What the client gets, and how the turn ended: ``end`` is a word for metrics."""

    def __init__(self, request: web.Request, trace: TurnTrace) -> None:
        self.request = request
        self.trace = trace
        self.turn: Turn | None = None
        self.relay: Relay | None = None
        self.model = ""
        """Once it is known to be one that is served."""
        self.end = "failed"
        self.status = 0
        self.error = ""
        self._error_type = ""
        self._loggable = ""
        """The error, without what is quoted from the request: that is the client's."""
        self._reused_tokens = 0

    @property
    def ids(self) -> dict[str, object]:
        """For a log line."""
        return self.turn.ids if self.turn else {"trace_id": self.trace.trace_id}

    def log(self) -> None:
        """The line of a turn that is over. One that went well is a detail."""
        log = _log.debug if self.end == "ok" else _log.info
        ttft_s = self.trace.ttft_s
        log(
            "turn ended",
            **self.ids,
            model=self.model,
            outcome=self.trace.outcome,
            end=self.end,
            status=self.status,
            reused_tokens=self._reused_tokens,
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            error_type=self._error_type,
            error=self._loggable,
        )

    def handed_over(self, reused_tokens: int) -> None:
        """The prefill half has ended."""
        self._reused_tokens = reused_tokens

    @property
    def outcome(self) -> str:
        """What became of the turn's blocks. Of a refused request nothing did."""
        return "" if self.end == "client_error" else self.trace.outcome

    def headers(self, status: int) -> dict[str, str]:
        """Ours, as far as the turn has got, for an answer with ``status``."""
        headers = {TRACE_ID_HEADER: self.trace.trace_id}
        if self.turn is not None:
            headers["x-request-id"] = self.turn.ask.request_id
            headers["x-kvlease-turn"] = str(self.turn.number)
        if self.trace.outcome and _end(status) != "client_error":
            headers["x-kvlease-outcome"] = self.trace.outcome
            headers["x-kvlease-reused-tokens"] = str(self._reused_tokens)
        return headers

    def finished(self, response: web.StreamResponse) -> None:
        """The engine's answer has been passed on, whole."""
        self.status = response.status
        self.end = _end(response.status)
        if response.status >= 400:
            body = self.relay.refusal if self.relay else b""
            said = errors.refusal(response.status, body)
            self.error = self._loggable = f"the decode engine answered with {said}"
            self._error_type = str(response.status)

    def refuse(self, refused: Refused) -> web.Response:
        """The prefill engine's own words."""
        self.status, self.end = refused.status, _end(refused.status)
        self.error = self._loggable = f"the prefill engine {refused}"
        self._error_type = str(refused.status)
        headers = self.headers(refused.status)
        response = web.Response(status=refused.status, body=refused.body, headers=headers)
        response.headers["Content-Type"] = refused.content_type
        return response

    async def fail(self, error: HttpError) -> web.StreamResponse:
        """The router's own words, or the end of an answer that has begun."""
        self.status, self.end, self.error = error.status, _end(error.status), error.message
        self._error_type = error.code
        if self.end == "failed":
            self._loggable = error.message
        elif error.param:
            self._loggable = f"param {error.param}"
        if self.relay is None or self.relay.response is None:
            return error.response(self.headers(error.status))
        self.status = self.relay.response.status
        try:
            await self.relay.fail(error)
        except ClientGone:
            self.end = "disconnected"
        return self.relay.response

    def end_trace(self) -> None:
        """Nothing more will become of the turn."""
        if self.end != "disconnected":
            self.trace.end(self.end, status=self.status, error=self.error, kind=self._error_type)
            return
        begun = self.relay.response if self.relay else None
        status = begun.status if begun is not None and begun.prepared else 0
        self.trace.end(self.end, status=status, error=CLIENT_GONE, kind=self.end)


def _why(ask: Ask, handoff: Handoff | None) -> str:
    """Why the turn's outcome was what it was, as a sentence."""
    if not ask.reuse:
        return "the request said x-kvlease-reuse: off"
    return handoff.detail if handoff else ""


def _end(status: int) -> str:
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "failed"
