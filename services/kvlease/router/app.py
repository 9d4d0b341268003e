"""The router as a process part: HTTP for turns, gRPC for questions about them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvlease import listening, rpc, telemetry, tls
from kvlease.config import Settings
from kvlease.metrics import READY
from kvlease.router import protocol, upstream
from kvlease.router.announce import announce
from kvlease.router.engines import Engines
from kvlease.router.grpc_server import SERVICE_NAME, RouterService
from kvlease.router.history import TurnLog
from kvlease.router.http import Http
from kvlease.router.keys import read_keys
from kvlease.router.leases import Leases
from kvlease.router.metrics import Metrics
from kvlease.router.readiness import Readiness
from kvlease.router.turn import Tools
from kvlease.router.turns import Turns
from kvlease.router.ui import Ui, off_because
from kvlease.serving import Ready, log_ready
from kvlease.times import timestamp
from kvlease.tls import Tls
from kvlease.v1 import registry_pb2, router_pb2_grpc

STOP_GRACE_S = 6.0
"""Running turns get so long to end when the router stops; then they are cut."""

HEALTH_PERIOD_S = 2.0
"""How often a router looks whether a turn would be served, for gRPC health."""

_WILDCARDS = ("", "0.0.0.0", "[::]", "::")


async def serve_router(
    settings: Settings,
    stop: asyncio.Event,
    ready: Ready = log_ready,
    registry: CollectorRegistry | None = None,
) -> None:
    """Serves HTTP on ``router_listen`` and gRPC on ``router_grpc_listen`` until ``stop``
    is set. ``ready`` is called with ("router_http", address) and ("router_grpc", address)
    once both listen: that does not need the registry (see ``/ready``). ``/metrics`` shows
    ``registry``; without one, this router's metrics only.

    Fastest on uvloop's event loop. Raises :class:`ConfigError`.
    """
    keys = read_keys(settings.api_keys_file)
    async with (
        _parts(settings, keys, Metrics(registry)) as parts,
        contextlib.AsyncExitStack() as stack,
    ):
        http_address = await stack.enter_async_context(
            _http(parts.http.app(settings.max_body_bytes), settings)
        )
        grpc_port = await parts.server.start(settings.router_grpc_listen, "router_grpc_listen")
        stack.push_async_callback(parts.server.stop, 1.0)
        replica = registry_pb2.Replica(
            replica_id=str(uuid.uuid4()),
            http_address=_reachable(http_address),
            grpc_address=_reachable(_with_port(settings.router_grpc_listen, grpc_port)),
            start_time=timestamp(time.time()),
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(parts.engines.watch()),
                group.create_task(parts.history.run()),
                group.create_task(_report_health(parts)),
                group.create_task(tls.watch(parts.registry, settings.registry_endpoint, parts.tls)),
                group.create_task(tls.watch(parts.lease, settings.lease_endpoint, parts.tls)),
                group.create_task(announce(parts.registry, replica, settings.session_ttl)),
            ]
            ready("router_http", http_address)
            ready("router_grpc", _with_port(settings.router_grpc_listen, grpc_port))
            await stop.wait()
            parts.http.stopping = True
            READY.labels("router").set(0)
            for task in tasks:
                task.cancel()


@dataclass(slots=True)
class _Parts:
    http: Http
    server: rpc.Server
    engines: Engines
    readiness: Readiness
    history: TurnLog
    registry: grpc.aio.Channel
    lease: grpc.aio.Channel
    tls: Tls | None
    changed: asyncio.Event


@contextlib.asynccontextmanager
async def _parts(
    settings: Settings, keys: dict[str, str] | None, metrics: Metrics
) -> AsyncIterator[_Parts]:
    """Everything, connected, and closed in the opposite order."""
    async with contextlib.AsyncExitStack() as stack:
        tracing = telemetry.Telemetry("kvlease-router")
        # In a thread: it waits for the collector.
        stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
        secured = tls.of(settings)
        registry = await stack.enter_async_context(
            rpc.aio_channel(settings.registry_endpoint, secured)
        )
        lease = await stack.enter_async_context(rpc.aio_channel(settings.lease_endpoint, secured))
        changed = asyncio.Event()
        engines = Engines(
            registry,
            time.monotonic,
            session_ttl_s=settings.session_ttl,
            on_change=changed.set,
        )
        leases = Leases(
            lease,
            time.monotonic,
            start_turn_timeout_s=settings.start_turn_timeout,
            endpoint=settings.lease_endpoint,
        )
        session = await stack.enter_async_context(
            upstream.open_session(settings.connect_engine_timeout)
        )
        metrics.show(engines)
        to_engines = upstream.Upstream(session, engines, settings.connect_engine_timeout)
        readiness = Readiness(engines, to_engines)
        tools = Tools(
            engines=engines,
            upstream=to_engines,
            metrics=metrics,
            prefill_timeout_s=settings.prefill_timeout,
        )
        history = TurnLog(leases.record, metrics.turn_records_dropped.inc)
        stack.push_async_callback(history.close)
        turns = Turns(tools, leases, history, tracing.tracer, keys, settings.max_body_bytes)
        stack.push_async_callback(turns.close)
        server = rpc.Server([SERVICE_NAME], secured)
        router_pb2_grpc.add_RouterServicer_to_server(
            RouterService(engines, leases, registry), server.grpc
        )
        ui = Ui(
            engines,
            readiness,
            leases,
            jaeger_url=settings.jaeger_url,
            off_because=off_because(settings.ui, keys is not None),
        )
        http = Http(turns, engines, readiness, leases, metrics, tracing, keys, ui)
        yield _Parts(http, server, engines, readiness, history, registry, lease, secured, changed)


@contextlib.asynccontextmanager
async def _http(app: web.Application, settings: Settings) -> AsyncIterator[str]:
    """Listens; the address with the real port. At the end running turns get their grace.

    Raises :class:`ConfigError`.
    """
    listen = settings.router_listen
    host, _, port = listen.rpartition(":")
    ssl_context = tls.http_context(settings)
    runner = web.AppRunner(
        app,
        access_log=None,  # a line a turn is the trace's business
        handler_cancellation=True,  # a client that goes away ends its turn
        shutdown_timeout=STOP_GRACE_S,
    )
    await runner.setup()
    protocol.replace(runner)
    try:
        site = web.TCPSite(
            runner,
            host.strip("[]") or None,
            int(port),
            reuse_address=True,
            ssl_context=ssl_context,
        )
        try:
            await site.start()
        except OSError as error:
            raise listening.refused("router_listen", listen, error) from None
        yield _with_port(listen, runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def _report_health(parts: _Parts) -> None:
    """Keeps gRPC health as /ready is, until cancelled. The registry tells of changes; that
    an engine accepts no connections any more is found by asking."""
    was_ready = False
    while True:
        parts.changed.clear()
        is_ready = not await parts.readiness.unready_reason()
        if is_ready != was_ready:
            was_ready = is_ready
            READY.labels("router").set(is_ready)
            await parts.server.set_ready(is_ready)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_PERIOD_S):
                await parts.changed.wait()


def _with_port(listen: str, port: int) -> str:
    return f"{listen.rpartition(':')[0]}:{port}"


def _reachable(address: str) -> str:
    """Under which others reach what listens on ``address``."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname() if host in _WILDCARDS else host}:{port}"
