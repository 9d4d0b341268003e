"""What the embedded store promises beyond the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import pytest

from kvlease.store.base import (
    Changed,
    Committed,
    Delete,
    Put,
    Removed,
    SessionLost,
    Synced,
    Versioned,
    WatchEvent,
)
from kvlease.store.memory import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> AsyncIterator[MemoryStore]:
    opened = MemoryStore(clock=clock, max_backlog=5)
    yield opened
    await opened.close()


async def test_a_session_ends_exactly_when_its_ttl_is_over(
    store: MemoryStore, clock: Clock
) -> None:
    session = await store.open_session(15)
    await store.commit({}, [Put("/a", b"1", session)])
    clock.now += 14.9
    assert (await store.get("/a"))["/a"] is not None
    clock.now += 0.1
    assert (await store.get("/a"))["/a"] is None
    with pytest.raises(SessionLost):
        await store.keep_alive(session)


async def test_a_keep_alive_counts_from_now(store: MemoryStore, clock: Clock) -> None:
    session = await store.open_session(15)
    for _ in range(3):
        clock.now += 14
        assert await store.keep_alive(session) == 15


async def test_sessions_that_end_together_take_their_own_keys(
    store: MemoryStore, clock: Clock
) -> None:
    short, long = await store.open_session(5), await store.open_session(50)
    await store.commit({}, [Put("/a", b"1", short), Put("/b", b"1", long), Put("/c", b"1")])
    clock.now += 20
    assert [item.key for item in await store.list("/")] == ["/b", "/c"]
    clock.now += 31
    assert [item.key for item in await store.list("/")] == ["/c"]


async def test_a_watch_that_is_not_read_drops_changes_and_reports_the_state_anew(
    store: MemoryStore,
) -> None:
    # Given a watch whose consumer does not come while more happens than is kept for it.
    await store.commit({}, [Put("/gone", b"1"), Put("/kept", b"1")])
    events = cast("AsyncGenerator[WatchEvent, None]", store.watch("/"))
    first = [await anext(events) for _ in range(3)]
    assert first[-1] == Synced()
    await store.commit({}, [Delete("/gone")])
    for i in range(20):
        last = await store.commit({}, [Put("/busy", b"%d" % i)])
    # Then it is told what has gone, what is, and that this is all.
    assert isinstance(last, Committed)
    assert [await anext(events) for _ in range(3)] == [
        Removed("/gone", Versioned("/gone", b"1", 2), after_gap=True),
        Changed(Versioned("/busy", b"19", last.revision)),
        Synced(),
    ]
    # And changes follow as before.
    await store.commit({}, [Delete("/kept")])
    assert await anext(events) == Removed("/kept", Versioned("/kept", b"1", 2))
    await events.aclose()


async def test_closing_ends_the_task_that_ends_sessions(clock: Clock) -> None:
    store = MemoryStore(clock=clock)
    before = asyncio.all_tasks()
    await store.open_session(15)
    assert len(asyncio.all_tasks() - before) == 1
    await store.close()
    assert asyncio.all_tasks() == before
