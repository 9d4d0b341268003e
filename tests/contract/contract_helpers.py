"""What the contract tests use besides fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvlease.store import Store
from kvlease.store.base import Committed, Put, StoreUnavailable, Synced, Versioned, WatchEvent

TTL_S = 1
"""The shortest session that the test's etcd grants."""


class Watcher:
    """Collects what a watch reports."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.events: list[WatchEvent] = []
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._collect(store, prefix))

    async def _collect(self, store: Store, prefix: str) -> None:
        async for event in store.watch(prefix):
            self.events.append(event)
            self._news.set()

    async def until(self, done: Callable[[list[WatchEvent]], bool], within_s: float = 10) -> None:
        """Waits until ``done`` says yes to the events so far."""
        async with asyncio.timeout(within_s):
            while not done(self.events):
                self._news.clear()
                await self._news.wait()

    async def synced(self, times: int = 1) -> None:
        await self.until(lambda events: events.count(Synced()) >= times)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def eventually(
    condition: Callable[[], Awaitable[bool]], *, within_s: float = 10, every_s: float = 0.02
) -> None:
    """Waits until ``condition`` holds."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110  # nothing tells when it does
            await asyncio.sleep(every_s)


async def put(store: Store, key: str, value: bytes, session_id: str | None = None) -> int:
    """Writes without conditions; returns the revision."""
    result = await store.commit({}, [Put(key, value, session_id)])
    assert isinstance(result, Committed)
    return result.revision


async def read(store: Store, key: str) -> Versioned | None:
    return (await store.get(key))[key]


async def value_of(store: Store, key: str) -> bytes | None:
    item = await read(store, key)
    return item.value if item else None


async def answers(store: Store) -> bool:
    """Whether the store can be reached now."""
    try:
        await store.check()
    except StoreUnavailable:
        return False
    return True
