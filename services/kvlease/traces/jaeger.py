"""Traces as Jaeger's query service tells them, and searches as it understands them. Pure.

What is sent is OTLP; Jaeger's JSON of it is defined by OpenTelemetry's mapping to Jaeger
(opentelemetry-collector-contrib, ``pkg/translator/jaeger/README.md``), the search by
Jaeger's ``query_parser.go``. Times in it are microseconds.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvlease.traces.buffer import Kept

DEFAULT_LIMIT = 100
LOOKBACK_S = 48 * 3600

_KINDS = {
    Span.SPAN_KIND_SERVER: "server",
    Span.SPAN_KIND_CLIENT: "client",
    Span.SPAN_KIND_PRODUCER: "producer",
    Span.SPAN_KIND_CONSUMER: "consumer",
}
_UNITS_US = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6}


class BadSearch(Exception):
    """A search that cannot be understood; the message says what is wrong with it."""


def trace_json(spans: Sequence[Kept]) -> dict[str, Any]:
    """One trace, as in ``data`` of ``GET /api/traces/{trace id}``."""
    processes: dict[bytes, tuple[str, dict[str, Any]]] = {}
    told = []
    for kept in spans:
        raw = kept.resource.SerializeToString(deterministic=True)
        if raw not in processes:
            processes[raw] = (f"p{len(processes) + 1}", _process(kept.resource))
        told.append({**_span(kept), "processID": processes[raw][0], "warnings": None})
    return {
        "traceID": spans[0].span.trace_id.hex(),
        "spans": told,
        "processes": dict(processes.values()),
        "warnings": None,
    }


def service_of(resource: Resource) -> str:
    """Its ``service.name``."""
    return str(_values(resource.attributes).get("service.name", "unknown_service"))


def _process(resource: Resource) -> dict[str, Any]:
    tags = [tag for tag in _tags(resource.attributes) if tag["key"] != "service.name"]
    return {"serviceName": service_of(resource), "tags": tags}


def _span(kept: Kept) -> dict[str, Any]:
    span = kept.span
    return {
        "traceID": span.trace_id.hex(),
        "spanID": span.span_id.hex(),
        "operationName": span.name,
        "references": _references(span),
        "startTime": span.start_time_unix_nano // 1000,
        "duration": max(0, span.end_time_unix_nano - span.start_time_unix_nano) // 1000,
        "tags": _span_tags(kept),
        "logs": [
            {
                "timestamp": event.time_unix_nano // 1000,
                "fields": [_tag("event", event.name), *_tags(event.attributes)],
            }
            for event in span.events
        ],
    }


def _references(span: Span) -> list[dict[str, str]]:
    """The parent, then the links."""
    named = [("CHILD_OF", span.trace_id, span.parent_span_id)] if span.parent_span_id else []
    named += [("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    return [
        {"refType": kind, "traceID": trace_id.hex(), "spanID": span_id.hex()}
        for kind, trace_id, span_id in named
    ]


def _span_tags(kept: Kept) -> list[dict[str, Any]]:
    span, scope = kept.span, kept.scope
    tags = [_tag("otel.scope.name", scope.name)] if scope.name else []
    tags += [_tag("otel.scope.version", scope.version)] if scope.version else []
    tags += _tags(span.attributes)
    if span.kind in _KINDS:
        tags.append(_tag("span.kind", _KINDS[span.kind]))
    if span.status.code == Status.STATUS_CODE_OK:
        tags.append(_tag("otel.status_code", "OK"))
    if span.status.code == Status.STATUS_CODE_ERROR:
        tags += [_tag("otel.status_code", "ERROR"), _tag("error", True)]
        if span.status.message:
            tags.append(_tag("otel.status_description", span.status.message))
    return tags


def _tags(attributes: Iterable[KeyValue]) -> list[dict[str, Any]]:
    return [_tag(key, value) for key, value in _values(attributes).items()]


def _tag(key: str, value: Any) -> dict[str, Any]:
    match value:
        case bool():
            kind = "bool"
        case int():
            kind = "int64"
        case float():
            kind = "float64"
        case str():
            kind = "string"
        case bytes():
            kind, value = "binary", value.hex()
        case _:
            kind, value = "string", json.dumps(value, default=str)
    return {"key": key, "type": kind, "value": value}


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _values(value.kvlist_value.values)
        case None:
            return ""
        case name:
            return getattr(value, name)


@dataclass(frozen=True, slots=True)
class Search:
    """A trace is found if one of its spans has all of this. Times are microseconds since
    1970, durations microseconds."""

    service: str
    operation: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    start_us: float = 0.0
    end_us: float = float("inf")
    min_duration_us: float = 0.0
    max_duration_us: float = float("inf")
    limit: int = DEFAULT_LIMIT

    def finds(self, spans: Iterable[Kept]) -> bool:
        """Whether these are the spans of a trace that is looked for."""
        return any(map(self._wants, spans))

    def _wants(self, kept: Kept) -> bool:
        span = kept.span
        if self.operation and span.name != self.operation:
            return False
        if service_of(kept.resource) != self.service:
            return False
        start_us = span.start_time_unix_nano / 1e3
        duration_us = span.end_time_unix_nano / 1e3 - start_us
        if not self.start_us <= start_us <= self.end_us:
            return False
        if not self.min_duration_us <= duration_us <= self.max_duration_us:
            return False
        if not self.tags:
            return True
        found = {tag["key"]: _as_text(tag["value"]) for tag in _tags(kept.resource.attributes)}
        found |= {tag["key"]: _as_text(tag["value"]) for tag in _span_tags(kept)}
        return self.tags.items() <= found.items()


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_search(query: Sequence[tuple[str, str]], now: Callable[[], float] = time.time) -> Search:
    """The search that a query string asks for. Raises :class:`BadSearch`."""
    values = dict(query)
    service = values.get("service", "")
    if not service:
        raise BadSearch("parameter 'service' is required")
    tags: dict[str, str] = {}
    for name, value in query:
        if name == "tag":
            key, colon, text = value.partition(":")
            if not colon:
                raise BadSearch(f"malformed 'tag' parameter, expecting key:value: {value}")
            tags[key] = text
        elif name == "tags":
            tags |= _json_tags(value)
    return Search(
        service=service,
        operation=values.get("operation", ""),
        tags=tags,
        start_us=_number(values, "start", (now() - LOOKBACK_S) * 1e6),
        end_us=_number(values, "end", now() * 1e6),
        min_duration_us=_duration(values, "minDuration", 0.0),
        max_duration_us=_duration(values, "maxDuration", float("inf")),
        limit=int(_number(values, "limit", DEFAULT_LIMIT)),
    )


def _json_tags(text: str) -> dict[str, str]:
    try:
        tags = json.loads(text)
    except ValueError:
        tags = None
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise BadSearch("malformed 'tags' parameter, expecting a JSON object of strings")
    return tags


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,18}", text):
        raise BadSearch(f"unable to parse param '{name}': {text}")
    return float(text)


def _duration(values: Mapping[str, str], name: str, default: float) -> float:
    """As Go writes durations, in one unit: 1.2s, 100ms, 500us."""
    text = values.get(name, "")
    if not text:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", text)
    if match is None:
        raise BadSearch(f"unable to parse param '{name}': {text} (write 1.5s or 200ms)")
    return float(match[1]) * _UNITS_US[match[2]]
