"""The embedded store: everything in one process, gone when it ends.

For laptops and tests. It has etcd's semantics, down to which error wins when two
apply, so that what works here works there.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvlease.store.base import (
    Committed,
    Conflict,
    Delete,
    Put,
    SessionLost,
    StoreUnavailable,
    Versioned,
    WatchEvent,
    Write,
    check_commit,
    check_key,
)
from kvlease.store.view import View

MAX_BACKLOG = 10_000
"""Changes that a watch keeps for a consumer that does not take them. Beyond that it
drops them and reports the state anew, as etcd does after a compaction."""


@dataclass(slots=True)
class _Session:
    ttl_s: int
    deadline: float
    keys: set[str] = field(default_factory=set)


class _Feed:
    """Changes under a prefix that one watch has still to report."""

    def __init__(self, prefix: str, limit: int) -> None:
        self.prefix = prefix
        self.wake = asyncio.Event()
        self.events: deque[Versioned | str] = deque()
        self.must_list = True
        self._limit = limit

    def add(self, key: str, item: Versioned | None) -> None:
        if self.must_list or not key.startswith(self.prefix):
            return
        self.events.append(key if item is None else item)
        if len(self.events) > self._limit:
            self.events.clear()
            self.must_list = True
        self.wake.set()


class MemoryStore:
    """A :class:`~kvlease.store.base.Store` in this process.

    ``clock`` gives seconds that never go back. A session ends at the first call, or
    at the latest when its real time is over, after ``clock`` has passed its deadline.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, max_backlog: int = MAX_BACKLOG
    ) -> None:
        self._clock = clock
        self._max_backlog = max_backlog
        # etcd starts at 1 too: the first write has revision 2.
        self._revision = 1
        self._items: dict[str, Versioned] = {}
        self._sessions: dict[str, _Session] = {}
        self._feeds: set[_Feed] = set()
        self._expiry: asyncio.Task[None] | None = None
        self._expiry_wake = asyncio.Event()
        self._closed = False

    async def get(self, *keys: str) -> Mapping[str, Versioned | None]:
        await self._enter()
        return {key: self._items.get(key) for key in keys}

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Sequence[Versioned]:
        check_key(prefix)
        await self._enter()
        found = self._under(prefix)
        if after:
            start = after.encode()
            found = [item for item in found if item.key.encode() > start]
        return found[:limit] if limit else found

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        check_commit(expect, writes)
        await self._enter()
        current = {key: self._items.get(key) for key in expect}
        if any((item.revision if item else 0) != expect[key] for key, item in current.items()):
            return Conflict(current)
        for write in writes:
            if isinstance(write, Put) and write.session_id is not None:
                self._session(write.session_id)
        self._apply(writes)
        return Committed(self._revision)

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        check_key(prefix)
        feed = _Feed(prefix, self._max_backlog)
        view = View()
        self._feeds.add(feed)
        try:
            while not self._closed:
                feed.wake.clear()
                if feed.must_list:
                    feed.must_list = False
                    for listed in view.replace(self._under(prefix)):
                        yield listed
                while feed.events and not self._closed:
                    change = feed.events.popleft()
                    event = view.remove(change) if isinstance(change, str) else view.change(change)
                    if event is not None:
                        yield event
                if not feed.must_list and not self._closed:
                    await feed.wake.wait()
        finally:
            self._feeds.discard(feed)

    async def open_session(self, ttl_s: int) -> str:
        await self._enter()
        session_id = secrets.token_hex(8)
        self._sessions[session_id] = _Session(ttl_s, self._clock() + ttl_s)
        self._expiry_wake.set()
        if self._expiry is None:
            self._expiry = asyncio.create_task(self._expire_in_time(), name="kvlease-sessions")
        return session_id

    async def keep_alive(self, session_id: str) -> float:
        await self._enter()
        session = self._session(session_id)
        session.deadline = self._clock() + session.ttl_s
        return float(session.ttl_s)

    async def close_session(self, session_id: str) -> None:
        await self._enter()
        self._end(session_id)

    async def check(self) -> None:
        await self._enter()

    async def close(self) -> None:
        self._closed = True
        for feed in self._feeds:
            feed.wake.set()
        task, self._expiry = self._expiry, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _enter(self) -> None:
        # Over a network other tasks would run meanwhile: let them, so that races of
        # callers show here too.
        await asyncio.sleep(0)
        if self._closed:
            raise StoreUnavailable("the embedded store is closed")
        self._expire()

    def _under(self, prefix: str) -> Sequence[Versioned]:
        found = [item for key, item in self._items.items() if key.startswith(prefix)]
        return sorted(found, key=lambda item: item.key.encode())

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionLost(f"session {session_id} has ended or never existed")
        return session

    def _apply(self, writes: Sequence[Write]) -> None:
        """Applies all writes at the next revision, if they change anything."""
        writes = [write for write in writes if isinstance(write, Put) or write.key in self._items]
        if not writes:
            return
        self._revision += 1
        for write in writes:
            before = self._items.pop(write.key, None)
            if before is not None and before.session_id is not None:
                self._sessions[before.session_id].keys.discard(write.key)
            item = None
            if isinstance(write, Put):
                item = Versioned(write.key, write.value, self._revision, write.session_id)
                self._items[write.key] = item
                if write.session_id is not None:
                    self._sessions[write.session_id].keys.add(write.key)
            for feed in self._feeds:
                feed.add(write.key, item)

    def _end(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            self._apply([Delete(key) for key in sorted(session.keys)])
            del self._sessions[session_id]

    def _expire(self) -> None:
        now = self._clock()
        for session_id in [i for i, s in self._sessions.items() if s.deadline <= now]:
            self._end(session_id)

    async def _expire_in_time(self) -> None:
        """Ends sessions when their time is over, without anybody calling."""
        while True:
            self._expire()
            self._expiry_wake.clear()
            wait_s = None
            if self._sessions:
                wait_s = min(s.deadline for s in self._sessions.values()) - self._clock()
            # Not wait_for: in Python 3.11 that forgets a cancellation which comes together
            # with the event, and close() would wait for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._expiry_wake.wait()
