"""The store on an etcd that is killed, paused, compacted, emptied or out of reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from contract_helpers import Watcher, answers, eventually, put, value_of
from etcd_server import Etcd, EtcdCluster, free_ports
from tcp_proxy import TcpProxy

from kvlease.store import Store
from kvlease.store.base import (
    Changed,
    Put,
    Removed,
    SessionLost,
    StoreUnavailable,
    Synced,
    Versioned,
)

OpenStore = Callable[..., Store]
StartWatch = Callable[..., Watcher]
StartProxy = Callable[[int], Awaitable[TcpProxy]]

ROOT = "/kvlease/v1"


class TestKeys:
    async def test_keys_have_the_prefix_in_etcd_only(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint)
        await put(store, "/a", b"1")
        assert etcd.get(f"{ROOT}/a") == b"1"
        assert [item.key for item in await store.list("/")] == ["/a"]

    async def test_clusters_with_prefixes_that_start_alike_do_not_meet(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        one = open_etcd_store(etcd.endpoint, etcd_prefix="/c/1")
        other = open_etcd_store(etcd.endpoint, etcd_prefix="/c/10/")
        watcher = watch(one)
        await put(other, "/a", b"x")
        await put(one, "/b", b"x")
        assert [item.key for item in await one.list("/")] == ["/b"]
        assert [item.key for item in await other.list("/")] == ["/a"]
        await watcher.until(lambda events: len(events) >= 2)
        assert [e.item.key for e in watcher.events if isinstance(e, Changed)] == ["/b"]

    async def test_a_session_is_an_etcd_lease_of_that_id(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        session = await open_etcd_store(etcd.endpoint).open_session(60)
        answer = etcd.call("/v3/lease/timetolive", {"ID": str(int(session, 16))})
        assert answer["grantedTTL"] == "60"

    async def test_two_stores_share_one_state(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        one, other = open_etcd_store(etcd.endpoint), open_etcd_store(etcd.endpoint)
        watcher = watch(other)
        session = await one.open_session(60)
        await one.commit({}, [Put("/a", b"1", session)])
        await watcher.until(lambda events: len(events) >= 2)
        assert await other.keep_alive(session) == 60
        await other.close_session(session)
        with pytest.raises(SessionLost):
            await one.keep_alive(session)


class TestOutages:
    async def test_an_etcd_that_is_not_there_is_told_at_once_and_in_words(
        self, open_etcd_store: OpenStore
    ) -> None:
        (port,) = free_ports(1)
        store = open_etcd_store(f"127.0.0.1:{port}")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match=rf"no etcd listens at 127.0.0.1:{port}.*start"):
            await store.check()
        assert time.monotonic() - started < 1

    async def test_a_paused_etcd_is_told_within_the_deadline_by_every_call(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint, etcd_timeout=0.5)
        session = await store.open_session(60)
        await store.keep_alive(session)
        etcd.pause()
        for call in (
            store.get("/a"),
            store.list("/"),
            store.commit({}, [Put("/a", b"1")]),
            store.open_session(60),
            store.keep_alive(session),
            store.close_session(session),
            store.check(),
        ):
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0.5 s"):
                await call
            assert time.monotonic() - started < 1
        # When it goes on, so does the store.
        etcd.resume()
        await eventually(lambda: answers(store))
        assert await value_of(store, "/a") in (None, b"1")  # it was told: may have happened

    async def test_calls_at_the_same_time_wait_no_longer_than_one(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint, etcd_timeout=0.5)
        sessions = [await store.open_session(60) for _ in range(10)]
        etcd.pause()
        started = time.monotonic()
        results = await asyncio.gather(
            *(store.keep_alive(session) for session in sessions),
            *(store.get("/a") for _ in range(50)),
            return_exceptions=True,
        )
        assert time.monotonic() - started < 1
        assert all(isinstance(result, StoreUnavailable) for result in results)

    async def test_everything_goes_on_after_etcd_was_killed_and_started_again(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint)
        session = await store.open_session(60)
        await store.commit({}, [Put("/a", b"1", session)])
        await store.keep_alive(session)
        etcd.kill()
        with pytest.raises(StoreUnavailable, match="start it"):
            await store.keep_alive(session)
        await asyncio.to_thread(etcd.start)
        await eventually(lambda: answers(store))
        # Then the session and its key are still there.
        assert await store.keep_alive(session) == 60
        assert await value_of(store, "/a") == b"1"

    async def test_closing_does_not_wait_for_an_etcd_that_hangs(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(etcd.endpoint, etcd_timeout=5)
        watcher = watch(store)
        await watcher.synced()
        etcd.pause()
        calls = [asyncio.ensure_future(store.get("/a")) for _ in range(3)]
        calls.append(asyncio.ensure_future(store.keep_alive("00000000000000ff")))  # type: ignore[arg-type]
        late = watch(store)
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await store.close()
        results = await asyncio.gather(*calls, watcher.task, late.task, return_exceptions=True)
        assert time.monotonic() - started < 0.5
        assert [str(r) for r in results[:4]] == ["the store is closed"] * 4
        assert results[4:] == [None, None]

    async def test_a_call_on_a_hanging_etcd_is_cancelled_at_once(
        self, etcd: Etcd, open_etcd_store: OpenStore
    ) -> None:
        store = open_etcd_store(etcd.endpoint, etcd_timeout=5)
        session = await store.open_session(60)
        etcd.pause()
        for call in (
            store.get("/a"),
            store.keep_alive(session),
            store.commit({}, [Put("/a", b"")]),
        ):
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0.1)
            started = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - started < 0.5


class TestWatches:
    async def test_a_watch_resumes_after_a_restart_without_a_gap(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(etcd.endpoint)
        first = await put(store, "/a", b"1")
        watcher = watch(store)
        await watcher.synced()
        await asyncio.to_thread(etcd.restart)
        etcd.delete(f"{ROOT}/a")
        etcd.put(f"{ROOT}/b", b"1")
        await watcher.until(lambda events: len(events) >= 4)
        assert watcher.events == [
            Changed(Versioned("/a", b"1", first)),
            Synced(),
            Removed("/a", Versioned("/a", b"1", first)),
            Changed(Versioned("/b", b"1", first + 2)),
        ]

    async def test_a_watch_that_was_cut_off_reports_every_change_in_between(
        self, etcd: Etcd, open_etcd_store: OpenStore, start_proxy: StartProxy, watch: StartWatch
    ) -> None:
        proxy = await start_proxy(etcd.port)
        watcher = watch(open_etcd_store(proxy.endpoint))
        await watcher.synced()
        await proxy.stop()
        for value in (b"1", b"2", b"3"):
            etcd.put(f"{ROOT}/a", value)
        etcd.delete(f"{ROOT}/a")
        await proxy.start()
        await watcher.until(lambda events: isinstance(events[-1], Removed))
        values = [e.item.value for e in watcher.events if isinstance(e, Changed)]
        assert values == [b"1", b"2", b"3"]
        assert watcher.events.count(Synced()) == 1

    async def test_after_a_compaction_it_tells_what_vanished_what_changed_and_that_it_is_synced(
        self, etcd: Etcd, open_etcd_store: OpenStore, start_proxy: StartProxy, watch: StartWatch
    ) -> None:
        # Given three keys, and a watch that is cut off while one goes, one changes, one
        # comes, one comes and goes, and etcd forgets how.
        proxy = await start_proxy(etcd.port)
        store = open_etcd_store(proxy.endpoint)
        gone, kept = await put(store, "/gone", b"1"), await put(store, "/kept", b"1")
        await put(store, "/changed", b"1")
        watcher = watch(store)
        await watcher.synced()
        seen = len(watcher.events)
        await proxy.stop()
        etcd.delete(f"{ROOT}/gone")
        etcd.put(f"{ROOT}/changed", b"2")
        etcd.put(f"{ROOT}/new", b"1")
        etcd.put(f"{ROOT}/brief", b"1")
        etcd.delete(f"{ROOT}/brief")
        etcd.compact()
        await proxy.start()
        await watcher.synced(times=2)
        assert watcher.events[seen:] == [
            Removed("/gone", Versioned("/gone", b"1", gone), after_gap=True),
            Changed(Versioned("/changed", b"2", kept + 3)),
            Changed(Versioned("/new", b"1", kept + 4)),
            Synced(),
        ]
        # Then it follows changes again, and their removals are not after a gap.
        etcd.delete(f"{ROOT}/kept")
        await watcher.until(lambda events: isinstance(events[-1], Removed))
        assert watcher.events[-1] == Removed("/kept", Versioned("/kept", b"1", kept))

    async def test_an_etcd_that_comes_back_empty_is_a_gap(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        store = open_etcd_store(etcd.endpoint)
        for i in range(5):
            await put(store, "/a", b"%d" % i)
        watcher = watch(store)
        await watcher.synced()
        etcd.kill()
        etcd.wipe()
        await asyncio.to_thread(etcd.start)
        await watcher.synced(times=2)
        await eventually(lambda: answers(store))
        revision = await put(store, "/b", b"1")
        await watcher.until(lambda events: isinstance(events[-1], Changed))
        assert watcher.events[2:] == [
            Removed("/a", Versioned("/a", b"4", 6), after_gap=True),
            Synced(),
            Changed(Versioned("/b", b"1", revision)),
        ]

    async def test_a_watch_that_starts_before_etcd_does_begins_when_it_comes(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        etcd.kill()
        watcher = watch(open_etcd_store(etcd.endpoint))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(etcd.start)
        await watcher.synced()
        assert watcher.events == [Synced()]

    async def test_a_quiet_watch_stays_on_its_stream(
        self, etcd: Etcd, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        # Given a watch that hears nothing for several request deadlines,
        watcher = watch(open_etcd_store(etcd.endpoint, etcd_timeout=0.4))
        await watcher.synced()

        async def followed() -> bool:
            return etcd.requests("Watch") > 0

        await eventually(followed)
        await asyncio.sleep(2)
        # then it has asked whether etcd is there, on the same stream.
        assert etcd.requests("Watch") == 1

    async def test_a_watch_leaves_a_member_that_hangs(
        self, etcd_cluster: EtcdCluster, open_etcd_store: OpenStore, watch: StartWatch
    ) -> None:
        # Given a watch on each member, of which one then hangs.
        store = open_etcd_store(etcd_cluster.endpoints, etcd_timeout=0.5)
        watchers = [watch(store) for _ in etcd_cluster.members]
        for watcher in watchers:
            await watcher.synced()
        leader = etcd_cluster.leader()
        follower = next(member for member in etcd_cluster.members if member is not leader)
        follower.pause()
        leader.put(f"{ROOT}/a", b"1")
        # Then all of them report what happens.
        for watcher in watchers:
            await watcher.until(lambda e: isinstance(e[-1], Changed))
        follower.resume()
