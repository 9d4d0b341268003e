"""OpenTelemetry: one trace a turn, exported when ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set.

Spans are batched and exported from a thread of their own: a collector that is slow or
gone never slows a turn. Names and attributes of the spans: docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

ENDPOINT_ENV = "OTEL_EXPORTER_OTLP_ENDPOINT"

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """A service's tracer and its exporter. Without an endpoint, spans still have ids
    (so that a response can name its trace) but go nowhere."""

    def __init__(self, service_name: str, *, instance_id: str = "") -> None:
        resource = Resource.create(
            {
                "service.name": service_name,
                "service.namespace": "kvlease",
                "service.version": version("kvlease"),
                "service.instance.id": instance_id or str(uuid.uuid4()),
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter: OTLPSpanExporter | None = None
        if os.environ.get(ENDPOINT_ENV):
            self._exporter = OTLPSpanExporter()
            self._provider.add_span_processor(
                BatchSpanProcessor(self._exporter, schedule_delay_millis=1000)
            )
        self.tracer = self._provider.get_tracer("kvlease", version("kvlease"))

    def flush(self) -> None:
        """Exports what has ended so far. Blocks, up to the exporter's own deadline."""
        self._provider.force_flush()

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Exports what is left, in at most about ``timeout_s``. Blocks.

        The SDK would wait half a minute for a collector that is gone: its worker thread
        sleeps between tries until the exporter itself is told to stop.
        """
        if self._exporter is None:
            self._provider.shutdown()
            return
        stopper = threading.Timer(timeout_s, self._exporter.shutdown)
        stopper.daemon = True
        stopper.start()
        try:
            self._provider.shutdown()
        finally:
            stopper.cancel()


class Stopwatch:
    """The wall clock, read once and then counted on: times of one never go backwards,
    whatever is done to the machine's clock meanwhile. In nanoseconds since 1970."""

    def __init__(self) -> None:
        self.start_ns = time.time_ns()
        self._zero_ns = time.monotonic_ns()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return (time.monotonic_ns() - self._zero_ns) / 1e9

    def now_ns(self) -> int:
        """The time now, never before :attr:`start_ns`."""
        return self.start_ns + time.monotonic_ns() - self._zero_ns


def words_of(error: BaseException) -> str:
    """What an exception says, else what it is called."""
    return str(error) or type(error).__name__


@contextlib.contextmanager
def timed(
    tracer: trace.Tracer,
    name: str,
    context: Context,
    kind: trace.SpanKind,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    why: Callable[[BaseException], str] = words_of,
) -> Iterator[trace.Span]:
    """A span around the block. An exception that leaves it makes the span a failed one;
    ``why`` has the words for it."""
    clock = Stopwatch()
    span = tracer.start_span(
        name, context, kind=kind, attributes=attributes, start_time=clock.start_ns
    )
    try:
        yield span
    except BaseException as error:
        fail(span, why(error))
        raise
    finally:
        span.end(clock.now_ns())


def fail(span: trace.Span, message: str, kind: str = "") -> None:
    """Marks a span as failed, with a sentence. ``kind`` is a word for programs."""
    span.set_status(trace.Status(trace.StatusCode.ERROR, message[:500]))
    if kind:
        span.set_attribute("error.type", kind)


def extract(headers: Mapping[str, str]) -> Context:
    """The context that ``traceparent`` and ``tracestate`` headers carry (lower-case
    names); an empty one where they are absent or malformed."""
    return _PROPAGATOR.extract(headers, context=Context())


def inject(span: trace.Span) -> dict[str, str]:
    """``traceparent`` (and ``tracestate``) headers that make ``span`` the parent."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span, Context()))
    return carrier


def link_to(traceparent: str) -> list[trace.Link]:
    """A span link to the span that ``traceparent`` names; none where it names none."""
    context = trace.get_current_span(extract({"traceparent": traceparent})).get_span_context()
    return [trace.Link(context)] if context.is_valid else []


def trace_id_of(span: trace.Span) -> str:
    """32 hex digits."""
    return trace.format_trace_id(span.get_span_context().trace_id)
