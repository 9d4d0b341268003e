"""The router's part of a turn's trace: turn, ttft, route, prefill, decode.

Names and attributes: docs/tracing.md. Every span ends, however the turn does: each is
opened by a context manager, or ended by :meth:`TurnTrace.end`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from kvlease import telemetry
from kvlease.router.ask import Ask
from kvlease.router.errors import HttpError
from kvlease.router.handoff import HIT, Handoff
from kvlease.router.relay import ClientGone
from kvlease.router.split import Endpoint
from kvlease.router.upstream import EngineFailed
from kvlease.v1 import lease_pb2, registry_pb2

CLIENT_GONE = "the client went away"

_OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.COMPLETION: "text_completion"}
"""gen_ai.operation.name, as OpenTelemetry's GenAI conventions name them."""


class TurnTrace:
    """One turn's spans. It starts when the request arrives. All are timed by one clock, so
    that none of them lies outside of the turn."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str], endpoint: Endpoint) -> None:
        self._tracer = tracer
        self._clock = telemetry.Stopwatch()
        self._understood = False
        self.ttft_s: float | None = None
        self.outcome = ""
        self.handoff: Handoff | None = None
        """The last one."""
        self.engine_ids: dict[str, str] = {}
        """"prefill" and "decode" → the engine that was asked last."""
        self._turn = tracer.start_span(
            "turn",
            context=telemetry.extract(headers),
            kind=SpanKind.SERVER,
            start_time=self._clock.start_ns,
            attributes={
                "gen_ai.operation.name": _OPERATIONS[endpoint],
                "gen_ai.provider.name": "vllm",
                "http.request.method": "POST",
                "http.route": endpoint.value,
            },
        )
        self._inside = trace.set_span_in_context(self._turn, Context())

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return telemetry.trace_id_of(self._turn)

    @property
    def start(self) -> float:
        """When the request arrived, in seconds since 1970."""
        return self._clock.start_ns / 1e9

    @property
    def traceparent(self) -> str:
        """Names the ``turn`` span as a parent."""
        return telemetry.inject(self._turn)["traceparent"]

    def asked(self, ask: Ask) -> None:
        """The request has been read and understood: from here on a first token is due."""
        self._understood = True
        self._turn.set_attributes(
            {
                "gen_ai.request.model": ask.model,
                "gen_ai.request.stream": ask.stream,
                "kvlease.tenant": ask.tenant,
                "kvlease.reuse": ask.reuse,
                "kvlease.request_id": ask.request_id,
            }
        )
        if ask.conversation_id:
            self._turn.set_attributes(
                {
                    "gen_ai.conversation.id": ask.conversation_id,
                    "kvlease.conversation": ask.conversation_id,
                }
            )

    def started(self, turn: int, lease: lease_pb2.Lease | None) -> None:
        """The lease service has counted the turn (0: it could not be asked)."""
        self._turn.set_attribute("kvlease.turn", turn)
        if lease is not None:
            self._turn.set_attribute("kvlease.lease.holder", lease.holder_engine_id)

    def handed_over(self, handoff: Handoff) -> None:
        """The prefill half has ended, or there will be none."""
        self.outcome = handoff.outcome
        self.handoff = handoff
        attributes: dict[str, AttributeValue] = {"kvlease.outcome": handoff.outcome}
        if handoff.detail:
            attributes["kvlease.detail"] = handoff.detail
        if handoff.prompt_tokens:
            attributes["gen_ai.usage.input_tokens"] = handoff.prompt_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = handoff.reused_tokens
            attributes["kvlease.prompt_tokens"] = handoff.prompt_tokens
            attributes["kvlease.reused_tokens"] = handoff.reused_tokens
            attributes["kvlease.computed_tokens"] = handoff.prompt_tokens - handoff.reused_tokens
        self._turn.set_attributes(attributes)

    def first_content(self) -> None:
        """The first content byte has gone to the client: makes the ``ttft`` span."""
        if self.ttft_s is not None:
            return
        self.ttft_s = self._clock.elapsed_s
        self._turn.set_attributes(
            {
                "gen_ai.response.time_to_first_chunk": self.ttft_s,
                "kvlease.ttft_s": self.ttft_s,
            }
        )
        span = self._ttft()
        span.set_attribute("kvlease.ttft_s", self.ttft_s)
        span.end(self._clock.start_ns + int(self.ttft_s * 1e9))

    def _ttft(self) -> Span:
        attributes = {"kvlease.outcome": self.outcome} if self.outcome else {}
        return self._tracer.start_span(
            "ttft", self._inside, attributes=attributes, start_time=self._clock.start_ns
        )

    @contextmanager
    def route(self) -> Iterator[Span]:
        """The span around the choice of engines."""
        with self._child("route", SpanKind.INTERNAL, {}) as span:
            yield span

    @contextmanager
    def prefill(self, engine: registry_pb2.Engine, reason: str, attempt: int) -> Iterator[Span]:
        """The span around one request to a prefill engine."""
        with self._engine("prefill", engine, reason, attempt) as span:
            yield span

    @contextmanager
    def decode(self, engine: registry_pb2.Engine, reason: str, attempt: int) -> Iterator[Span]:
        """The span around one request to a decode engine."""
        with self._engine("decode", engine, reason, attempt) as span:
            yield span

    @contextmanager
    def _engine(
        self, half: str, engine: registry_pb2.Engine, reason: str, attempt: int
    ) -> Iterator[Span]:
        self.engine_ids[half] = engine.engine_id
        self._turn.set_attribute(f"kvlease.{half}.engine_id", engine.engine_id)
        attributes: dict[str, AttributeValue] = {
            "kvlease.engine_id": engine.engine_id,
            "kvlease.incarnation": engine.incarnation,
            "kvlease.reason": reason,
            "kvlease.attempt": attempt,
            "gen_ai.request.model": engine.model,
            "url.full": engine.http_address,
        }
        with self._child(half, SpanKind.CLIENT, attributes) as span:
            yield span

    @contextmanager
    def _child(
        self, name: str, kind: SpanKind, attributes: Mapping[str, AttributeValue]
    ) -> Iterator[Span]:
        span = self._tracer.start_span(
            name,
            self._inside,
            kind=kind,
            attributes=dict(attributes),
            start_time=self._clock.now_ns(),
        )
        try:
            yield span
        except (asyncio.CancelledError, ClientGone):
            telemetry.fail(span, CLIENT_GONE, "disconnected")
            raise
        except Exception as error:
            telemetry.fail(span, telemetry.words_of(error), _type_of(error))
            raise
        finally:
            span.end(self._clock.now_ns())

    def end(self, how: str, *, status: int, error: str = "", kind: str = "") -> None:
        """The turn is over. ``how``: the word that metrics have for it. ``status`` 0: the
        client was gone before it got one. ``error``: what it failed of, ``kind`` a word
        for that.

        A turn whose first token was due and never came has a failed ``ttft`` span, from
        arrival to now: a time to first token that is longer than this.
        """
        self._turn.set_attribute("kvlease.end", how)
        if status:
            self._turn.set_attribute("http.response.status_code", status)
        if error:
            telemetry.fail(self._turn, error, kind)
        if self.handoff is not None and self.handoff.outcome == HIT:
            for link in telemetry.link_to(self.handoff.lease_traceparent):
                self._turn.add_link(link.context, {"kvlease.link": "granted the lease"})
        now_ns = self._clock.now_ns()
        if self._understood and self.ttft_s is None:
            span = self._ttft()
            telemetry.fail(span, f"no first token: {error or 'the answer was empty'}", kind)
            span.end(now_ns)
        self._turn.end(now_ns)


def _type_of(error: Exception) -> str:
    """A word for what a half of a turn failed of."""
    match error:
        case EngineFailed():
            return error.reason
        case HttpError():
            return error.code
        case _:
            return type(error).__name__
