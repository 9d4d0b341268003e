"""Traces leave the process, and never hold it up."""

from __future__ import annotations

import time

import pytest
from otlp_receiver import receiving

from kvlease import telemetry
from kvlease.telemetry import ENDPOINT_ENV, Telemetry

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_without_an_endpoint_spans_have_ids_and_go_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENDPOINT_ENV, raising=False)
    tracing = Telemetry("test")

    with tracing.tracer.start_as_current_span("a") as span:
        assert len(telemetry.trace_id_of(span)) == 32
        assert telemetry.inject(span)["traceparent"].split("-")[1] == telemetry.trace_id_of(span)

    tracing.shutdown()


def test_spans_are_exported_with_the_service_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv(ENDPOINT_ENV, receiver.endpoint)
        tracing = Telemetry("test", instance_id="i")

        with tracing.tracer.start_as_current_span("a"):
            pass
        tracing.flush()

        (span,) = receiver.spans
        assert (span.name, span.service, span.parent_id) == ("a", "test", "")
        tracing.shutdown()


def test_what_is_left_is_exported_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv(ENDPOINT_ENV, receiver.endpoint)
        tracing = Telemetry("test")
        with tracing.tracer.start_as_current_span("a"):
            pass

        tracing.shutdown()

        assert [span.name for span in receiver.spans] == ["a"]


def test_a_collector_that_is_gone_does_not_hold_up_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT_ENV, "http://127.0.0.1:1")
    tracing = Telemetry("test")
    with tracing.tracer.start_as_current_span("a"):
        pass

    began = time.monotonic()
    tracing.shutdown(timeout_s=0.3)

    assert time.monotonic() - began < 2.0


def test_a_traceparent_becomes_the_parent_and_a_malformed_one_none() -> None:
    tracing = Telemetry("test")

    def trace_of(header: str) -> str:
        context = telemetry.extract({"traceparent": header})
        return telemetry.trace_id_of(tracing.tracer.start_span("a", context))

    assert trace_of(TRACEPARENT) == "a" * 32
    assert trace_of("nonsense") not in ("a" * 32, "0" * 32)


def test_a_link_is_made_only_to_a_span_that_is_named() -> None:
    (link,) = telemetry.link_to(TRACEPARENT)

    assert link.context.span_id == int("b" * 16, 16)
    assert telemetry.link_to("") == telemetry.link_to("nonsense") == []
