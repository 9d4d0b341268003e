"""Changes of conversations' records: read, decide by a rule, compare-and-swap.

A change first decides by what this replica knows already, so that it usually costs one
round trip to the store. Nothing but the store's word is final, though: a write carries
the revisions that it was decided by, and a decision to write nothing is made again on
records just read.

Changes of one conversation that wait in this replica go to the store together, in one
write: so a hundred readers that ask for the same lease at once wait for two round trips
instead of a hundred, and replicas take turns instead of starving each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvlease import serving
from kvlease.lease import keys
from kvlease.lease.knowledge import Knowledge, Known, Part
from kvlease.lease.rules import State
from kvlease.rpc import Refused
from kvlease.store.base import SessionLost, StoreError, StoreUnavailable
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.registry_pb2 import Engine

Answer = TypeVar("Answer")

Decide = Callable[[State, Engine | None], tuple[Answer, State]]
"""A rule: from the records as they are, and the lease's holder as it is registered, to an
answer and the records as they shall be. It may be asked more than once."""

LEASE = Part(lease=True, info=False)
"""The rule decides by the lease. It is shown the conversation's own record only when
there is no lease."""

INFO = Part(lease=False, info=True)
"""The rule decides by the conversation's own record alone, and is shown no lease."""

BOTH = Part(lease=True, info=True)

MAX_TRIES = 64
"""Conflicts come only from other replicas. Of five that all write one conversation as fast
as they can, one change in a million loses so often."""


@dataclass(slots=True, eq=False)
class _Change:
    """A change that waits. ``must_be_certain``: it has nothing to write, as far as this
    replica knew, and that has to be made sure."""

    decide: Decide[Any]
    part: Part
    with_holder: bool
    alone: bool
    answer: asyncio.Future[Any]
    must_be_certain: bool = False

    def settle(self, outcome: Any) -> None:
        if self.answer.done():
            return  # its caller has gone
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass(slots=True)
class _Queue:
    """The changes of one conversation that wait."""

    conversation: Conversation
    waiting: list[_Change] = field(default_factory=list)

    def take(self) -> list[_Change]:
        """The first change that waits, and those after it that may be written with it."""
        count = 1
        if not self.waiting[0].alone:
            while count < len(self.waiting) and not self.waiting[count].alone:
                count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


@dataclass(frozen=True, slots=True)
class _Decided:
    """What the rules make of some records, one change after the other: each change's
    answer (an exception: it is refused), and whether it wants anything written."""

    outcomes: Sequence[tuple[_Change, Any, bool]]
    after: State


class Records:
    """The records of all conversations. :meth:`close` it."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._queues: dict[str, _Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def change(
        self,
        conversation: Conversation,
        decide: Decide[Answer],
        part: Part,
        *,
        with_holder: bool = False,
        alone: bool = False,
    ) -> Answer:
        """Decides and writes, as one compare-and-swap.

        ``alone``: what it makes of the records has to be seen by watches, so no other
        change is written with it.
        ``with_holder``: the rule needs to know for certain whether the lease's holder is
        registered. A caller that is cancelled does not stop its change, which may happen
        or not.

        Raises what the rule raises; :class:`~kvlease.store.base.SessionLost` if the
        lease's session has ended; :class:`~kvlease.store.base.StoreUnavailable`.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        change = _Change(decide, part, with_holder, alone, future)
        key = keys.lease(conversation)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(conversation)
            task = asyncio.create_task(self._drain(key, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.waiting.append(change)
        return await future

    async def read(self, conversation: Conversation) -> State:
        """Both records, from one moment."""
        return (await self._knowledge.read(conversation)).state

    async def engine(self, engine_id: str, incarnation: str) -> Engine | None:
        """See :meth:`~kvlease.lease.knowledge.Knowledge.engine`."""
        return await self._knowledge.engine(engine_id, incarnation)

    async def close(self) -> None:
        """Cuts the changes that have not come to an end; their callers are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that was cancelled before its first step has not seen its queue.
        for queue in self._queues.values():
            for change in queue.waiting:
                change.answer.cancel()
        self._queues.clear()

    async def _drain(self, key: str, queue: _Queue) -> None:
        """Works until nothing waits. What waits at the start of a round, and may be
        written together, is decided and written in it."""
        batch: list[_Change] = []
        try:
            while queue.waiting:
                batch = queue.take()
                try:
                    queue.waiting[:0] = await self._work(queue, batch)
                except Exception as error:  # also a fault of ours: callers wait for it
                    for change in batch:
                        change.settle(error)
        finally:
            # Cancelled, or broken: nobody shall wait for ever.
            for change in (*batch, *queue.waiting):
                change.answer.cancel()
            del self._queues[key]

    async def _work(self, queue: _Queue, batch: Sequence[_Change]) -> list[_Change]:
        """Settles the changes; returns those that have to be looked at once more."""
        batch = [change for change in batch if not change.answer.done()]
        if not batch:
            return []
        part = batch[0].part
        for change in batch:
            part |= change.part
        with_holder = any(change.with_holder for change in batch)
        lost = False
        known = await self._begin(queue, batch, with_holder)
        for attempt in range(MAX_TRIES):
            await serving.back_off(attempt)
            decided = self._decide(batch, known)
            if _writes_nothing(decided, known):
                if known.certain:
                    return _settle(decided, certain=True)
                known = await self._knowledge.read(queue.conversation, with_holder=with_holder)
                continue
            try:
                result = await self._knowledge.write(queue.conversation, known, decided.after, part)
            except SessionLost:
                if lost:
                    return await self._one_by_one(queue, batch)
                # The lease's session, or that of conversations' records: a new one of
                # the latter, and another look, tell.
                lost = True
                self._knowledge.forget_session()
                known = await self._knowledge.read(queue.conversation, with_holder=with_holder)
                continue
            if result is None:
                return _settle(decided, known.certain)
            # A conflict tells of the records, not of the engine that holds the blocks.
            known = replace(result, certain=result.certain and not with_holder)
        raise StoreUnavailable("the conversation's records change all the time: try again")

    async def _begin(self, queue: _Queue, batch: Sequence[_Change], with_holder: bool) -> Known:
        if any(change.must_be_certain for change in batch):
            return await self._knowledge.read(queue.conversation, with_holder=with_holder)
        return self._knowledge.guess(queue.conversation)

    def _decide(self, batch: Sequence[_Change], known: Known) -> _Decided:
        state = known.state
        outcomes: list[tuple[_Change, Any, bool]] = []
        for change in batch:
            holder = self._knowledge.holder(known, state.lease) if change.with_holder else None
            try:
                answer, after = change.decide(state, holder)
            except Refused as refused:
                outcomes.append((change, refused, False))
                continue
            writes = after.lease is not state.lease or after.info is not state.info
            outcomes.append((change, answer, writes))
            state = after
        return _Decided(outcomes, state)

    async def _one_by_one(self, queue: _Queue, batch: Sequence[_Change]) -> list[_Change]:
        """A session has ended. Whose change it was is told by trying each alone."""
        if len(batch) == 1:
            raise SessionLost("the lease's session has ended")
        left: list[_Change] = []
        for change in batch:
            try:
                left += await self._work(queue, [change])
            except StoreError as error:
                change.settle(error)
        return left


def _writes_nothing(decided: _Decided, known: Known) -> bool:
    return decided.after.lease is known.state.lease and decided.after.info is known.state.info


def _settle(decided: _Decided, certain: bool) -> list[_Change]:
    """Answers the changes. Those that wrote nothing are settled only if the records that
    they were decided by were ``certain``; the others are returned."""
    left = []
    for change, outcome, writes in decided.outcomes:
        if writes or certain:
            change.settle(outcome)
        else:
            change.must_be_certain = True
            left.append(change)
    return left
