"""What every store promises of sessions and watches, on both of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import cast

import pytest
from contract_helpers import TTL_S, Watcher, eventually, put, read

from kvlease.store import Store
from kvlease.store.base import (
    Changed,
    Committed,
    Conflict,
    Delete,
    Put,
    Removed,
    SessionLost,
    Synced,
    Versioned,
    WatchEvent,
)

StartWatch = Callable[..., Watcher]


class TestSessions:
    async def test_a_key_tells_which_session_it_lives_with(self, store: Store) -> None:
        session = await store.open_session(TTL_S)
        await put(store, "/a", b"1", session)
        (item,) = await store.list("/")
        assert item.session_id == session

    async def test_a_session_id_is_the_one_that_etcdctl_prints(self, store: Store) -> None:
        session = await store.open_session(TTL_S)
        assert session == f"{int(session, 16):016x}"

    async def test_keys_disappear_when_their_session_expires(self, store: Store) -> None:
        session = await store.open_session(TTL_S)
        await store.commit({}, [Put("/a", b"1", session), Put("/b", b"1")])
        opened = time.monotonic()

        async def gone() -> bool:
            return await read(store, "/a") is None

        await eventually(gone)
        # Then not before its time, and only its own keys.
        assert time.monotonic() - opened > TTL_S - 0.1
        assert await read(store, "/b") is not None

    async def test_a_session_that_is_kept_alive_outlives_its_ttl(self, store: Store) -> None:
        session = await store.open_session(TTL_S)
        await put(store, "/a", b"1", session)
        end = time.monotonic() + 3 * TTL_S
        while time.monotonic() < end:
            assert await store.keep_alive(session) == TTL_S
            await asyncio.sleep(TTL_S / 4)
        assert await read(store, "/a") is not None

    async def test_an_expired_session_is_lost(self, store: Store) -> None:
        session = await store.open_session(TTL_S)
        await put(store, "/a", b"1", session)

        async def gone() -> bool:
            return await read(store, "/a") is None

        await eventually(gone)
        with pytest.raises(SessionLost, match=session):
            await store.keep_alive(session)

    async def test_a_session_that_never_existed_is_lost(self, store: Store) -> None:
        for session in ("00000000000000ff", "", "no-session", "-1", "f" * 40):
            with pytest.raises(SessionLost):
                await store.keep_alive(session)
            with pytest.raises(SessionLost):
                await store.commit({}, [Put("/a", b"1", session)])

    async def test_keys_are_gone_when_closing_their_session_returns(self, store: Store) -> None:
        session = await store.open_session(60)
        await store.commit({}, [Put("/a", b"1", session), Put("/b", b"1", session)])
        await store.close_session(session)
        assert list(await store.list("/")) == []

    async def test_closing_a_session_twice_is_no_error(self, store: Store) -> None:
        session = await store.open_session(60)
        await store.close_session(session)
        await store.close_session(session)
        await store.close_session("00000000000000ff")
        await store.close_session("no-session")

    async def test_a_commit_with_a_closed_session_writes_nothing(self, store: Store) -> None:
        session = await store.open_session(60)
        await store.close_session(session)
        with pytest.raises(SessionLost, match=session):
            await store.commit({}, [Put("/a", b"1"), Put("/b", b"1", session)])
        assert list(await store.list("/")) == []

    async def test_a_conflict_is_told_before_a_lost_session(self, store: Store) -> None:
        session = await store.open_session(60)
        await store.close_session(session)
        assert isinstance(await store.commit({"/a": 7}, [Put("/a", b"1", session)]), Conflict)

    async def test_a_key_written_anew_without_a_session_outlives_its_first_one(
        self, store: Store
    ) -> None:
        session = await store.open_session(60)
        await put(store, "/a", b"1", session)
        await put(store, "/a", b"2")
        await store.close_session(session)
        item = await read(store, "/a")
        assert item is not None
        assert item.session_id is None

    async def test_a_key_moves_from_one_session_to_another(self, store: Store) -> None:
        first, second = await store.open_session(60), await store.open_session(60)
        await put(store, "/a", b"1", first)
        await put(store, "/a", b"2", second)
        await store.close_session(first)
        assert await read(store, "/a") is not None
        await store.close_session(second)
        assert await read(store, "/a") is None

    async def test_many_sessions_are_kept_alive_at_once(self, store: Store) -> None:
        sessions = [await store.open_session(60) for _ in range(50)]
        lost = sessions[7]
        await store.close_session(lost)
        results = await asyncio.gather(
            *(store.keep_alive(session) for session in sessions * 2), return_exceptions=True
        )
        for session, result in zip(sessions * 2, results, strict=True):
            if session == lost:
                assert isinstance(result, SessionLost)
            else:
                assert result == 60

    async def test_a_keep_alive_that_is_cancelled_disturbs_no_other(self, store: Store) -> None:
        sessions = [await store.open_session(60) for _ in range(20)]
        for _ in range(10):
            calls = [asyncio.ensure_future(store.keep_alive(session)) for session in sessions * 2]
            await asyncio.sleep(0)
            for call in calls[::3]:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(r == 60 for i, r in enumerate(results) if i % 3)


class TestWatches:
    async def test_what_exists_is_reported_first_then_synced(
        self, store: Store, watch: StartWatch
    ) -> None:
        for key in ("/a/1", "/a/2", "/b/1"):
            await put(store, key, b"x")
        watcher = watch(store, "/a/")
        await watcher.synced()
        keys = [event.item.key for event in watcher.events if isinstance(event, Changed)]
        assert keys == ["/a/1", "/a/2"]
        assert watcher.events[-1] == Synced()

    async def test_a_watch_of_nothing_is_synced_at_once(
        self, store: Store, watch: StartWatch
    ) -> None:
        watcher = watch(store)
        await watcher.synced()
        assert watcher.events == [Synced()]

    async def test_changes_are_reported_in_the_order_of_their_revisions(
        self, store: Store, watch: StartWatch
    ) -> None:
        watcher = watch(store, "/a/")
        await watcher.synced()
        expected: list[WatchEvent] = [Synced()]
        for i in range(30):
            key, value = f"/a/{i % 3}", b"%d" % i
            await put(store, f"/b/{i}", b"another prefix")
            expected.append(Changed(Versioned(key, value, await put(store, key, value))))
        await watcher.until(lambda events: len(events) >= len(expected))
        assert watcher.events == expected

    async def test_a_removal_shows_the_last_value_that_was_reported(
        self, store: Store, watch: StartWatch
    ) -> None:
        watcher = watch(store)
        await watcher.synced()
        await put(store, "/a", b"1")
        revision = await put(store, "/a", b"2")
        await store.commit({}, [Delete("/a")])
        await watcher.until(lambda events: isinstance(events[-1], Removed))
        assert watcher.events[-1] == Removed("/a", Versioned("/a", b"2", revision))

    async def test_all_writes_of_a_commit_are_reported(
        self, store: Store, watch: StartWatch
    ) -> None:
        old = await put(store, "/old", b"1")
        watcher = watch(store)
        await watcher.synced()
        result = await store.commit({}, [Put("/a", b"1"), Delete("/old"), Put("/b", b"2")])
        assert isinstance(result, Committed)
        await watcher.until(lambda events: len(events) >= 5)
        assert sorted(watcher.events[2:], key=str) == sorted(
            [
                Changed(Versioned("/a", b"1", result.revision)),
                Changed(Versioned("/b", b"2", result.revision)),
                Removed("/old", Versioned("/old", b"1", old)),
            ],
            key=str,
        )

    async def test_the_end_of_a_session_removes_its_keys(
        self, store: Store, watch: StartWatch
    ) -> None:
        closed, expired = await store.open_session(60), await store.open_session(TTL_S)
        await store.commit({}, [Put("/a", b"1", closed), Put("/b", b"1", expired)])
        watcher = watch(store)
        await watcher.synced()
        await store.close_session(closed)
        # Then the one is reported now, and the other without anybody calling the store.
        await watcher.until(lambda events: len(events) >= 4, within_s=2)
        await watcher.until(lambda events: len(events) >= 5, within_s=5)
        removed = [event for event in watcher.events if isinstance(event, Removed)]
        assert {(event.key, event.previous.session_id) for event in removed} == {
            ("/a", closed),
            ("/b", expired),
        }
        assert not any(event.after_gap for event in removed)

    async def test_nothing_falls_between_the_listing_and_the_changes(
        self, store: Store, watch: StartWatch
    ) -> None:
        # Given a writer that does not stop while watches start.
        async def write() -> None:
            for i in range(300):
                await put(store, f"/k/{i:03}", b"x")

        writer = asyncio.create_task(write())
        watchers: list[Watcher] = []
        while not writer.done():
            watchers.append(watch(store, "/k/"))
            await asyncio.sleep(0.02)
        await writer
        # Then each watch has reported every key once.
        for watcher in watchers:
            await watcher.until(lambda events: len(events) >= 301)
            keys = [event.item.key for event in watcher.events if isinstance(event, Changed)]
            assert sorted(keys) == [f"/k/{i:03}" for i in range(300)]

    async def test_many_watchers_see_the_same(self, store: Store, watch: StartWatch) -> None:
        watchers = [watch(store) for _ in range(50)]
        for watcher in watchers:
            await watcher.synced()
        for i in range(20):
            await put(store, "/a", b"%d" % i)
        for watcher in watchers:
            await watcher.until(lambda events: len(events) >= 21)
            assert watcher.events == watchers[0].events

    async def test_a_watch_ends_at_once_when_its_task_is_cancelled(
        self, store: Store, watch: StartWatch
    ) -> None:
        watcher = watch(store)
        await watcher.synced()
        started = time.monotonic()
        watcher.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watcher.task
        assert time.monotonic() - started < 0.5

    async def test_a_watch_ends_at_once_when_its_iterator_is_closed(self, store: Store) -> None:
        events = cast("AsyncGenerator[WatchEvent, None]", store.watch("/"))
        assert await anext(events) == Synced()
        started = time.monotonic()
        await events.aclose()
        assert time.monotonic() - started < 0.5
        with pytest.raises(StopAsyncIteration):
            await anext(events)

    async def test_watches_end_when_the_store_is_closed(
        self, store: Store, watch: StartWatch
    ) -> None:
        watchers = [watch(store) for _ in range(3)]
        for watcher in watchers:
            await watcher.synced()
        await store.close()
        async with asyncio.timeout(1):
            for watcher in watchers:
                await watcher.task
