"""What one watch has reported so far, and so what it has to report next."""

from __future__ import annotations

from collections.abc import Iterable

from kvlease.store.base import Changed, Removed, Synced, Versioned, WatchEvent


class View:
    """The keys as the watch's consumer knows them. Both stores share it, so that they
    agree on what a consumer sees after a gap."""

    def __init__(self) -> None:
        self._items: dict[str, Versioned] = {}

    def change(self, item: Versioned) -> Changed | None:
        """The event for a key that has a new value; None if it was reported already."""
        known = self._items.get(item.key)
        if known is not None and known.revision == item.revision:
            return None
        self._items[item.key] = item
        return Changed(item)

    def remove(self, key: str) -> Removed | None:
        """The event for a key that has disappeared; None if it was never reported."""
        previous = self._items.pop(key, None)
        return None if previous is None else Removed(key, previous)

    def replace(self, items: Iterable[Versioned]) -> list[WatchEvent]:
        """The events that lead from what was reported to ``items``, which is all that
        exists now; :class:`Synced` is the last. Removals are marked ``after_gap``."""
        now = {item.key: item for item in items}
        gone = [key for key in self._items if key not in now]
        events: list[WatchEvent] = [
            Removed(key, self._items.pop(key), after_gap=True) for key in gone
        ]
        events += [event for item in now.values() if (event := self.change(item))]
        events.append(Synced())
        return events
