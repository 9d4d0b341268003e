"""Any store, with Prometheus metrics of its calls; no store knows of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from prometheus_client import Counter, Histogram

from kvlease.metrics import MILLISECONDS
from kvlease.store.base import (
    Committed,
    Conflict,
    SessionLost,
    Store,
    StoreUnavailable,
    Versioned,
    WatchEvent,
    Write,
)

SECONDS = Histogram(
    "kvlease_store_request_seconds",
    "Time that calls to the store (etcd) took, by operation, also of those that failed. One "
    "may be several requests: a list has pages, a commit may be settled by reading back.",
    ["operation"],
    buckets=MILLISECONDS,
)

ERRORS = Counter(
    "kvlease_store_request_errors",
    "Calls to the store that failed. error: unavailable, or session_lost (the session that a "
    "write was bound to had ended).",
    ["operation", "error"],
)

_OPERATIONS = ("get", "list", "commit", "open_session", "keep_alive", "close_session", "check")

_SECONDS = {operation: SECONDS.labels(operation) for operation in _OPERATIONS}

# So that the first error is seen as an increase from 0.
for _operation in _OPERATIONS:
    ERRORS.labels(_operation, "unavailable")


class MeteredStore:
    """A :class:`~kvlease.store.base.Store` that answers as ``store`` does. Watches, which
    never end, are not measured."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, *keys: str) -> Mapping[str, Versioned | None]:
        with _measured("get"):
            return await self._store.get(*keys)

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Sequence[Versioned]:
        with _measured("list"):
            return await self._store.list(prefix, after=after, limit=limit)

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        with _measured("commit"):
            return await self._store.commit(expect, writes)

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._store.watch(prefix)

    async def open_session(self, ttl_s: int) -> str:
        with _measured("open_session"):
            return await self._store.open_session(ttl_s)

    async def keep_alive(self, session_id: str) -> float:
        with _measured("keep_alive"):
            return await self._store.keep_alive(session_id)

    async def close_session(self, session_id: str) -> None:
        with _measured("close_session"):
            await self._store.close_session(session_id)

    async def check(self) -> None:
        with _measured("check"):
            await self._store.check()

    async def close(self) -> None:
        await self._store.close()


@contextlib.contextmanager
def _measured(operation: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    except SessionLost:
        ERRORS.labels(operation, "session_lost").inc()
        raise
    except StoreUnavailable:
        ERRORS.labels(operation, "unavailable").inc()
        raise
    finally:
        _SECONDS[operation].observe(time.perf_counter() - started)
