"""The store: where the services keep all their state.

A store is a small, strongly consistent key-value map with revisions, sessions and
watches: the part of etcd's v3 API that kvlease uses, and nothing more. Two stores
implement it, :mod:`kvlease.store.etcd` and :mod:`kvlease.store.memory`; both pass the
tests in ``tests/contract``.

Keys are text that starts with a slash, values are bytes (serialized protobuf messages).
A revision is a positive integer that grows with every write to the store; a key's
revision is that of the last write to it, and 0 stands for "the key does not exist".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """A call to the store did not succeed."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, or did not answer before the call's deadline.

    Of a write that raises this, nothing is known for certain only after the store has
    tried to settle it by reading back: an implementation raises it when even that was
    not possible. Callers must treat such a write as "may have happened".
    """


class SessionLost(StoreError):
    """The session has ended, or never existed."""


@dataclass(frozen=True, slots=True)
class Versioned:
    """A key's value at a revision.

    ``session_id`` is the session that the key lives with, or None.
    """

    key: str
    value: bytes
    revision: int
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key. With a session, the key disappears when that session ends."""

    key: str
    value: bytes
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key. Removing one that does not exist changes nothing."""

    key: str


Write = Put | Delete

MAX_COMMIT_KEYS = 100
"""Keys that a commit may expect, and keys that it may write. etcd takes 128 operations
a transaction by default (``--max-txn-ops``); the rest is the store's own."""


def check_key(key: str) -> None:
    """Raises ValueError for what is no key, nor a prefix of keys."""
    if not key.startswith("/"):
        raise ValueError(f"the key {key!r} does not start with a slash")


def check_commit(expect: Mapping[str, int], writes: Sequence[Write]) -> None:
    """Raises ValueError for a commit that no store could apply as it is meant."""
    keys = {write.key for write in writes}
    if len(keys) < len(writes):
        raise ValueError("a commit writes one key twice")
    for key in keys:
        check_key(key)
    if max(len(expect), len(keys)) > MAX_COMMIT_KEYS:
        raise ValueError(f"a commit takes at most {MAX_COMMIT_KEYS} keys: split it")


@dataclass(frozen=True, slots=True)
class Committed:
    """All writes were applied, together, at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Nothing was written: a key was not at the expected revision.

    ``current`` holds every expected key as it was at that moment (None: absent), so
    that a caller can decide anew without reading again.
    """

    current: Mapping[str, Versioned | None]


@dataclass(frozen=True, slots=True)
class Changed:
    """A watch saw this key appear or change."""

    item: Versioned


@dataclass(frozen=True, slots=True)
class Removed:
    """A watch saw this key disappear.

    ``previous`` is the last value that this watch reported. ``after_gap`` says that the
    moment of the removal was not seen (the history was compacted while the watch was
    disconnected), so there may have been values in between that were never reported.
    """

    key: str
    previous: Versioned
    after_gap: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """Everything that exists has been reported. Comes once after the start of a watch,
    and again after each gap."""


WatchEvent = Changed | Removed | Synced


class Store(Protocol):
    """What the services may count on. Every method raises :class:`StoreUnavailable`
    when the store cannot be reached within the store's own request deadline."""

    async def get(self, *keys: str) -> Mapping[str, Versioned | None]:
        """Reads keys from one consistent snapshot, never a stale one. Absent: None."""
        ...

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Sequence[Versioned]:
        """Reads keys that start with ``prefix``, in the order of their UTF-8 bytes.

        ``after`` skips keys up to and including that one; ``limit`` 0 means all. One
        call sees one snapshot; two calls may see two.
        """
        ...

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        """Applies all writes together if every key in ``expect`` is at its revision
        (0: absent), else nothing.

        At most one write a key. An ambiguous failure (the connection broke after the
        request had been sent) is settled by reading back before this returns: it never
        reports a conflict with itself. For that every :class:`Put` must differ from the
        value it replaces.

        Raises :class:`SessionLost` if a :class:`Put` names a session that has ended;
        nothing is written then.
        """
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """Reports keys that start with ``prefix``: each existing one as
        :class:`Changed`, then :class:`Synced`, then changes in the order of their
        revisions.

        It goes on by itself over disconnects, store restarts and compactions; values
        that lasted only between may be skipped, the latest state is not. It never
        raises :class:`StoreUnavailable` once it has started iterating: it tries again,
        for ever. It ends when the iterator is closed or its task is cancelled, at once.
        """
        ...

    async def open_session(self, ttl_s: int) -> str:
        """Opens a session that ends ``ttl_s`` seconds after its last keep-alive (the
        store may add to that, never take off). Returns its id."""
        ...

    async def keep_alive(self, session_id: str) -> float:
        """Prolongs a session to its full TTL from now. Returns the seconds left.

        Raises :class:`SessionLost` if it has ended.
        """
        ...

    async def close_session(self, session_id: str) -> None:
        """Ends a session: its keys are gone when this returns. Closing one that has
        ended is not an error."""
        ...

    async def check(self) -> None:
        """Returns if the store answers, else raises :class:`StoreUnavailable` with a
        sentence that says what was tried."""
        ...

    async def close(self) -> None:
        """Ends watches and connections. Sessions live on until their TTL."""
        ...
