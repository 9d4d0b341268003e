"""Which calls a server works on at once, and which wait for their turn.

All calls share one event loop: with sixty under way, each waits for the steps of all the
others. So of calls that may wait only a few are let in at a time, in the order in which
they came, and those that somebody waits for do not pass the gate at all.

:class:`Line` holds the rules, without I/O; :class:`Gate` is the line for asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Call = TypeVar("Call", bound=Hashable)
Answer = TypeVar("Answer")


class Line(Generic[Call]):
    """Calls inside, at most ``places`` that count, and calls that wait, first come first
    served. A call counts for ``lent_s``: one that hangs does not keep others out for
    longer. ``now`` is monotonic, in seconds."""

    def __init__(self, places: int, lent_s: float) -> None:
        self._places = places
        self._lent_s = lent_s
        self._inside: dict[Call, float] = {}
        """Those that count, and until when: in the order in which they were let in."""
        self._waiting: dict[Call, None] = {}

    def enter(self, call: Call, now: float) -> list[Call]:
        """A call has come. Returns whoever may go in now."""
        self._waiting[call] = None
        return self.due(now)

    def leave(self, call: Call, now: float) -> list[Call]:
        """A call has ended, or does not wait any more. Returns whoever may go in now."""
        self._waiting.pop(call, None)
        self._inside.pop(call, None)
        return self.due(now)

    def due(self, now: float) -> list[Call]:
        """Whoever may go in now."""
        while self._inside and next(iter(self._inside.values())) <= now:
            del self._inside[next(iter(self._inside))]
        admitted = list[Call]()
        while self._waiting and len(self._inside) < self._places:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._inside[call] = now + self._lent_s
            admitted.append(call)
        return admitted

    def next_due(self) -> float | None:
        """When somebody may go in though nobody leaves; None: nobody waits."""
        return next(iter(self._inside.values())) if self._waiting else None


class Gate:
    """Lets calls through as a :class:`Line` says."""

    def __init__(self, places: int, lent_s: float) -> None:
        self._line = Line[asyncio.Future[None]](places, lent_s)
        self._timer: asyncio.TimerHandle | None = None

    async def through(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The result of ``work``, which begins when it is this call's turn; a caller that
        is cancelled before gives its place in the line away."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        try:
            self._let_in(self._line.enter(turn, loop.time()))
            await turn
            return await work()
        finally:
            self._let_in(self._line.leave(turn, loop.time()))

    def _let_in(self, turns: list[asyncio.Future[None]]) -> None:
        for turn in turns:
            if not turn.done():  # else it was cancelled, and is about to leave
                turn.set_result(None)
        if self._timer is None:
            due_at = self._line.next_due()
            if due_at is not None:
                self._timer = asyncio.get_running_loop().call_at(due_at, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        self._let_in(self._line.due(asyncio.get_running_loop().time()))
