"""``kvlease serve``: one of the services, or all in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from typing import Any

import click

# gRPC's core writes to stderr by itself, several lines for a port that is taken. What
# matters of it comes back as an error, which we tell in one sentence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import structlog
import uvloop
from prometheus_client import REGISTRY

from kvlease import logs, metrics
from kvlease.config import ConfigError, Settings, load
from kvlease.store import Store, open_store
from kvlease.store.base import StoreUnavailable

log = structlog.get_logger("kvlease.serve")

STORE_WAIT_S = 5.0
"""At the start a store may be late by so much: all parts of a deployment start at once."""

STOP_LIMIT_S = 10.0
"""What does not end by itself within this is cut."""

_ADDRESSES = {
    "registry": ("registry",),
    "lease": ("lease",),
    "router": ("router_http", "router_grpc"),
    "all": ("registry", "lease", "router_http", "router_grpc"),
    "traces": ("traces_otlp", "traces"),
}


@click.command(
    epilog="""\b
Examples:
  kvlease serve all
  kvlease serve lease --set etcd_endpoints=127.0.0.1:2379 --set lease_listen=0.0.0.0:7402
  kvlease settings                       every setting, its default and its variable
""",
)
@click.argument("service", type=click.Choice(list(_ADDRESSES)))
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A setting; repeatable."
)
@click.option("--config", "config_file", metavar="FILE", help="Settings in a TOML file.")
def serve(service: str, assignments: tuple[str, ...], config_file: str | None) -> None:
    """Runs SERVICE until SIGTERM or Ctrl-C, which end it in order.

    With no etcd_endpoints, `all` keeps its state in memory: gone when it stops. `traces` is
    no part of it: it keeps the latest traces in memory, for `kvlease trace`.
    """
    settings = load(assignments, config_file=config_file)
    if service in ("registry", "lease") and not settings.etcd_endpoints:
        raise ConfigError(
            f"`kvlease serve {service}` shares its state with other processes through etcd: set "
            "etcd_endpoints, or run `kvlease serve all`, which needs none"
        )
    logs.configure(settings, service=service)
    try:
        uvloop.run(_run(service, settings))
    except BaseExceptionGroup as error:
        problem = _config_problem(error)
        if problem is None:
            raise
        raise ConfigError(problem) from None


def _config_problem(error: BaseException) -> str | None:
    """What is wrong with the configuration, also from inside of task groups."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_config_problem, error.exceptions)), None)
    return str(error) if isinstance(error, ConfigError) else None


async def _run(service: str, settings: Settings) -> None:
    """Serves until a signal comes; then not for longer than :data:`STOP_LIMIT_S`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    work = asyncio.create_task(_serve(service, settings, stop))
    signalled = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            log.info("stopping")
            await asyncio.wait({work}, timeout=STOP_LIMIT_S)
        if work.done():
            await work
        else:
            log.warning("stopped before everything had ended", limit_s=STOP_LIMIT_S)
    finally:
        signalled.cancel()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work


async def _serve(service: str, settings: Settings, stop: asyncio.Event) -> None:
    with metrics.serving(settings.metrics_listen) as port:
        if port:
            log.info("metrics", port=port)
        told = _Told(_ADDRESSES[service])
        if service == "router":
            await _serve_router(settings, stop, told)
            return
        if service == "traces":
            await _serve_traces(settings, stop, told)
            return
        store = open_store(settings)
        try:
            await _wait_for(store, stop)
            if not stop.is_set():
                await _serve_on(service, settings, stop, store, told)
        finally:
            await store.close()


async def _serve_on(
    service: str, settings: Settings, stop: asyncio.Event, store: Store, told: _Told
) -> None:
    from kvlease.lease.app import serve_lease
    from kvlease.registry.app import serve_registry

    if service == "registry":
        await serve_registry(settings, stop, store, told)
    elif service == "lease":
        await serve_lease(settings, stop, store, told)
    else:
        # The router ends first: turns that still run need the other two.
        rest = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(serve_registry(settings, rest, store, told))
            group.create_task(serve_lease(settings, rest, store, told))
            await _first(stop, told.all_of("registry", "lease"))
            if not stop.is_set():
                await _serve_router(_with_endpoints(settings, told), stop, told)
            rest.set()


async def _serve_router(settings: Settings, stop: asyncio.Event, told: _Told) -> None:
    from kvlease.router.app import serve_router

    await serve_router(settings, stop, told, REGISTRY)


async def _serve_traces(settings: Settings, stop: asyncio.Event, told: _Told) -> None:
    from kvlease.traces.app import serve_traces

    await serve_traces(settings, stop, told)


class _Told:
    """Collects the addresses that the parts listen on; logs them in one line once all
    are there. Callable as :data:`kvlease.serving.Ready`."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.addresses: dict[str, str] = {}
        self._names = names
        self._changed = asyncio.Event()

    def __call__(self, name: str, address: str) -> None:
        self.addresses[name] = address
        self._changed.set()
        if set(self._names) <= set(self.addresses):
            log.info("ready", **{name: self.addresses[name] for name in self._names})

    async def all_of(self, *names: str) -> None:
        """Waits until these have been told."""
        while not set(names) <= set(self.addresses):
            self._changed.clear()
            await self._changed.wait()


def _with_endpoints(settings: Settings, told: _Told) -> Settings:
    """In one process the router finds the other two where they listen, whatever the
    settings of their clients are."""

    def local(name: str) -> str:
        host, _, port = told.addresses[name].rpartition(":")
        return f"{'127.0.0.1' if host in ('', '0.0.0.0', '[::]') else host}:{port}"

    return settings.model_copy(
        update={"registry_endpoint": local("registry"), "lease_endpoint": local("lease")}
    )


async def _wait_for(store: Store, stop: asyncio.Event) -> None:
    """Raises :class:`ConfigError` if the store does not answer in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STORE_WAIT_S
    while not stop.is_set():
        try:
            await store.check()
            return
        except StoreUnavailable as error:
            left = deadline - loop.time()
            if left <= 0:
                raise ConfigError(str(error)) from None
            log.warning("waiting for the store", error=str(error), left_s=round(left, 1))
        await _first(stop, asyncio.sleep(min(1.0, max(left, 0.1))))


async def _first(stop: asyncio.Event, other: Coroutine[Any, Any, None]) -> None:
    """Until ``other`` is done or ``stop`` is set."""
    tasks = {asyncio.create_task(other), asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
