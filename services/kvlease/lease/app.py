"""The lease service as a process part: built, served, stopped."""

from __future__ import annotations

import asyncio
import os

from kvlease import rpc, serving, tls
from kvlease.config import Settings
from kvlease.lease.buckets import Buckets
from kvlease.lease.departures import Departures
from kvlease.lease.history import History
from kvlease.lease.knowledge import Knowledge, mirror_of_leases
from kvlease.lease.metrics import LeasesCollector
from kvlease.lease.records import Records
from kvlease.lease.rules import Limits
from kvlease.lease.server import SERVICE, LeaseServer
from kvlease.lease.service import LeaseOperations
from kvlease.lease.sweeper import Sweeper
from kvlease.metrics import collecting
from kvlease.mirror import Mirror
from kvlease.registry import keys as registry_keys
from kvlease.registry.server import parse_engine
from kvlease.store.base import Store
from kvlease.telemetry import ENDPOINT_ENV, Telemetry
from kvlease.v1 import lease_pb2_grpc
from kvlease.v1.registry_pb2 import Engine


async def serve_lease(
    settings: Settings, stop: asyncio.Event, store: Store, ready: serving.Ready = serving.log_ready
) -> None:
    """Serves on ``lease_listen`` until ``stop`` is set; ``ready("lease", address)`` is
    called once it can work. The store is not closed.

    Raises :class:`~kvlease.config.ConfigError` if the address cannot be listened on.
    """
    # Spans that go nowhere cost as much as those that do.
    telemetry = Telemetry("kvlease-lease-service") if os.environ.get(ENDPOINT_ENV) else None
    server = rpc.Server([SERVICE], tls.of(settings))
    leases = mirror_of_leases(store)
    engines: Mirror[Engine] = Mirror(store, registry_keys.ENGINES, parse_engine)
    monitor = serving.StoreMonitor(store, server, [leases, engines])
    limits = Limits.of(settings)
    buckets = Buckets(store, settings.conversation_ttl)
    records = Records(Knowledge(store, leases, engines, buckets))
    departures = Departures(engines)
    operations = LeaseOperations(records, leases, limits, lost_at=departures.at)
    # Sessions of its own: a commit of many histories uses many places at once.
    history = History(store, leases, Buckets(store, settings.conversation_ttl))
    tracer = telemetry.tracer if telemetry else None
    servicer = LeaseServer(operations, history, leases, monitor, tracer)
    lease_pb2_grpc.add_LeaseServiceServicer_to_server(servicer, server.grpc)
    try:
        with collecting(LeasesCollector(leases)):
            await serving.run(
                server,
                settings.lease_listen,
                stop,
                name="lease",
                monitor=monitor,
                mirrors=[leases, engines],
                others=[Sweeper(operations, leases, limits).run, history.run, departures.run],
                ready=ready,
            )
    finally:
        await records.close()
        if telemetry is not None:
            await asyncio.to_thread(telemetry.shutdown)
