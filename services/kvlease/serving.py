"""What the registry and the lease service have in common: they answer from a store, they
are ready while it answers, and they stop in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from kvlease import logs, metrics, rpc
from kvlease.mirror import Mirror
from kvlease.store.base import Store, StoreError, StoreUnavailable

log = structlog.get_logger("kvlease.serving")

CHECK_PERIOD_S = 1.0
"""How often the store is asked whether it is there: so long, at most, calls wait for a
store that has just gone, and fail while one has just come back."""

STOP_GRACE_S = 3.0
"""Running calls get so long to end. Watches are ended at once."""

MARGIN_S = 0.02
"""A call ends so long before its deadline if the store does not answer, so that this is still
told in time on a busy machine; a tenth of the deadline at most."""

Answer = TypeVar("Answer")

Ready = Callable[[str, str], None]
"""Told (name, address) of each listening socket once the service behind it can work."""


FELL_BEHIND = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "WATCH_FELL_BEHIND",
    "the watch was not read fast enough: start it again",
)
"""How a watch ends whose reader has stalled."""


def log_ready(name: str, address: str) -> None:
    """The default for ``ready``."""
    log.info("ready", server=name, address=address)


async def back_off(attempt: int) -> None:
    """Before a write is tried again. A conflict has brought what the next try needs, and
    whoever waits loses to a replica that does not: so first not at all, then for up to
    2 ms, by chance, so that two writers do not meet again."""
    if attempt > 2:
        await asyncio.sleep(random.uniform(0, 0.0005 * min(attempt - 2, 4)))


class StoreMonitor:
    """Knows whether the store answers, and tells the server's health checks."""

    def __init__(self, store: Store, server: rpc.Server, mirrors: Sequence[Mirror[Any]]) -> None:
        self._store = store
        self._server = server
        self._mirrors = mirrors
        self._problem = "the store has not been reached yet"
        self.ready = asyncio.Event()
        """Set while the store answers and the mirrors hold its state."""

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await self._check()
            # The first listing of a mirror takes a moment, not a period.
            await asyncio.sleep(CHECK_PERIOD_S if self._mirrored or self._problem else 0.01)

    def require_store(self) -> None:
        """Raises :class:`~kvlease.store.base.StoreUnavailable` if the store did not answer
        when it was asked last: a caller with a deadline learns it at once."""
        if self._problem:
            raise StoreUnavailable(self._problem)

    @property
    def _mirrored(self) -> bool:
        return all(mirror.is_synced for mirror in self._mirrors)

    async def _check(self) -> None:
        try:
            await self._store.check()
        except StoreUnavailable as error:
            if not self._problem:
                log.error("store lost", error=str(error))
            self._problem = str(error)
            self.ready.clear()
            await self._server.set_ready(False)
            return
        self._problem = ""
        if self._mirrored and not self.ready.is_set():
            await self._server.set_ready(True)
            self.ready.set()
            log.info("store reached")


async def answer(
    monitor: StoreMonitor, context: rpc.Context, work: Callable[[], Awaitable[Answer]]
) -> Answer:
    """The result of ``work``, or the call's end with a status that says why not: what
    rules refuse, and UNAVAILABLE (STORE_UNAVAILABLE) while the store does not answer,
    just before the caller's own deadline if it has one. What is logged meanwhile has the id
    of the caller's trace."""
    metadata = dict(context.invocation_metadata() or ())
    ids = logs.turn_ids("", str(metadata.get("traceparent", "")))
    if ids:
        structlog.contextvars.bind_contextvars(**ids)  # for this call: each is a task of its own
    remaining: float | None = context.time_remaining()
    limit = None if remaining is None else max(0.0, remaining - min(MARGIN_S, remaining / 10))
    try:
        monitor.require_store()
        async with asyncio.timeout(limit):
            return await work()
    except rpc.Refused as error:
        refused = error
    except TimeoutError:
        refused = unavailable("the store did not answer within the call's deadline")
    except StoreError as error:
        refused = unavailable(str(error))
    return await rpc.abort(context, refused.code, refused.reason, refused.message)


def unavailable(message: str) -> rpc.Refused:
    """The store is down; the same call may work a moment later."""
    return rpc.Refused(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", message)


async def run(
    server: rpc.Server,
    listen: str,
    stop: asyncio.Event,
    *,
    name: str,
    monitor: StoreMonitor,
    mirrors: Sequence[Mirror[Any]],
    others: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ready: Ready,
) -> None:
    """Serves until ``stop`` is set, then in order: not ready, watches end, running calls
    end, everything it started is gone.

    ``listen`` is the setting ``<name>_listen``. ``others`` run as long as the server.
    Raises :class:`~kvlease.config.ConfigError` if ``listen`` cannot be listened on.
    """
    try:
        port = await server.start(listen, f"{name}_listen")
        address = f"{listen.rpartition(':')[0]}:{port}"
        metrics.READY.labels(name).set_function(
            lambda: float(monitor.ready.is_set() and not stop.is_set())
        )
        async with asyncio.TaskGroup() as group:
            owned = [group.create_task(mirror.run()) for mirror in mirrors]
            owned += [group.create_task(other()) for other in others]
            owned.append(group.create_task(monitor.run()))
            owned.append(group.create_task(_tell(monitor, ready, name, address)))
            await stop.wait()
            for mirror in mirrors:
                mirror.end_subscriptions()
            await server.stop(STOP_GRACE_S)
            for task in owned:
                task.cancel()
    finally:
        # Also when this is cancelled, while it starts too: a grpc.aio server that runs
        # when its event loop ends complains about that with a traceback.
        await server.stop(0)


async def _tell(monitor: StoreMonitor, ready: Ready, name: str, address: str) -> None:
    await monitor.ready.wait()
    ready(name, address)
