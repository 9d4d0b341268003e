"""The latest traces are kept, the oldest go; what is kept is told as Jaeger tells it."""

from __future__ import annotations

import json

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvlease.traces import jaeger
from kvlease.traces.buffer import Buffer

NOW_S = 1_700_000_000.0


def export(*spans: Span, service: str = "telemetrygen") -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    of_resource.resource.attributes.append(text("service.name", service))
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name = "telemetrygen"
    of_scope.spans.extend(spans)
    return request


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def span(trace: int, number: int = 1, **fields: object) -> Span:
    start = int(NOW_S * 1e9)
    values = {
        "trace_id": trace.to_bytes(16),
        "span_id": number.to_bytes(8),
        "name": "turn",
        "start_time_unix_nano": start,
        "end_time_unix_nano": start + 2_000_000,
    }
    return Span(**{**values, **fields})  # type: ignore[arg-type]


def kept(buffer: Buffer, trace: int) -> int:
    return len(buffer.trace(trace.to_bytes(16)))


def test_a_trace_grows_with_every_export() -> None:
    buffer = Buffer(max_traces=10)

    buffer.add(export(span(1, 1), span(2, 1)))
    buffer.add(export(span(1, 2), service="other"))

    assert (kept(buffer, 1), kept(buffer, 2), kept(buffer, 3)) == (2, 1, 0)


def test_the_oldest_traces_go_when_there_are_too_many() -> None:
    buffer = Buffer(max_traces=2)

    for trace in (1, 2, 1, 3):
        buffer.add(export(span(trace)))

    assert [kept(buffer, trace) for trace in (1, 2, 3)] == [0, 1, 1]
    assert [spans[0].span.trace_id for spans in buffer.latest_first()] == [
        trace.to_bytes(16) for trace in (3, 2)
    ]


def test_the_oldest_traces_go_when_they_are_too_large() -> None:
    size = len(span(1).SerializeToString())
    buffer = Buffer(max_traces=100, max_bytes=3 * size)

    for trace in range(1, 6):
        buffer.add(export(span(trace)))
    assert [kept(buffer, trace) for trace in range(1, 6)] == [0, 0, 1, 1, 1]

    buffer.add(export(*(span(6, number) for number in range(1, 5))))
    assert [kept(buffer, trace) for trace in range(1, 7)] == [0] * 6  # it alone is too large
    buffer.add(export(span(7)))
    assert kept(buffer, 7) == 1


def test_a_span_is_told_as_jaeger_tells_it() -> None:
    """The expected values are those of Jaeger's own test (``otlp2jaeger-out.json``)."""
    trace_id, span_id = "83a9efd15c1c98a977e0711cc93ee28b", "e127af99e3b3e074"
    parent_id = "909541b92cf05311"
    buffer = Buffer(max_traces=1)
    buffer.add(
        export(
            Span(
                trace_id=bytes.fromhex(trace_id),
                span_id=bytes.fromhex(span_id),
                parent_span_id=bytes.fromhex(parent_id),
                name="okey-dokey-0",
                kind=Span.SPAN_KIND_SERVER,
                start_time_unix_nano=1706678909209712000,
                end_time_unix_nano=1706678909209835000,
                attributes=[
                    text("net.peer.ip", "1.2.3.4"),
                    text("peer.service", "telemetrygen-client"),
                ],
            )
        )
    )

    told = jaeger.trace_json(buffer.trace(bytes.fromhex(trace_id)))

    assert told == {
        "traceID": trace_id,
        "spans": [
            {
                "traceID": trace_id,
                "spanID": span_id,
                "operationName": "okey-dokey-0",
                "references": [{"refType": "CHILD_OF", "traceID": trace_id, "spanID": parent_id}],
                "startTime": 1706678909209712,
                "duration": 123,
                "tags": [
                    # Its name in version 2; in version 1 it was otel.library.name.
                    {"key": "otel.scope.name", "type": "string", "value": "telemetrygen"},
                    {"key": "net.peer.ip", "type": "string", "value": "1.2.3.4"},
                    {"key": "peer.service", "type": "string", "value": "telemetrygen-client"},
                    {"key": "span.kind", "type": "string", "value": "server"},
                ],
                "logs": [],
                "processID": "p1",
                "warnings": None,
            }
        ],
        "processes": {"p1": {"serviceName": "telemetrygen", "tags": []}},
        "warnings": None,
    }


def test_links_status_events_and_all_kinds_of_values_are_told() -> None:
    made = span(
        1,
        links=[Span.Link(trace_id=b"l" * 16, span_id=b"s" * 8)],
        status=Status(code=Status.STATUS_CODE_ERROR, message="why"),
        events=[Span.Event(name="hello", time_unix_nano=5_000)],
        attributes=[
            KeyValue(key="n", value=AnyValue(int_value=7)),
            KeyValue(key="x", value=AnyValue(double_value=0.5)),
            KeyValue(key="b", value=AnyValue(bool_value=False)),
            KeyValue(
                key="a",
                value=AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="p-0")])),
            ),
        ],
    )
    buffer = Buffer(max_traces=1)
    buffer.add(export(made))

    (told,) = jaeger.trace_json(buffer.trace(made.trace_id))["spans"]

    link = {"refType": "FOLLOWS_FROM", "traceID": (b"l" * 16).hex(), "spanID": (b"s" * 8).hex()}
    assert told["references"] == [link]
    assert told["logs"] == [
        {"timestamp": 5, "fields": [{"key": "event", "type": "string", "value": "hello"}]}
    ]
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in told["tags"]}
    assert tags == {
        "otel.scope.name": ("string", "telemetrygen"),
        "n": ("int64", 7),
        "x": ("float64", 0.5),
        "b": ("bool", False),
        "a": ("string", '["p-0"]'),
        "otel.status_code": ("string", "ERROR"),
        "otel.status_description": ("string", "why"),
        "error": ("bool", True),
    }


@pytest.mark.parametrize(
    ("query", "finds"),
    [
        ({}, True),
        ({"service": "other"}, False),
        ({"operation": "turn"}, True),
        ({"operation": "route"}, False),
        ({"tags": json.dumps({"kvlease.outcome": "hit", "error": "true"})}, True),
        ({"tags": json.dumps({"kvlease.outcome": "hit", "kvlease.turn": "8"})}, False),
        ({"tag": "kvlease.turn:7"}, True),
        ({"minDuration": "1.5ms", "maxDuration": "3ms"}, True),
        ({"minDuration": "3ms"}, False),
        ({"maxDuration": "1999us"}, False),
        ({"start": f"{(NOW_S + 1) * 1e6:.0f}"}, False),
        ({"end": f"{(NOW_S - 1) * 1e6:.0f}"}, False),
    ],
)
def test_a_search_finds_what_jaeger_would_find(query: dict[str, str], finds: bool) -> None:
    buffer = Buffer(max_traces=1)
    buffer.add(
        export(
            span(
                1,
                attributes=[
                    text("kvlease.outcome", "hit"),
                    KeyValue(key="kvlease.turn", value=AnyValue(int_value=7)),
                ],
                status=Status(code=Status.STATUS_CODE_ERROR),
            ),
            service="router",
        )
    )

    pairs = list({"service": "router", **query}.items())
    search = jaeger.parse_search(pairs, now=lambda: NOW_S + 10)

    assert [search.finds(spans) for spans in buffer.latest_first()] == [finds]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({}, "'service' is required"),
        ({"service": "s", "tags": "a=b"}, "'tags'"),
        ({"service": "s", "tags": '{"a": 1}'}, "'tags'"),
        ({"service": "s", "tag": "a"}, "'tag'"),
        ({"service": "s", "limit": "many"}, "'limit'"),
        ({"service": "s", "minDuration": "3 ms"}, "'minDuration'"),
        ({"service": "s", "start": "-1"}, "'start'"),
    ],
)
def test_a_search_that_is_malformed_is_refused(query: dict[str, str], message: str) -> None:
    with pytest.raises(jaeger.BadSearch, match=message):
        jaeger.parse_search(list(query.items()))
