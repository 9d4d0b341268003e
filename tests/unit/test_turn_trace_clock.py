"""A turn's spans lie in one another, whatever is done to the machine's clock."""

from __future__ import annotations

import time

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Tracer

from kvlease import telemetry
from kvlease.router.spans import TurnTrace
from kvlease.router.split import Endpoint

HOUR_NS = 3600 * 10**9


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def turn_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - HOUR_NS)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_clock_that_is_turned_back_moves_no_span_out_of_its_turn(
    monkeypatch: pytest.MonkeyPatch, tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    turn = TurnTrace(tracer, {}, Endpoint.CHAT)
    turn_clock_back(monkeypatch)

    with turn.route():
        pass
    turn.first_content()
    turn.end("ok", status=200)

    spans = {span.name: times(span) for span in exporter.get_finished_spans()}
    assert set(spans) == {"turn", "ttft", "route"}
    start, end = spans["turn"]
    assert all(start <= first <= last <= end for first, last in spans.values())
    assert spans["ttft"][0] == start
    assert end - start < HOUR_NS


def test_a_timed_span_does_not_end_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    with telemetry.timed(tracer, "a", Context(), SpanKind.CLIENT):
        turn_clock_back(monkeypatch)

    ((start, end),) = map(times, exporter.get_finished_spans())
    assert 0 <= end - start < HOUR_NS


def test_a_timed_span_tells_what_it_failed_of(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    with (
        pytest.raises(ValueError, match="the words"),
        telemetry.timed(tracer, "a", Context(), SpanKind.CLIENT),
    ):
        raise ValueError("the words")

    (span,) = exporter.get_finished_spans()
    assert span.status.description == "the words"
