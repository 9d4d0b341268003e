"""The services' state: :class:`Store`, and the one place that chooses which it is."""

from __future__ import annotations

from kvlease.config import Settings
from kvlease.store.base import Store
from kvlease.store.memory import MemoryStore
from kvlease.store.metered import MeteredStore

__all__ = ["Store", "open_store"]


def open_store(settings: Settings) -> Store:
    """The store that the settings name: etcd where there are endpoints, else the
    embedded one, whose state is this process's alone.

    Connects to nothing yet: :meth:`Store.check` tells whether it answers. Call it
    where an event loop runs. Raises :class:`~kvlease.config.ConfigError` if endpoints
    or TLS files cannot be used.
    """
    if not settings.etcd_endpoints:
        return MeteredStore(MemoryStore())
    # gRPC and etcd's stubs take a tenth of a second to load.
    from kvlease.store.etcd import EtcdStore

    return MeteredStore(EtcdStore(settings))
