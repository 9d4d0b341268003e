"""A mirror of the embedded store, and what its readers may count on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvlease import mirror as module
from kvlease.mirror import Change, Entry, FellBehind, Mirror
from kvlease.store.base import Changed, Committed, Delete, Put, Removed, StoreUnavailable, Versioned
from kvlease.store.memory import MemoryStore
from kvlease.v1.lease_pb2 import Lease


def value(lease_id: str) -> bytes:
    return Lease(lease_id=lease_id).SerializeToString()


@contextlib.asynccontextmanager
async def mirrored(store: MemoryStore) -> AsyncIterator[Mirror[Lease]]:
    mirror: Mirror[Lease] = Mirror(store, "/x/", Lease.FromString)
    task = asyncio.create_task(mirror.run())
    yield mirror
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    yield store
    await store.close()


@pytest.fixture
async def mirror(store: MemoryStore) -> AsyncIterator[Mirror[Lease]]:
    async with mirrored(store) as made:
        yield made


async def put(store: MemoryStore, key: str, lease_id: str) -> Versioned:
    data = value(lease_id)
    result = await store.commit({}, [Put(key, data)])
    assert isinstance(result, Committed)
    return Versioned(key, data, result.revision)


def entry(item: Versioned) -> Entry[Lease]:
    return Entry(item, Lease.FromString(item.value))


def names(mirror: Mirror[Lease]) -> list[str]:
    return sorted(entry.record.lease_id for entry in mirror.entries())


async def test_after_a_fence_it_holds_all_that_was_written_before(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    for number in range(50):
        await put(store, f"/x/{number}", f"l{number}")
        await put(store, f"/y/{number}", "elsewhere")
        await mirror.fence()
        assert len(mirror.entries()) == number + 1


async def test_many_fences_at_once_all_pass(store: MemoryStore, mirror: Mirror[Lease]) -> None:
    await put(store, "/x/1", "l1")
    async with asyncio.timeout(5):
        await asyncio.gather(*(mirror.fence() for _ in range(20)))
    assert names(mirror) == ["l1"]  # and the fence itself is no record


async def test_a_fence_that_the_watch_does_not_pass_fails(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FENCE_TIMEOUT_S", 0.05)
    stuck: Mirror[Lease] = Mirror(store, "/x/", Lease.FromString)  # never run
    with pytest.raises(StoreUnavailable, match="did not catch up"):
        await stuck.fence()


async def test_subscribers_see_every_change_with_what_was_before(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    await put(store, "/x/1", "old")
    await mirror.fence()
    with mirror.subscribe() as changes:
        await put(store, "/x/1", "new")
        await store.commit({}, [Delete("/x/1")])
        await mirror.fence()
        mirror.end_subscriptions()
        seen = [change async for change in changes]
    old, new = Lease(lease_id="old"), Lease(lease_id="new")
    assert seen == [Change("/x/1", old, new), Change("/x/1", new, None)]


async def test_a_subscription_to_a_mirror_that_ended_ends(mirror: Mirror[Lease]) -> None:
    mirror.end_subscriptions()
    async with asyncio.timeout(1):
        with mirror.subscribe() as changes:
            assert [change async for change in changes] == []


async def test_a_subscriber_that_does_not_read_is_let_go(
    store: MemoryStore, mirror: Mirror[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 5)
    await mirror.fence()
    with mirror.subscribe() as changes:
        for number in range(10):
            await put(store, "/x/1", f"l{number}")
        await mirror.fence()
        with pytest.raises(FellBehind):
            async for _ in changes:
                pass


async def test_a_value_that_cannot_be_read_is_passed_over(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    await store.commit({}, [Put("/x/1", b"\xff not protobuf")])
    await put(store, "/x/2", "good")
    await mirror.fence()
    assert names(mirror) == ["good"]


async def test_its_own_write_is_known_before_the_watch_tells_of_it(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    await mirror.fence()
    item = await put(store, "/x/1", "mine")
    mirror.note_written(item.key, item.revision, entry(item))
    latest = mirror.latest("/x/1")
    assert latest is not None
    assert latest.record.lease_id == "mine"
    assert mirror.get("/x/1") is None
    await put(store, "/x/1", "another's")
    await mirror.fence()
    latest = mirror.latest("/x/1")
    assert latest is not None
    assert latest.record.lease_id == "another's"


async def test_its_own_removal_is_known_before_the_watch_tells_of_it(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    item = await put(store, "/x/1", "l1")
    await mirror.fence()
    mirror.note_written("/x/1", item.revision + 1, None)
    assert mirror.latest("/x/1") is None
    await store.commit({}, [Delete("/x/1")])
    await put(store, "/x/1", "again")
    await mirror.fence()
    latest = mirror.latest("/x/1")
    assert latest is not None
    assert latest.record.lease_id == "again"


async def test_a_late_note_does_not_hide_what_the_watch_has_told(
    store: MemoryStore, mirror: Mirror[Lease]
) -> None:
    mine = await put(store, "/x/1", "mine")
    await put(store, "/x/1", "newer")
    await mirror.fence()
    mirror.note_written("/x/1", mine.revision, entry(mine))
    latest = mirror.latest("/x/1")
    assert latest is not None
    assert latest.record.lease_id == "newer"


def test_a_removal_that_was_not_seen_is_passed_on_as_such() -> None:
    mirror: Mirror[Lease] = Mirror(MemoryStore(), "/x/", Lease.FromString)
    item = Versioned("/x/1", value("l1"), 7)
    mirror._apply(Changed(item))
    with mirror.subscribe() as changes:
        mirror._apply(Removed("/x/1", item, after_gap=True))
        change = changes._queue.get_nowait()
    assert change == Change("/x/1", Lease(lease_id="l1"), None, after_gap=True)


async def test_a_subscriber_to_a_topic_sees_what_is_and_what_was_about_it(
    store: MemoryStore,
) -> None:
    # given a mirror whose records are about their holders
    mirror: Mirror[Lease] = Mirror(
        store, "/x/", Lease.FromString, lambda lease: [lease.holder_session_id]
    )
    task = asyncio.create_task(mirror.run())

    async def write(lease_id: str, holder: str) -> None:
        record = Lease(lease_id=lease_id, holder_session_id=holder)
        await store.commit({}, [Put("/x/k", record.SerializeToString())])

    with mirror.subscribe("s") as changes, mirror.subscribe() as all_changes:
        # when a record is another's, then ours, then another's, then gone
        for lease_id, holder in (("a", "t"), ("b", "s"), ("c", "t"), ("d", "t")):
            await write(lease_id, holder)
        await mirror.fence()
        mirror.end_subscriptions()
        ours = [change.after and change.after.lease_id async for change in changes]
        everything = [change.after and change.after.lease_id async for change in all_changes]
    # then we are told when it becomes ours and when it stops being it
    assert ours == ["b", "c"]
    assert everything == ["a", "b", "c", "d"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
