"""The store on several etcd members, of which some are dead, hang or are killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from contract_helpers import Watcher, answers, eventually, put, read, value_of
from etcd_server import Etcd, EtcdCluster, free_ports
from tcp_proxy import TcpProxy

from kvlease.store import Store
from kvlease.store.base import (
    Changed,
    Committed,
    Put,
    StoreUnavailable,
    Synced,
    Versioned,
)

OpenStore = Callable[..., Store]
StartWatch = Callable[..., Watcher]
StartProxy = Callable[[int], Awaitable[TcpProxy]]

ROOT = "/kvlease/v1"


class TestMembers:
    async def test_a_dead_endpoint_among_several_is_passed_over(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        (dead,) = free_ports(1)
        store = open_etcd_store(f"127.0.0.1:{dead},{etcd.endpoint}")
        watcher = watch(store)
        session = await store.open_session(60)
        for i in range(20):
            assert isinstance(
                await store.commit({f"/{i}": 0}, [Put(f"/{i}", b"x", session)]), Committed
            )
            assert await value_of(store, f"/{i}") == b"x"
            assert await store.keep_alive(session) == 60
        await watcher.until(lambda events: len(events) >= 21)

    async def test_a_hanging_endpoint_among_several_is_passed_over(
        self, etcd: Etcd, start_etcd: Callable[..., Etcd], open_etcd_store: OpenStore
    ) -> None:
        hanging = start_etcd()
        hanging.pause()
        store = open_etcd_store(f"{hanging.endpoint},{etcd.endpoint}", etcd_timeout=1)
        started = time.monotonic()
        for i in range(20):
            assert isinstance(await store.commit({f"/{i}": 0}, [Put(f"/{i}", b"x")]), Committed)
        # Then only the first requests had to wait for it.
        assert time.monotonic() - started < 3

    async def test_endpoints_may_be_host_names(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(f"no-such-host.invalid:2379,localhost:{etcd.port}")
        await put(store, "/a", b"1")
        assert await value_of(store, "/a") == b"1"

    async def test_an_endpoint_may_be_written_as_a_url(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        await open_etcd_store(f" http://{etcd.endpoint}/ ").check()

    async def test_a_host_name_that_nobody_knows_is_told_in_words(
        self, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store("no-such-host.invalid:2379")
        with pytest.raises(StoreUnavailable, match=r"no-such-host.invalid:2379.*etcd_endpoints"):
            await store.check()

    async def test_what_is_not_etcd_is_told_in_words(self, open_etcd_store: OpenStore) -> None:
        async def no_http2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(no_http2, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreUnavailable, match="is not etcd"):
            await open_etcd_store(f"127.0.0.1:{port}").check()
        server.close()

    async def test_a_cluster_that_loses_its_leader_loses_nothing_else(
        self, etcd_cluster: EtcdCluster, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        # Given a counter, a session and a watch on three members.
        store = open_etcd_store(etcd_cluster.endpoints)
        session = await store.open_session(60)
        await store.keep_alive(session)
        watcher = watch(store)
        await watcher.synced()
        told: list[bytes] = []
        unknown: list[bytes] = []

        async def increment(name: int, times: int) -> None:
            for i in range(times):
                value = b"%d/%d" % (name, i)
                try:
                    if isinstance(await store.commit({}, [Put("/n", value)]), Committed):
                        told.append(value)
                except StoreUnavailable:
                    unknown.append(value)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            for name in range(4):
                tasks.create_task(increment(name, 40))
            # When the leader is killed in the middle.
            await asyncio.sleep(0.1)
            leader = await asyncio.to_thread(etcd_cluster.leader)
            leader.kill()
        # Then an election later all goes on, and the watch has missed nothing.
        await eventually(lambda: answers(store), within_s=5)
        assert await store.keep_alive(session) == 60
        last = await put(store, "/end", b"1")
        await watcher.until(lambda e: e[-1] == Changed(Versioned("/end", b"1", last)))
        seen = {e.item.value for e in watcher.events if isinstance(e, Changed)} - {b"1"}
        assert set(told) <= seen <= set(told) | set(unknown)
        assert len(told) >= 100
        assert watcher.events.count(Synced()) == 1

    async def test_a_cluster_without_a_majority_is_unavailable_not_hanging(
        self, etcd_cluster: EtcdCluster, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd_cluster.endpoints, etcd_timeout=0.7)
        await put(store, "/a", b"1")
        for member in etcd_cluster.members[1:]:
            member.kill()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await read(store, "/a")
        with pytest.raises(StoreUnavailable):
            await put(store, "/a", b"2")
        assert time.monotonic() - started < 2
        for member in etcd_cluster.members[1:]:
            await asyncio.to_thread(member.start, wait=False)
        await eventually(lambda: answers(store), within_s=10)
