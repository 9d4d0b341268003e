"""Renewals of sessions: one shared ``LeaseKeepAlive`` stream for all of them.

A stream for each renewal, as etcd clients that were looked at open, costs etcd more than
the renewal itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque

from kvlease.store.etcd_api import pb
from kvlease.store.etcd_channel import Members, left_s
from kvlease.store.etcd_errors import EtcdError, Kind
from kvlease.store.etcd_stream import Stream

_PAUSE_S = 0.05


async def grant(
    members: Members, ttl_s: int, *, patient: bool = False, deadline: float | None = None
) -> int:
    """A new lease's id. Raises :class:`EtcdError`."""
    # An id of our own makes a grant whose answer was lost safe to send again.
    lease_id = secrets.randbelow(2**63 - 1) + 1
    request = pb.LeaseGrantRequest(ID=lease_id, TTL=ttl_s)
    try:
        await members.call("LeaseGrant", request, patient=patient, deadline=deadline)
    except EtcdError as error:
        if error.kind is not Kind.SESSION_EXISTS:
            raise
    return lease_id


class _Link:
    """An open stream, and who waits for which lease's answer on it."""

    def __init__(self, stream: Stream, timeout_s: float) -> None:
        self.stream = stream
        self.broken = False
        self._timeout_s = timeout_s
        # A lease's answers come in the order of its questions.
        self._waiting: dict[int, deque[asyncio.Future[int]]] = defaultdict(deque)
        self._reader = asyncio.create_task(self._read(), name="etcd-keepalive")

    async def ask(self, lease_id: int) -> int:
        """The TTL that etcd gives the lease. Raises :class:`EtcdError`."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[lease_id].append(answer)
        sent = False
        try:
            await self.stream.send(pb.LeaseKeepAliveRequest(ID=lease_id), self._timeout_s)
            sent = True
            return await answer
        except EtcdError as error:
            self.fail(error)
            raise
        finally:
            answer.cancel()
            if not sent and answer in self._waiting[lease_id]:
                self._waiting[lease_id].remove(answer)

    async def _read(self) -> None:
        try:
            while True:
                response = await self.stream.receive(None)
                assert response is not None  # without a time-out there is a message
                waiting = self._waiting[response.ID]
                if waiting and not (answer := waiting.popleft()).done():
                    answer.set_result(response.TTL)
                if not waiting:
                    del self._waiting[response.ID]
        except EtcdError as error:
            self.fail(error)

    def fail(self, error: EtcdError) -> None:
        """Tells all who wait, so that they try elsewhere."""
        self.broken = True
        waiting = [answer for answers in self._waiting.values() for answer in answers]
        self._waiting.clear()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)
                # Whoever waits may be about to be told by other means.
                answer.exception()

    async def close(self) -> None:
        self.fail(self.stream.silent())
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.stream.close()


class Renewals:
    """Prolongs leases."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._link: _Link | None = None
        self._opening = asyncio.Lock()

    async def renew(self, lease_id: int) -> int:
        """The TTL (s) that etcd gave the lease, counted from now; 0 if it has ended.
        Raises :class:`EtcdError` if no member says so in time."""
        deadline = self._members.deadline()
        while True:
            try:
                return await self._renew_once(lease_id, left_s(deadline) / 2)
            except EtcdError as error:
                if error.kind not in (Kind.UNSENT, Kind.UNKNOWN, Kind.STALE_TOKEN):
                    raise
                if left_s(deadline) <= _PAUSE_S:
                    raise
            await self._members.pause(_PAUSE_S)

    async def _renew_once(self, lease_id: int, timeout_s: float) -> int:
        link: _Link | None = None
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._open()
                return await link.ask(lease_id)
        except TimeoutError:
            if link is None:
                raise self._members.advice.silent("") from None
            # etcd answers in order: a stream that does not answer this answers nothing.
            error = link.stream.silent()
            link.fail(error)
            raise error from None

    async def _open(self) -> _Link:
        async with self._opening:
            if self._link is None or self._link.broken:
                await self.close()
                stream = await self._members.stream("LeaseKeepAlive")
                self._link = _Link(stream, self._members.timeout_s)
            return self._link

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
