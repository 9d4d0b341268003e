"""The latest traces, in memory. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MAX_BYTES = 64 * 2**20
"""Of spans as they are sent, which is how they are kept: as messages they would take six
times as much. A turn has about a dozen, 10 KB together."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A span, with who made it. Spans of one process share ``resource`` and ``scope``."""

    span: Span
    resource: Resource
    scope: InstrumentationScope


_resource = functools.lru_cache(maxsize=1024)(Resource.FromString)
_scope = functools.lru_cache(maxsize=1024)(InstrumentationScope.FromString)


@dataclass(slots=True)
class _Trace:
    spans: list[tuple[bytes, Resource, InstrumentationScope]] = field(default_factory=list)
    num_bytes: int = 0


class Buffer:
    """Keeps the last ``max_traces`` traces, in at most ``max_bytes``. What is over goes
    trace by trace, the one first that began to arrive first."""

    def __init__(self, max_traces: int, max_bytes: int = MAX_BYTES) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._traces: dict[bytes, _Trace] = {}
        self._num_bytes = 0

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keeps every span of an export."""
        for of_resource in request.resource_spans:
            resource = _resource(of_resource.resource.SerializeToString(deterministic=True))
            for of_scope in of_resource.scope_spans:
                scope = _scope(of_scope.scope.SerializeToString(deterministic=True))
                for span in of_scope.spans:
                    self._keep(span, resource, scope)
        while len(self._traces) > self._max_traces or self._num_bytes > self._max_bytes:
            oldest = self._traces.pop(next(iter(self._traces)))
            self._num_bytes -= oldest.num_bytes

    def _keep(self, span: Span, resource: Resource, scope: InstrumentationScope) -> None:
        raw = span.SerializeToString()
        trace = self._traces.setdefault(span.trace_id, _Trace())
        trace.spans.append((raw, resource, scope))
        trace.num_bytes += len(raw)
        self._num_bytes += len(raw)

    def trace(self, trace_id: bytes) -> list[Kept]:
        """The trace's spans so far; none where it is not (or no longer) kept."""
        found = self._traces.get(trace_id)
        return _decoded(found) if found else []

    def latest_first(self) -> Iterator[list[Kept]]:
        """Every trace, the one first that began to arrive last."""
        for trace in reversed(self._traces.values()):
            yield _decoded(trace)


def _decoded(trace: _Trace) -> list[Kept]:
    return [Kept(Span.FromString(raw), resource, scope) for raw, resource, scope in trace.spans]
