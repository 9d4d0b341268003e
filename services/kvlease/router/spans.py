"""The router's part of a turn's trace: turn, ttft, route, prefill, decode.

Names and attributes: docs/tracing.md. Every span ends, however the turn does: each is
opened by a context manager, or ended by :meth:`TurnTrace.end`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from kvlease import telemetry
from kvlease.router.ask import Ask
from kvlease.router.handoff import Handoff
from kvlease.router.split import Endpoint
from kvlease.v1 import lease_pb2, registry_pb2

_OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.COMPLETION: "text_completion"}
"""gen_ai.operation.name, as OpenTelemetry's GenAI conventions name them."""


class TurnTrace:
    """One turn's spans. It starts when the request arrives."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str], endpoint: Endpoint) -> None:
        self._tracer = tracer
        self._arrival_ns = time.time_ns()
        self._arrival = time.monotonic()
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
            start_time=self._arrival_ns,
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
        return self._arrival_ns / 1e9

    @property
    def traceparent(self) -> str:
        """Names the ``turn`` span as a parent."""
        return telemetry.inject(self._turn)["traceparent"]

    def asked(self, ask: Ask) -> None:
        """The request has been read."""
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
        for link in telemetry.link_to(handoff.lease_traceparent):
            self._turn.add_link(link.context, {"kvlease.link": "granted the lease"})

    def first_content(self) -> None:
        """The first content byte goes to the client: makes the ``ttft`` span."""
        if self.ttft_s is not None:
            return
        self.ttft_s = time.monotonic() - self._arrival
        self._turn.set_attributes(
            {
                "gen_ai.response.time_to_first_chunk": self.ttft_s,
                "kvlease.ttft_s": self.ttft_s,
            }
        )
        span = self._tracer.start_span("ttft", self._inside, start_time=self._arrival_ns)
        span.set_attributes({"kvlease.outcome": self.outcome, "kvlease.ttft_s": self.ttft_s})
        span.end(self._arrival_ns + int(self.ttft_s * 1e9))

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
        span = self._tracer.start_span(name, self._inside, kind=kind, attributes=dict(attributes))
        try:
            yield span
        except asyncio.CancelledError:
            fail(span, "the client went away")
            raise
        except Exception as error:
            fail(span, str(error) or type(error).__name__)
            raise
        finally:
            span.end()

    def end(self, *, status: int, error: str = "") -> None:
        """The turn is over. ``status`` 0: the client was gone before it got one."""
        if status:
            self._turn.set_attribute("http.response.status_code", status)
        if error:
            fail(self._turn, error)
        self._turn.end()


def fail(span: Span, message: str) -> None:
    """Marks a span as failed, with a sentence."""
    span.set_status(Status(StatusCode.ERROR, message[:500]))
