"""The store, seen from a distance: one process that holds the truth, and clients of it in
the services' processes, over a network that loses answers.

It may keep a session longer than its TTL, as etcd does when it elects a leader, restarts or
was paused; never shorter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio
from sim_loop import Process, SimLoop
from sim_network import Network

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
)
from kvlease.store.view import View

T = TypeVar("T")

STORE = "store"
TIMEOUT_S = 2.0
EXPIRY_PERIOD_S = 0.5
"""etcd looks for leases that are over every 500 ms."""


@dataclass(slots=True)
class Session:
    ttl_s: int
    deadline: float
    renewed: float
    """The last renewal that was asked for: the TTL after it is what was promised."""
    keys: dict[str, None] = field(default_factory=dict)


class Feed:
    """What one watch has still to be told."""

    def __init__(self, owner: Process, prefix: str) -> None:
        self.owner = owner
        self.prefix = prefix
        self.wake = asyncio.Event()
        self.events: deque[Versioned | str] = deque()
        self.must_list = True
        self.epoch = 0
        self.last = 0.0
        """When the latest event arrives: they arrive in order."""


Observer = Callable[[str, Versioned | None, Versioned | None], None]


class StoreCore:
    """The truth. ``observe`` is told of every write: key, before, after."""

    def __init__(self, loop: SimLoop, network: Network, observe: Observer) -> None:
        self.loop = loop
        self.network = network
        self.process = Process(STORE, loop)
        self.items: dict[str, Versioned] = {}
        self.sessions: dict[str, Session] = {}
        self.revision = 1
        self.ending = ""
        """The session whose keys are being removed."""
        self._observe = observe
        self._feeds: list[Feed] = []
        self._sessions_opened = 0
        self._commits = 0
        self._results: dict[int, Committed | Conflict | SessionLost] = {}
        self.process.spawn(self._expire_for_ever())

    # --- operations, in the store's process ---------------------------------------------

    def get(self, keys: Sequence[str]) -> dict[str, Versioned | None]:
        return {key: self.items.get(key) for key in keys}

    def under(self, prefix: str) -> list[Versioned]:
        return sorted(
            (item for key, item in self.items.items() if key.startswith(prefix)),
            key=lambda item: item.key.encode(),
        )

    def commit(
        self, number: int, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict | SessionLost:
        if number not in self._results:
            self._results[number] = self._commit(expect, writes)
        return self._results[number]

    def next_number(self) -> int:
        """A name for a commit, so that its outcome can be asked for."""
        self._commits += 1
        return self._commits

    def outcome(self, number: int) -> Committed | Conflict | SessionLost | None:
        """What became of a commit; None: it has not come (yet)."""
        return self._results.get(number)

    def _commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict | SessionLost:
        current = self.get(list(expect))
        if any((item.revision if item else 0) != expect[key] for key, item in current.items()):
            return Conflict(current)
        for write in writes:
            if isinstance(write, Put) and write.session_id not in (None, *self.sessions):
                return SessionLost(f"session {write.session_id} has ended")
        self._apply(writes)
        return Committed(self.revision)

    def open_session(self, ttl_s: int) -> str:
        self._sessions_opened += 1
        name = f"s{self._sessions_opened}"
        now = self.loop.now
        self.sessions[name] = Session(ttl_s, now + ttl_s, now)
        return name

    def keep_alive(self, session_id: str) -> float | None:
        session = self.sessions.get(session_id)
        if session is None:
            return None
        session.renewed = self.loop.now
        session.deadline = self.loop.now + session.ttl_s
        return float(session.ttl_s)

    def close_session(self, session_id: str) -> None:
        session = self.sessions.get(session_id)
        if session is not None:
            self.ending = session_id
            self._apply([Delete(key) for key in sorted(session.keys)])
            del self.sessions[session_id]
            self.ending = ""

    def _apply(self, writes: Sequence[Write]) -> None:
        writes = [write for write in writes if isinstance(write, Put) or write.key in self.items]
        if not writes:
            return
        self.revision += 1
        for write in writes:
            before = self.items.pop(write.key, None)
            if before is not None and before.session_id is not None:
                self.sessions[before.session_id].keys.pop(write.key, None)
            after = None
            if isinstance(write, Put):
                after = Versioned(write.key, write.value, self.revision, write.session_id)
                self.items[write.key] = after
                if write.session_id is not None:
                    self.sessions[write.session_id].keys[write.key] = None
            self._observe(write.key, before, after)
            for feed in self._feeds:
                if write.key.startswith(feed.prefix):
                    self._tell(feed, after or write.key)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            now = self.loop.now
            for name in [name for name, s in self.sessions.items() if s.deadline <= now]:
                self.close_session(name)

    # --- faults -------------------------------------------------------------------------

    def prolong_sessions(self) -> None:
        """A new leader gives every session its full TTL again."""
        for session in self.sessions.values():
            session.deadline = self.loop.now + session.ttl_s

    def lose_history(self) -> None:
        """What watches were not told yet is compacted away: they list anew."""
        for feed in self._feeds:
            self._interrupt(feed)

    # --- watches ------------------------------------------------------------------------

    def subscribe(self, owner: Process, prefix: str) -> Feed:
        self._feeds = [feed for feed in self._feeds if feed.owner.alive]
        feed = Feed(owner, prefix)
        self._feeds.append(feed)
        return feed

    def _delay(self, feed: Feed) -> float:
        return self.network.link(STORE, feed.owner.name).delay()

    def _tell(self, feed: Feed, event: Versioned | str) -> None:
        if feed.must_list:
            return
        # A little later than the one before: timers of one moment come in any order.
        feed.last = max(feed.last + 1e-6, self.loop.now + self._delay(feed))
        self.loop.outside(feed.last - self.loop.now, self._told, feed, feed.epoch, event)

    def _told(self, feed: Feed, epoch: int, event: Versioned | str) -> None:
        if feed.epoch != epoch:
            return
        if self.network.link(STORE, feed.owner.name).weather.cut:
            # The connection is silent: what comes now is lost, and listed anew later.
            self._interrupt(feed)
            return
        feed.events.append(event)
        feed.wake.set()

    def _interrupt(self, feed: Feed) -> None:
        """The watch breaks, and notices a moment later."""
        feed.epoch += 1
        feed.events.clear()
        feed.must_list = True
        self.loop.outside(self._delay(feed), feed.wake.set)

    def snapshot(self, feed: Feed) -> list[Versioned]:
        """Everything there is now; what changes from now on is told after it."""
        feed.epoch += 1
        feed.events.clear()
        feed.must_list = False
        return self.under(feed.prefix)


class StoreClient:
    """A :class:`~kvlease.store.base.Store` in a service's process."""

    def __init__(self, core: StoreCore, owner: Process) -> None:
        self._core = core
        self._owner = owner

    async def get(self, *keys: str) -> Mapping[str, Versioned | None]:
        return await self._call(lambda: self._core.get(keys))

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Sequence[Versioned]:
        found = await self._call(lambda: self._core.under(prefix))
        found = [item for item in found if item.key.encode() > after.encode()]
        return found[:limit] if limit else found

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        number = self._core.next_number()
        try:
            result = await self._call(lambda: self._core.commit(number, expect, writes))
        except StoreUnavailable:
            # It may have been applied, or may be still: reading back tells the former.
            settled = await self._call(lambda: self._core.outcome(number))
            if settled is None:
                raise
            result = settled
        if isinstance(result, SessionLost):
            raise result
        return result

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        feed = self._core.subscribe(self._owner, prefix)
        view = View()
        while True:
            feed.wake.clear()
            if feed.must_list:
                listed = await self._list_for_watch(feed)
                for event in view.replace(listed):
                    yield event
            while feed.events:
                change = feed.events.popleft()
                seen = view.remove(change) if isinstance(change, str) else view.change(change)
                if seen is not None:
                    yield seen
            if not feed.must_list:
                await feed.wake.wait()

    async def _list_for_watch(self, feed: Feed) -> Sequence[Versioned]:
        network = self._core.network
        while True:
            try:
                if not network.link(STORE, self._owner.name).weather.cut:
                    return await self._call(lambda: self._core.snapshot(feed))
            except StoreUnavailable:
                pass
            await asyncio.sleep(0.1)

    async def open_session(self, ttl_s: int) -> str:
        return await self._call(lambda: self._core.open_session(ttl_s))

    async def keep_alive(self, session_id: str) -> float:
        left_s = await self._call(lambda: self._core.keep_alive(session_id))
        if left_s is None:
            raise SessionLost(f"session {session_id} has ended")
        return left_s

    async def close_session(self, session_id: str) -> None:
        await self._call(lambda: self._core.close_session(session_id))

    async def check(self) -> None:
        await self._call(lambda: None)

    async def close(self) -> None:
        pass

    async def _call(self, operation: Callable[[], T]) -> T:
        async def handler() -> T:
            return operation()

        core = self._core
        try:
            return await core.network.call(self._owner, core.process, STORE, handler, TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise StoreUnavailable(error.details() or "") from None
