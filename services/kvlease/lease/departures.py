"""When engines lost their sessions, for the words of a miss."""

from __future__ import annotations

from collections import OrderedDict

from kvlease import times
from kvlease.mirror import Mirror
from kvlease.v1.registry_pb2 import Engine

MAX_REMEMBERED = 1024


class Departures:
    """What this replica has seen since it started: nothing is decided by it."""

    def __init__(self, engines: Mirror[Engine], clock: times.Clock = times.wall_clock) -> None:
        self._engines = engines
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def run(self) -> None:
        """Watches until cancelled."""
        with self._engines.subscribe() as changes:
            async for change in changes:
                before, after = change.before, change.after
                if before is None or change.after_gap:
                    continue
                if after is None or after.incarnation != before.incarnation:
                    self._seen[before.engine_id, before.incarnation] = self._clock()
                    if len(self._seen) > MAX_REMEMBERED:
                        self._seen.popitem(last=False)

    def at(self, engine_id: str, incarnation: str) -> float | None:
        """When that start of the engine was gone; None: nobody here has seen it."""
        return self._seen.get((engine_id, incarnation))
