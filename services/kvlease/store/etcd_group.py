"""Group commit: transactions that wait go to etcd together.

A round trip costs the service and etcd more than the transaction in it, and etcd writes its
log once for each. So while one is under way, others are collected, and go as the next: one
transaction that nests them (etcd 3.3 and later), each with its own comparisons and result.
Those of a group have no key in common, so none depends on another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.store.etcd_api import Fields, Message, pb
from kvlease.store.etcd_channel import Members
from kvlease.store.etcd_errors import EtcdError, Kind

LATEST_S = 0.01
"""What waits goes after so long at the latest, whatever has become of those before: a
member that hangs delays only what it was sent."""

MAX_GROUP = 64
"""Transactions in a group."""

MAX_KEYS = 16
"""Of a transaction in a group. etcd counts its operations and the group's transactions
together, and takes 128 by default (``--max-txn-ops``)."""

MAX_BYTES = 400_000
"""Of a group, so that it is soon under way. etcd takes 1.5 MB a request."""


@dataclass(eq=False, slots=True)
class _Waiting:
    transaction: Fields
    keys: frozenset[str]
    size: int
    deadline: float
    answer: asyncio.Future[Answer]


@dataclass(frozen=True, slots=True)
class Answer:
    """A transaction's result, and etcd's revision after it."""

    succeeded: bool
    responses: Sequence[Message]
    revision: int


class Group:
    """Sends transactions, together where they meet. :meth:`close` it."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._waiting: list[_Waiting] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def send(
        self, transaction: Fields, keys: frozenset[str], size: int, deadline: float
    ) -> Answer:
        """The result of a ``TxnRequest`` that reads and writes ``keys``, with values of
        ``size`` bytes. Deadlines of calls that come later are not earlier.

        Raises :class:`EtcdError`; with kind ``UNKNOWN`` it may have been applied.
        """
        if len(keys) > MAX_KEYS or size > MAX_BYTES:
            return await self.send_alone(transaction, deadline)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(transaction, keys, size, deadline, answer))
        if not self._under_way:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATEST_S, self._start)
        return await answer

    async def send_alone(self, transaction: Fields, deadline: float) -> Answer:
        """As :meth:`send`, at once and by itself."""
        request = pb.TxnRequest(**transaction)
        response = await self._members.call("Txn", request, safe=False, deadline=deadline)
        return Answer(response.succeeded, response.responses, response.header.revision)

    async def close(self) -> None:
        """Waits for what is under way, and what waits to be. The members are closed first,
        so that it fails at once."""
        self._start()
        while self._under_way:
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            task = asyncio.create_task(self._run(), name="etcd-commit")
            self._under_way.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._start()

    async def _run(self) -> None:
        # Taken now, not when this was started: what has come in the same turn of the
        # event loop goes along.
        group = self._take()
        try:
            if len(group) == 1:
                (only,) = group
                _settle(only, await self.send_alone(only.transaction, only.deadline))
            elif group:
                await self._send_together(group)
        except EtcdError as error:
            for each in group:
                _fail(each, error)
        finally:
            for each in group:
                each.answer.cancel()  # where it has no answer yet

    def _take(self) -> list[_Waiting]:
        """The next group. Of two that have a key in common the earlier goes first."""
        taken, left = list[_Waiting](), list[_Waiting]()
        keys, size = set[str](), 0
        for each in self._waiting:
            if each.answer.done():
                continue  # whoever waited has gone
            fits = len(taken) < MAX_GROUP and size + each.size <= MAX_BYTES
            if fits and keys.isdisjoint(each.keys):
                taken.append(each)
                size += each.size
            else:
                left.append(each)
            keys |= each.keys
        self._waiting = left
        return taken

    async def _send_together(self, group: Sequence[_Waiting]) -> None:
        nested = [{"request_txn": each.transaction} for each in group]
        deadline = min(each.deadline for each in group)
        try:
            answer = await self.send_alone({"success": nested}, deadline)
        except EtcdError as error:
            if error.kind not in (Kind.NO_SESSION, Kind.REFUSED):
                raise
            # Nothing was written. Whose fault it was is told by sending each alone.
            await asyncio.gather(*map(self._retry, group))
            return
        for each, result in zip(group, answer.responses, strict=True):
            inner = result.response_txn
            _settle(each, Answer(inner.succeeded, inner.responses, answer.revision))

    async def _retry(self, each: _Waiting) -> None:
        try:
            _settle(each, await self.send_alone(each.transaction, each.deadline))
        except EtcdError as error:
            _fail(each, error)


def _settle(each: _Waiting, answer: Answer) -> None:
    if not each.answer.done():
        each.answer.set_result(answer)


def _fail(each: _Waiting, error: EtcdError) -> None:
    if not each.answer.done():
        each.answer.set_exception(error)
