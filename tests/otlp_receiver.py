"""A real OTLP gRPC receiver: keeps the spans that services export, to be looked into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class Span:
    """One exported span. Ids are hex; ``parent_id`` empty: a root. Times are ns."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Span ids that it links to."""
    failed: bool
    status: str
    """The message of its status."""
    resource: dict[str, Any] = field(default_factory=dict)
    """Attributes of who made it."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class Receiver:
    """Everything that was exported to it. Calls come on threads of the server."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        self.endpoint = ""
        """For ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    def add(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans += _spans(request)
            self._changed.notify_all()

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Span]:
        """Its spans, by their start."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)

    def wait_for(self, trace_id: str, *names: str, timeout_s: float = 10.0) -> dict[str, Span]:
        """The trace's spans by name (the last of each), once all of ``names`` are there."""

        def there() -> bool:
            return set(names) <= {s.name for s in self._spans if s.trace_id == trace_id}

        with self._changed:
            if not self._changed.wait_for(there, timeout_s):
                have = sorted(s.name for s in self._spans if s.trace_id == trace_id)
                raise AssertionError(f"trace {trace_id} has only {have}, not {sorted(names)}")
        return {span.name: span for span in self.trace(trace_id)}

    def wait_until(
        self, condition: Callable[[list[Span]], bool], timeout_s: float = 10.0
    ) -> list[Span]:
        """All spans, once ``condition`` holds for them."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(list(self._spans)):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"not within {timeout_s} s: {self._spans}")
            return list(self._spans)


def tree(spans: list[Span]) -> dict[str, str]:
    """Span name → its parent's name ("" for a root or a parent outside)."""
    names = {span.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_id, "") for span in spans}


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._receiver.add(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiving(port: int = 0, host: str = "127.0.0.1") -> Iterator[Receiver]:
    """A receiver on one address of this machine."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(receiver), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    server.start()
    receiver.endpoint = f"http://{host}:{bound}"
    try:
        yield receiver
    finally:
        server.stop(0).wait()


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    service=str(resource.get("service.name", "")),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=tuple(link.span_id.hex() for link in span.links),
                    failed=span.status.code == 2,
                    status=span.status.message,
                    resource=resource,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    items: list[KeyValue] = list(pairs)
    return {item.key: _value(item.value) for item in items}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
