"""The registry as a process part: built, served, stopped."""

from __future__ import annotations

import asyncio

from kvlease import rpc, serving, tls
from kvlease.config import Settings
from kvlease.metrics import collecting
from kvlease.mirror import Mirror
from kvlease.registry import keys
from kvlease.registry.metrics import EnginesCollector
from kvlease.registry.server import SERVICE, RegistryServer, follow_engines, parse_engine
from kvlease.store.base import Store
from kvlease.v1 import registry_pb2_grpc
from kvlease.v1.registry_pb2 import Engine


async def serve_registry(
    settings: Settings, stop: asyncio.Event, store: Store, ready: serving.Ready = serving.log_ready
) -> None:
    """Serves on ``registry_listen`` until ``stop`` is set; ``ready("registry", address)``
    is called once it can work. The store is not closed.

    Raises :class:`~kvlease.config.ConfigError` if the address cannot be listened on.
    """
    server = rpc.Server([SERVICE], tls.of(settings))
    engines: Mirror[Engine] = Mirror(store, keys.ENGINES, parse_engine)
    monitor = serving.StoreMonitor(store, server, [engines])
    servicer = RegistryServer(settings, store, engines, monitor)
    registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server.grpc)
    collector = EnginesCollector(engines)
    with collecting(collector):
        await serving.run(
            server,
            settings.registry_listen,
            stop,
            name="registry",
            monitor=monitor,
            mirrors=[engines],
            others=[lambda: follow_engines(engines, collector)],
            ready=ready,
        )
