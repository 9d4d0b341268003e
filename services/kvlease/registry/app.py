"""The registry as a process part: built, served, stopped."""

from __future__ import annotations

import asyncio
import functools

from kvlease import metrics, rpc, serving, tls
from kvlease.config import Settings
from kvlease.mirror import Mirror
from kvlease.registry import keys, rules
from kvlease.registry.server import SERVICE, RegistryServer, count_lost_sessions, parse_engine
from kvlease.store.base import Store
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.v1.registry_pb2 import Engine, EngineRole


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
    _expose(engines)
    await serving.run(
        server,
        settings.registry_listen,
        stop,
        name="registry",
        monitor=monitor,
        mirrors=[engines],
        others=[functools.partial(count_lost_sessions, engines)],
        ready=ready,
    )


def _expose(engines: Mirror[Engine]) -> None:
    """Lets Prometheus count the engines whenever it scrapes."""

    for role in (registry_pb2.ENGINE_ROLE_PREFILL, registry_pb2.ENGINE_ROLE_DECODE):
        for state, draining in (("serving", False), ("draining", True)):
            metrics.ENGINES.labels(keys.ROLE_WORDS[role], state).set_function(
                functools.partial(_count, engines, role, draining)
            )


def _count(engines: Mirror[Engine], role: EngineRole.ValueType, draining: bool) -> int:
    return sum(
        entry.record.role == role and rules.is_draining(entry.record) == draining
        for entry in engines.entries()
    )
