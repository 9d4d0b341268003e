"""Both stores, behind one fixture: a test that takes ``store`` runs against each."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import uvloop
from contract_helpers import Watcher
from etcd_server import Etcd
from tcp_proxy import TcpProxy

from kvlease.config import Settings
from kvlease.store import Store, open_store

OpenStore = Callable[..., Store]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that services run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def open_etcd_store() -> AsyncIterator[OpenStore]:
    """Opens stores on an etcd, and closes them."""
    stores: list[Store] = []

    def open_one(endpoints: str, **settings: Any) -> Store:
        stores.append(open_store(Settings(etcd_endpoints=endpoints, **settings)))
        return stores[-1]

    yield open_one
    for store in stores:
        await store.close()


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    if request.param == "memory":
        opened = open_store(Settings())
    else:
        server: Etcd = request.getfixturevalue("shared_etcd")
        opened = open_store(
            Settings(etcd_endpoints=server.endpoint, etcd_prefix=f"/test/{uuid.uuid4().hex}")
        )
    yield opened
    await opened.close()


@pytest.fixture
async def watch() -> AsyncIterator[Callable[[Store, str], Watcher]]:
    """Starts watches, and ends them."""
    watchers: list[Watcher] = []

    def start(store: Store, prefix: str = "/") -> Watcher:
        watchers.append(Watcher(store, prefix))
        return watchers[-1]

    yield start
    for watcher in watchers:
        await watcher.stop()


@pytest.fixture
async def start_proxy() -> AsyncIterator[Callable[[int], Awaitable[TcpProxy]]]:
    """Starts proxies to ports, and stops them."""
    proxies: list[TcpProxy] = []

    async def start(target_port: int) -> TcpProxy:
        proxy = TcpProxy(target_port)
        await proxy.start()
        proxies.append(proxy)
        return proxy

    yield start
    for proxy in proxies:
        await proxy.stop()
