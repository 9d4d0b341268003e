"""What every store promises (services/kvlease/store/base.py), on both of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from contract_helpers import TTL_S, Watcher, put, read

from kvlease.store import Store
from kvlease.store.base import (
    Committed,
    Conflict,
    Delete,
    Put,
    StoreUnavailable,
    Versioned,
)

StartWatch = Callable[..., Watcher]


class TestReading:
    async def test_an_absent_key_reads_as_none(self, store: Store) -> None:
        assert await store.get("/a") == {"/a": None}

    async def test_a_written_key_reads_with_its_value_and_revision(self, store: Store) -> None:
        revision = await put(store, "/a", b"\x00\xff")
        assert await read(store, "/a") == Versioned("/a", b"\x00\xff", revision)

    async def test_several_keys_are_read_at_once_present_or_not(self, store: Store) -> None:
        revision = await put(store, "/a", b"1")
        assert await store.get("/a", "/b") == {"/a": Versioned("/a", b"1", revision), "/b": None}

    async def test_more_keys_than_a_transaction_takes_are_read_from_one_snapshot(
        self, store: Store
    ) -> None:
        # Given two keys, far apart in the request, that are always written together.
        keys = [f"/{i}" for i in range(250)]

        async def write() -> None:
            for i in range(50):
                await store.commit({}, [Put(keys[0], b"%d" % i), Put(keys[-1], b"%d" % i)])

        writer = asyncio.create_task(write())
        # Then every read shows both at one value.
        while not writer.done():
            found = await store.get(*keys)
            first, last = found[keys[0]], found[keys[-1]]
            assert (first and first.value) == (last and last.value)
        await writer

    async def test_reading_no_keys_is_an_empty_answer(self, store: Store) -> None:
        assert await store.get() == {}

    async def test_a_listing_is_in_the_order_of_utf8_bytes(self, store: Store) -> None:
        # Given keys whose order by UTF-16 or by locale would be another.
        keys = ["/k/b", "/k/a", "/k/\U0001f600", "/k/\uffee", "/k/Z", "/k/é", "/k/a/b", "/k/a0"]
        for key in keys:
            await put(store, key, b"x")
        assert [item.key for item in await store.list("/k/")] == sorted(keys, key=str.encode)

    async def test_a_listing_holds_only_keys_with_the_prefix(self, store: Store) -> None:
        for key in ("/a/1", "/a0", "/b/1", "/a/2"):
            await put(store, key, b"x")
        assert [item.key for item in await store.list("/a/")] == ["/a/1", "/a/2"]

    async def test_a_listing_of_nothing_is_empty(self, store: Store) -> None:
        assert list(await store.list("/a/")) == []

    async def test_pages_follow_each_other_without_gap_or_overlap(self, store: Store) -> None:
        keys = [f"/k/{i:03}" for i in range(25)]
        for key in keys:
            await put(store, key, b"x")
        found: list[str] = []
        while page := await store.list("/k/", after=found[-1] if found else "", limit=10):
            assert len(page) == min(10, 25 - len(found))
            found += [item.key for item in page]
        assert found == keys

    async def test_a_page_may_start_after_a_key_that_is_gone(self, store: Store) -> None:
        for key in ("/k/1", "/k/2", "/k/3"):
            await put(store, key, b"x")
        await store.commit({}, [Delete("/k/2")])
        assert [item.key for item in await store.list("/k/", after="/k/2")] == ["/k/3"]

    async def test_a_page_after_a_key_before_the_prefix_starts_with_the_first(
        self, store: Store
    ) -> None:
        await put(store, "/k/1", b"x")
        assert [item.key for item in await store.list("/k/", after="/a")] == ["/k/1"]

    async def test_a_long_listing_is_complete(self, store: Store) -> None:
        keys = [f"/k/{i:05}" for i in range(1200)]
        for i in range(0, len(keys), 100):
            await store.commit({}, [Put(key, b"x") for key in keys[i : i + 100]])
        assert [item.key for item in await store.list("/k/")] == keys
        assert [item.key for item in await store.list("/k/", limit=700)] == keys[:700]

    async def test_a_key_without_a_leading_slash_is_a_mistake(self, store: Store) -> None:
        with pytest.raises(ValueError, match="slash"):
            await store.list("")
        with pytest.raises(ValueError, match="slash"):
            await store.commit({}, [Put("a", b"x")])


class TestCommits:
    async def test_a_key_is_created_where_none_is_expected(self, store: Store) -> None:
        result = await store.commit({"/a": 0}, [Put("/a", b"1")])
        assert isinstance(result, Committed)
        assert await read(store, "/a") == Versioned("/a", b"1", result.revision)

    async def test_creating_what_exists_is_a_conflict_that_shows_it(self, store: Store) -> None:
        revision = await put(store, "/a", b"1")
        result = await store.commit({"/a": 0}, [Put("/a", b"2")])
        assert result == Conflict({"/a": Versioned("/a", b"1", revision)})
        assert await read(store, "/a") == Versioned("/a", b"1", revision)

    async def test_an_update_at_the_current_revision_is_applied(self, store: Store) -> None:
        first = await put(store, "/a", b"1")
        result = await store.commit({"/a": first}, [Put("/a", b"2")])
        assert isinstance(result, Committed)
        assert result.revision > first
        assert await read(store, "/a") == Versioned("/a", b"2", result.revision)

    async def test_an_update_at_an_old_revision_is_a_conflict(self, store: Store) -> None:
        first = await put(store, "/a", b"1")
        second = await put(store, "/a", b"2")
        result = await store.commit({"/a": first}, [Put("/a", b"3")])
        assert result == Conflict({"/a": Versioned("/a", b"2", second)})

    async def test_an_update_of_a_key_that_is_gone_is_a_conflict(self, store: Store) -> None:
        first = await put(store, "/a", b"1")
        await store.commit({}, [Delete("/a")])
        assert await store.commit({"/a": first}, [Put("/a", b"2")]) == Conflict({"/a": None})

    async def test_a_deletion_at_the_current_revision_is_applied(self, store: Store) -> None:
        revision = await put(store, "/a", b"1")
        assert isinstance(await store.commit({"/a": revision}, [Delete("/a")]), Committed)
        assert await read(store, "/a") is None

    async def test_deleting_what_does_not_exist_changes_nothing(self, store: Store) -> None:
        revision = await put(store, "/b", b"1")
        assert await store.commit({}, [Delete("/a")]) == Committed(revision)

    async def test_a_key_that_was_deleted_and_made_again_is_another_revision(
        self, store: Store
    ) -> None:
        first = await put(store, "/a", b"1")
        await store.commit({}, [Delete("/a")])
        second = await put(store, "/a", b"1")
        assert second > first
        assert isinstance(await store.commit({"/a": first}, [Put("/a", b"2")]), Conflict)

    async def test_one_key_at_another_revision_stops_all_writes(self, store: Store) -> None:
        first = await put(store, "/a", b"1")
        result = await store.commit({"/a": first, "/b": 7}, [Put("/a", b"2"), Put("/c", b"2")])
        assert result == Conflict({"/a": Versioned("/a", b"1", first), "/b": None})
        assert await store.get("/a", "/c") == {"/a": Versioned("/a", b"1", first), "/c": None}

    async def test_all_writes_of_a_commit_have_one_revision(self, store: Store) -> None:
        await put(store, "/old", b"1")
        result = await store.commit({}, [Put("/a", b"1"), Delete("/old"), Put("/b", b"2")])
        assert isinstance(result, Committed)
        found = await store.get("/a", "/b", "/old")
        assert found == {
            "/a": Versioned("/a", b"1", result.revision),
            "/b": Versioned("/b", b"2", result.revision),
            "/old": None,
        }

    async def test_a_commit_may_expect_keys_that_it_does_not_write(self, store: Store) -> None:
        guard = await put(store, "/guard", b"1")
        assert isinstance(await store.commit({"/guard": guard}, [Put("/a", b"1")]), Committed)
        await put(store, "/guard", b"2")
        assert isinstance(await store.commit({"/guard": guard}, [Put("/a", b"2")]), Conflict)

    async def test_a_commit_without_writes_only_compares(self, store: Store) -> None:
        revision = await put(store, "/a", b"1")
        assert await store.commit({"/a": revision}, []) == Committed(revision)
        assert isinstance(await store.commit({"/a": 0}, []), Conflict)

    async def test_a_commit_of_a_hundred_keys_is_one_commit(self, store: Store) -> None:
        keys = [f"/k/{i:03}" for i in range(100)]
        result = await store.commit(dict.fromkeys(keys, 0), [Put(key, b"x") for key in keys])
        assert isinstance(result, Committed)
        assert {item.revision for item in await store.list("/k/")} == {result.revision}
        again = await store.commit(dict.fromkeys(keys, 0), [Put(key, b"y") for key in keys])
        assert isinstance(again, Conflict)
        assert len(again.current) == 100

    async def test_a_commit_that_cannot_be_meant_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="twice"):
            await store.commit({}, [Put("/a", b"1"), Delete("/a")])
        with pytest.raises(ValueError, match="at most"):
            await store.commit({}, [Put(f"/{i}", b"1") for i in range(101)])

    async def test_tasks_that_increment_one_counter_lose_no_increment(self, store: Store) -> None:
        # Given 20 tasks that each add 1 five times, by compare-and-swap.
        async def increment() -> None:
            for _ in range(5):
                item = await read(store, "/n")
                while True:
                    value = b"%d" % (int(item.value) + 1 if item else 1)
                    expect = {"/n": item.revision if item else 0}
                    result = await store.commit(expect, [Put("/n", value)])
                    if isinstance(result, Committed):
                        break
                    item = result.current["/n"]

        async with asyncio.TaskGroup() as tasks:
            for _ in range(20):
                tasks.create_task(increment())
        # Then the counter is exactly at their number.
        item = await read(store, "/n")
        assert item is not None
        assert item.value == b"100"

    async def test_of_many_creators_of_one_key_exactly_one_succeeds(self, store: Store) -> None:
        results = await asyncio.gather(
            *(store.commit({"/a": 0}, [Put("/a", b"%d" % i)]) for i in range(50))
        )
        (winner,) = [i for i, result in enumerate(results) if isinstance(result, Committed)]
        item = await read(store, "/a")
        assert item is not None
        assert item.value == b"%d" % winner
        assert all(
            result.current["/a"] == item for result in results if isinstance(result, Conflict)
        )


class TestClosing:
    async def test_a_store_that_answers_passes_its_check(self, store: Store) -> None:
        await store.check()

    async def test_a_closed_store_is_unavailable(self, store: Store) -> None:
        session = await store.open_session(60)
        await store.close()
        for call in (
            store.get("/a"),
            store.list("/"),
            store.commit({}, [Put("/a", b"1")]),
            store.open_session(TTL_S),
            store.keep_alive(session),
            store.close_session(session),
            store.check(),
        ):
            with pytest.raises(StoreUnavailable, match="closed"):
                await call

    async def test_closing_twice_is_no_error(self, store: Store) -> None:
        await store.close()
        await store.close()
