"""Renewals of sessions: one shared ``LeaseKeepAlive`` stream for all of them.

A stream for each renewal, as etcd clients that were looked at open, costs etcd more than
the renewal itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque

from kvlease.store.etcd_api import pb
from kvlease.store.etcd_channel import Members
from kvlease.store.etcd_errors import EtcdError, Kind
from kvlease.store.etcd_stream import Stream

_PAUSE_S = 0.05


class _Link:
    """An open stream, and who waits for which lease's answer on it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.broken = False
        self._waiting: dict[int, deque[asyncio.Future[int]]] = defaultdict(deque)
        self._reader = asyncio.create_task(self._read(), name="etcd-keepalive")

    def expect(self, lease_id: int) -> asyncio.Future[int]:
        """The TTL of the next answer for a lease that nobody else waits for."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[lease_id].append(future)
        return future

    async def _read(self) -> None:
        try:
            while True:
                response = await self.stream.receive(None)
                assert response is not None  # without a time-out there is a message
                waiting = self._waiting[response.ID]
                if waiting and not (future := waiting.popleft()).done():
                    future.set_result(response.TTL)
                if not waiting:
                    del self._waiting[response.ID]
        except EtcdError as error:
            self.fail(error)

    def fail(self, error: EtcdError) -> None:
        """Tells all who wait, so that they try elsewhere."""
        self.broken = True
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        self._waiting.clear()

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
            left_s = deadline - time.monotonic()
            try:
                return await self._renew_once(lease_id, left_s / 2)
            except EtcdError as error:
                if error.kind not in (Kind.UNSENT, Kind.UNKNOWN, Kind.STALE_TOKEN):
                    raise
                if time.monotonic() + _PAUSE_S >= deadline:
                    raise
            await self._members.pause(_PAUSE_S)

    async def _renew_once(self, lease_id: int, timeout_s: float) -> int:
        link = await self._open()
        future = link.expect(lease_id)
        try:
            async with asyncio.timeout(timeout_s):
                request = pb.LeaseKeepAliveRequest(ID=lease_id)
                await link.stream.send(request, timeout_s)
                return await future
        except (TimeoutError, EtcdError) as error:
            # etcd answers in order: a stream that does not answer this answers nothing.
            future.cancel()
            why = error if isinstance(error, EtcdError) else link.stream.silent()
            link.fail(why)
            raise why from None
        finally:
            future.cancel()

    async def _open(self) -> _Link:
        async with self._opening:
            if self._link is None or self._link.broken:
                await self.close()
                self._link = _Link(await self._members.stream("LeaseKeepAlive"))
            return self._link

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
