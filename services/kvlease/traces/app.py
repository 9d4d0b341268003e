"""A small receiver of traces: keeps the latest, and answers queries as Jaeger does.

For a laptop and for tests, where a Jaeger is too much. It has no disk and no pages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvlease import listening, rpc, serving
from kvlease.config import Settings
from kvlease.traces import jaeger
from kvlease.traces.buffer import Buffer
from kvlease.traces.forward import Forwarder

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

STOP_GRACE_S = 2.0


async def serve_traces(
    settings: Settings, stop: asyncio.Event, ready: serving.Ready = serving.log_ready
) -> None:
    """Takes spans on ``traces_listen`` and queries on ``traces_http_listen`` until
    ``stop`` is set; ``ready`` is told both addresses, as ``traces_otlp`` and ``traces``.

    Raises :class:`~kvlease.config.ConfigError` if an address cannot be listened on.
    """
    buffer = Buffer(settings.traces_kept)
    forwarder = Forwarder(settings.traces_forward) if settings.traces_forward else None
    server = rpc.Server([SERVICE])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        _Receiver(buffer, forwarder), server.grpc
    )
    try:
        port = await server.start(settings.traces_listen, "traces_listen")
        async with _http(_app(buffer), settings.traces_http_listen) as http_port:
            await server.set_ready(True)
            ready("traces_otlp", _with_port(settings.traces_listen, port))
            ready("traces", _with_port(settings.traces_http_listen, http_port))
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(forwarder.run()) if forwarder else None
                await stop.wait()
                await server.stop(STOP_GRACE_S)
                if sending is not None:
                    sending.cancel()
    finally:
        await server.stop(0)


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """OTLP's TraceService."""

    def __init__(self, buffer: Buffer, forwarder: Forwarder | None) -> None:
        self._buffer = buffer
        self._forwarder = forwarder

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: rpc.Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._buffer.add(request)
        if self._forwarder is not None:
            self._forwarder.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Queries:
    """The part of Jaeger's query API that shows traces."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def trace(self, request: web.Request) -> web.Response:
        """One trace, by its id."""
        text = request.match_info["trace_id"]
        try:
            trace_id = bytes.fromhex(text.zfill(32))
        except ValueError:
            return _error(400, f"{text} is not a trace id: it has up to 32 hex digits")
        found = self._buffer.trace(trace_id)
        return _data([jaeger.trace_json(found)]) if found else _error(404, "trace not found")

    async def search(self, request: web.Request) -> web.Response:
        """Traces, the latest first."""
        try:
            search = jaeger.parse_search(list(request.query.items()))
        except jaeger.BadSearch as error:
            return _error(400, str(error))
        found: list[dict[str, Any]] = []
        for spans in self._buffer.latest_first():
            if len(found) >= search.limit:
                break
            if search.finds(spans):
                found.append(jaeger.trace_json(spans))
        return _data(found)

    async def services(self, request: web.Request) -> web.Response:
        """Names of the services that spans are kept of."""
        names = {
            jaeger.service_of(kept.resource)
            for spans in self._buffer.latest_first()
            for kept in spans
        }
        return _data(sorted(names))

    async def operations(self, request: web.Request) -> web.Response:
        """Names of a service's spans."""
        service = request.match_info["service"]
        names = {
            kept.span.name
            for spans in self._buffer.latest_first()
            for kept in spans
            if jaeger.service_of(kept.resource) == service
        }
        return _data(sorted(names))


def _app(buffer: Buffer) -> web.Application:
    queries = _Queries(buffer)
    app = web.Application()
    app.router.add_get("/api/traces/{trace_id}", queries.trace)
    app.router.add_get("/api/traces", queries.search)
    app.router.add_get("/api/services", queries.services)
    app.router.add_get("/api/services/{service}/operations", queries.operations)
    return app


def _data(data: list[Any]) -> web.Response:
    return web.json_response(
        {"data": data, "total": len(data), "limit": 0, "offset": 0, "errors": None}
    )


def _error(status: int, message: str) -> web.Response:
    errors = [{"code": status, "msg": message}]
    body = {"data": None, "total": 0, "limit": 0, "offset": 0, "errors": errors}
    return web.json_response(body, status=status)


@contextlib.asynccontextmanager
async def _http(app: web.Application, listen: str) -> AsyncIterator[int]:
    """Listens; the port. Raises :class:`~kvlease.config.ConfigError`."""
    host, _, port = listen.rpartition(":")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_GRACE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]") or None, int(port), reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            raise listening.refused("traces_http_listen", listen, error) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _with_port(listen: str, port: int) -> str:
    return f"{listen.rpartition(':')[0]}:{port}"
