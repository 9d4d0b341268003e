"""Tidies up after readers and holders that have vanished: every replica looks after every
lease, and whoever comes first wins the compare-and-swap."""

from __future__ import annotations

import asyncio
import heapq
import math
import random

import structlog

from kvlease import times
from kvlease.lease import rules
from kvlease.lease.knowledge import LeaseView
from kvlease.lease.rules import Limits
from kvlease.lease.service import LeaseOperations
from kvlease.mirror import Mirror
from kvlease.rpc import Refused
from kvlease.store.base import StoreUnavailable

log = structlog.get_logger("kvlease.lease.sweeper")

PERIOD_S = 1.0

MAX_DELAY_S = 1.0
"""Nothing depends on the moment, so replicas wait by chance: mostly one does the work."""


class Sweeper:
    """Knows when each lease is due, and sweeps it then."""

    def __init__(
        self,
        operations: LeaseOperations,
        leases: Mirror[LeaseView],
        limits: Limits,
        clock: times.Clock = times.wall_clock,
    ) -> None:
        self._operations = operations
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._queue: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    async def run(self) -> None:
        """Until the mirror stops or the task is cancelled."""
        with self._leases.subscribe() as changes:
            for entry in self._leases.entries():
                self._note(entry.item.key, entry.record)
            async with asyncio.TaskGroup() as group:
                sweeping = group.create_task(self._sweep_for_ever())
                async for change in changes:
                    if change.after is not None:
                        self._note(change.key, change.after)
                sweeping.cancel()

    def _note(self, key: str, view: LeaseView, not_before: float = 0.0) -> None:
        """Queues a lease, once, at the earliest moment at which it may be due: if it is not
        due then, it is queued again."""
        due = max(rules.next_due(view.lease, self._limits), not_before)
        due += random.uniform(0, MAX_DELAY_S)
        if due < self._due.get(key, math.inf):
            self._due[key] = due
            heapq.heappush(self._queue, (due, key))

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            while self._queue and self._queue[0][0] <= self._clock():
                due, key = heapq.heappop(self._queue)
                if self._due.get(key) == due:  # else it was queued again, earlier
                    del self._due[key]
                    await self._sweep(key)

    async def _sweep(self, key: str) -> None:
        entry = self._leases.get(key)
        if entry is None:
            return
        lease = entry.record.lease
        if rules.next_due(lease, self._limits) > self._clock():
            self._note(key, entry.record)
            return
        try:
            await self._operations.sweep(lease.conversation)
        except StoreUnavailable:
            self._note(key, entry.record, not_before=self._clock() + PERIOD_S)
        except Refused as refused:
            log.error("sweeping failed", key=key, error=str(refused))
