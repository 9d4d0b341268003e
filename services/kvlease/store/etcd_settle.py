"""What became of a transaction whose answer was lost: the rules, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlease.store.base import Put, Versioned, Write

Change = Versioned | str
"""A key's new value, or the key that was deleted."""


@dataclass(frozen=True)
class Attempt:
    """One sending of a commit, under a fence.

    ``seen`` is a revision that etcd had reached before: if the attempt was applied, its
    revision is higher.
    """

    expect: Mapping[str, int]
    writes: Sequence[Write]
    fence: bytes
    seen: int

    @property
    def keys(self) -> Sequence[str]:
        """The keys it writes."""
        return [write.key for write in self.writes]

    def judge(self, state: Mapping[str, Versioned | None]) -> int | None:
        """Decides from the written keys as they were when the fence was up. Returns the
        revision at which the attempt was applied, 0 if it was not, None if only the
        changes in between can tell."""
        for write in self.writes:
            item = state[write.key]
            if item is not None and item.revision <= self.seen:
                return 0  # it would have been written, or deleted
            if item is not None and _wrote(write, item):
                return item.revision
        return None if self.writes else 0

    def made(self, changes: Sequence[Change]) -> bool:
        """Whether ``changes``, all those of one revision, include this attempt's: it may
        have been applied together with others.

        Values of :class:`Put` are unique (:meth:`Store.commit`), so one tells. Of a
        deletion by itself nobody can tell whose it was: one of the same keys counts.
        """
        if any(isinstance(write, Put) for write in self.writes):
            items = [change for change in changes if isinstance(change, Versioned)]
            return any(_wrote(write, item) for write in self.writes for item in items)
        ours = [change for change in changes if _key(change) in self.keys]
        must = {key for key in self.keys if self.expect.get(key)}
        # Deletions only: each of these is a key.
        return bool(ours) and must <= set(ours) <= set(self.keys)


def _key(change: Change) -> str:
    return change.key if isinstance(change, Versioned) else change


def _wrote(write: Write, item: Versioned) -> bool:
    return isinstance(write, Put) and (write.key, write.value, write.session_id) == (
        item.key,
        item.value,
        item.session_id,
    )
