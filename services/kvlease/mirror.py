"""A copy of one part of the store, kept up to date by a watch.

Reads from it cost no round trip but may be some milliseconds old. So whoever decides by
it either commits with the revision that it saw (a conflict then tells the truth), or
asks the store before taking "no" for an answer. :meth:`Mirror.fence` waits until the
copy holds everything that had been written when it was called.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
from google.protobuf.message import DecodeError

from kvlease.store.base import (
    Changed,
    Committed,
    Put,
    Removed,
    Store,
    StoreUnavailable,
    Synced,
    Versioned,
    WatchEvent,
)

log = structlog.get_logger("kvlease.mirror")

Record = TypeVar("Record")

FENCE_TIMEOUT_S = 5.0

MAX_BACKLOG = 20_000
"""Changes that a subscriber may be behind before its subscription ends: a reader that has
stalled must not fill the service's memory."""

_FENCE = "\x7ffence"
# Parts of real keys are percent-encoded, so none starts with this character, and it sorts
# after all of them: a fresh listing reports the fence last.


@dataclass(frozen=True, slots=True)
class Entry(Generic[Record]):
    """A key's stored form and its parsed record."""

    item: Versioned
    record: Record


@dataclass(frozen=True, slots=True)
class Change(Generic[Record]):
    """A key's record before and after a change; None: absent. ``after_gap``: the moment
    of the removal was not seen.

    One without a key comes after each gap in the store's history: what was written and
    replaced in between has not been reported.
    """

    key: str
    before: Record | None
    after: Record | None
    after_gap: bool = False


class FellBehind(Exception):
    """The subscriber did not keep up; it has to start again."""


class Subscription(Generic[Record]):
    """Changes since the subscription began, in order. Iteration ends when the mirror
    stops, and raises :class:`FellBehind` after :data:`MAX_BACKLOG` unread changes."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Change[Record] | None] = asyncio.Queue()
        self._fell_behind = False

    def _push(self, change: Change[Record] | None) -> None:
        if self._queue.qsize() >= MAX_BACKLOG:
            self._fell_behind = True
        else:
            self._queue.put_nowait(change)

    async def __aiter__(self) -> AsyncIterator[Change[Record]]:
        while True:
            if self._fell_behind:
                raise FellBehind
            change = await self._queue.get()
            if change is None:
                return
            yield change


class Mirror(Generic[Record]):
    """The records under ``prefix``. ``parse`` turns a stored value into a record;
    ``topics`` tells what a record is about, for those who subscribe to one topic."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        parse: Callable[[bytes], Record],
        topics: Callable[[Record], Iterable[str]] = lambda _: (),
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._parse = parse
        self._topics = topics
        self._entries: dict[str, Entry[Record]] = {}
        self._written: dict[str, tuple[int, Entry[Record] | None]] = {}
        self._subscriptions: dict[str, set[Subscription[Record]]] = {}
        self._ended = False
        self._fence_key = prefix + _FENCE
        self._fence_revision = 0
        self._fence_moved = asyncio.Event()
        self._synced = asyncio.Event()

    @property
    def is_synced(self) -> bool:
        """Whether the first listing is complete."""
        return self._synced.is_set()

    async def run(self) -> None:
        """Keeps the copy up to date until cancelled. Then all subscriptions end."""
        try:
            async for event in self._store.watch(self._prefix):
                self._apply(event)
        finally:
            self.end_subscriptions()

    def end_subscriptions(self) -> None:
        """Ends every subscription, also those to come: the server is about to stop."""
        self._ended = True
        self._push(self._subscriptions, None)

    def get(self, key: str) -> Entry[Record] | None:
        """The record as last seen."""
        return self._entries.get(key)

    def latest(self, key: str) -> Entry[Record] | None:
        """The record as last seen, or as this process has written it since."""
        written = self._written.get(key)
        return written[1] if written else self._entries.get(key)

    def note_written(self, key: str, revision: int, entry: Entry[Record] | None) -> None:
        """This process has just written (None: removed) a key. :meth:`latest` knows it
        from now on; everything else waits for the watch, which sees writes in order."""
        seen = self._entries.get(key)
        if (seen.item.revision if seen else 0) < revision and (seen or entry):
            self._written[key] = (revision, entry)

    def entries(self) -> list[Entry[Record]]:
        """All records as last seen, in no order."""
        return list(self._entries.values())

    def after(self, key: str) -> list[Entry[Record]]:
        """The records whose keys come after ``key``, in the order of their keys."""
        found = [entry for known, entry in self._entries.items() if known > key]
        return sorted(found, key=lambda entry: entry.item.key)

    @contextlib.contextmanager
    def subscribe(self, topic: str = "") -> Iterator[Subscription[Record]]:
        """Changes from now on; with a topic only those of records that are, or were, about
        it. What :meth:`entries` returns before the next ``await`` belongs to the same
        moment."""
        subscription: Subscription[Record] = Subscription()
        if self._ended:
            subscription._push(None)
        self._subscriptions.setdefault(topic, set()).add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions[topic].discard(subscription)
            if not self._subscriptions[topic]:
                del self._subscriptions[topic]

    async def fence(self) -> None:
        """Waits until everything that was written before this call is in the mirror.

        Raises :class:`~kvlease.store.base.StoreUnavailable`.
        """
        try:
            async with asyncio.timeout(FENCE_TIMEOUT_S):
                await self._synced.wait()
                # Unique, because a store may tell two equal values from each other only
                # by reading back.
                put = Put(self._fence_key, uuid.uuid4().bytes)
                result = await self._store.commit({}, [put])
                assert isinstance(result, Committed)  # nothing was expected
                while self._fence_revision < result.revision:
                    await self._fence_moved.wait()
        except TimeoutError:
            raise StoreUnavailable(
                f"the watch on {self._prefix} did not catch up within {FENCE_TIMEOUT_S:g} s"
            ) from None

    def _apply(self, event: WatchEvent) -> None:
        match event:
            case Synced():
                self._written.clear()  # what they told may have been skipped
                if self._synced.is_set():
                    self._push(self._subscriptions, Change("", None, None, after_gap=True))
                self._synced.set()
            case Changed(item) if item.key == self._fence_key:
                self._fence_revision = item.revision
                self._fence_moved.set()
                self._fence_moved = asyncio.Event()
            case Changed(item):
                self._change(item)
            case Removed(key, _, after_gap):
                self._written.pop(key, None)
                gone = self._entries.pop(key, None)
                if gone is not None:
                    self._publish(Change(key, gone.record, None, after_gap))

    def _change(self, item: Versioned) -> None:
        revision, entry = self._written.get(item.key, (0, None))
        if revision <= item.revision:
            self._written.pop(item.key, None)
        if entry is None or revision != item.revision:  # else it need not be parsed again
            try:
                entry = Entry(item, self._parse(item.value))
            except DecodeError:
                # Somebody else's value, or a newer kvlease's: no reason to stop serving.
                log.error("a stored value cannot be read", key=item.key, revision=item.revision)
                return
        before = self._entries.get(item.key)
        self._entries[item.key] = entry
        self._publish(Change(item.key, before.record if before else None, entry.record))

    def _publish(self, change: Change[Record]) -> None:
        topics = {""}
        for record in (change.before, change.after):
            if record is not None:
                topics.update(self._topics(record))
        self._push(topics, change)

    def _push(self, topics: Iterable[str], change: Change[Record] | None) -> None:
        for topic in topics:
            for subscription in self._subscriptions.get(topic, ()):
                subscription._push(change)
