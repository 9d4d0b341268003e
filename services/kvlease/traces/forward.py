"""Exports, passed on as they came."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.util.re import parse_env_headers

from kvlease.config import ConfigError

TIMEOUT_S = 10.0
QUEUE = 100
"""Exports that may wait. What comes while so many do is dropped: nobody who exports waits
for a receiver that is slow or gone."""

_log = structlog.get_logger("kvlease.traces")


class Forwarder:
    """Sends every export to another receiver, once, in the background.

    ``endpoint`` is a URL: ``https`` with the certificate authority of
    ``OTEL_EXPORTER_OTLP_CERTIFICATE`` (default: gRPC's own), else without TLS. Headers
    are those of ``OTEL_EXPORTER_OTLP_HEADERS``.
    """

    def __init__(self, endpoint: str, env: Mapping[str, str] = os.environ) -> None:
        self._endpoint = endpoint
        self._env = env
        self._queue: asyncio.Queue[ExportTraceServiceRequest] = asyncio.Queue(QUEUE)
        self._failing = False

    def put(self, request: ExportTraceServiceRequest) -> None:
        """Returns at once."""
        try:
            self._queue.put_nowait(request)
        except asyncio.QueueFull:
            self._failed("it does not keep up")

    async def run(self) -> None:
        """Sends until it is cancelled; then what still waits is lost. Raises
        :class:`ConfigError` if the certificate cannot be read."""
        headers = parse_env_headers(self._env.get("OTEL_EXPORTER_OTLP_HEADERS", ""), liberal=True)
        async with self._channel() as channel:
            stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                request = await self._queue.get()
                try:
                    await stub.Export(request, timeout=TIMEOUT_S, metadata=tuple(headers.items()))
                except grpc.aio.AioRpcError as error:
                    self._failed(error.details() or error.code().name)
                else:
                    self._failing = False

    def _channel(self) -> grpc.aio.Channel:
        url = urlsplit(self._endpoint)
        target = url.netloc or self._endpoint
        if url.scheme != "https":
            return grpc.aio.insecure_channel(target)
        certificate = self._env.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
        try:
            authority = Path(certificate).read_bytes() if certificate else None
        except OSError as error:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_CERTIFICATE: {certificate} cannot be read: {error.strerror}"
            ) from None
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authority))

    def _failed(self, why: str) -> None:
        if not self._failing:
            _log.warning("spans are not passed on", endpoint=self._endpoint, detail=why)
        self._failing = True
