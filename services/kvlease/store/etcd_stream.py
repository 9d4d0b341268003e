"""A stream of etcd (``Watch``, ``LeaseKeepAlive``) whose reads can time out.

In gRPC for asyncio a read that is cancelled ends the whole call; so here a read goes on
when whoever waited for it has gone.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvlease.store.etcd_api import Message
from kvlease.store.etcd_errors import EtcdError

Explain = Callable[[grpc.aio.AioRpcError | None], EtcdError]


class Stream:
    """One open stream. ``explain`` makes an error of what ended it (None: silence)."""

    def __init__(self, call: Any, endpoint: str, explain: Explain) -> None:
        self.endpoint = endpoint
        self.on_close: Callable[[], None] = lambda: None
        self._call = call
        self._explain = explain
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[Any] | None = None
        self._one_writer = asyncio.Lock()

    async def send(self, request: Message, timeout_s: float) -> None:
        """Raises :class:`EtcdError` if the stream has ended or takes nothing in time."""
        try:
            async with asyncio.timeout(timeout_s), self._one_writer:
                writing = asyncio.create_task(self._call.write(request), name="etcd-write")
                try:
                    await self._done(writing)
                    await self._result(writing)
                finally:
                    writing.cancel()
                    await asyncio.gather(writing, return_exceptions=True)
        except TimeoutError:
            raise self._explain(None) from None

    async def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None if there is none within ``timeout_s`` (None: waits).
        Raises :class:`EtcdError` when the stream has ended."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read(), name="etcd-read")
        if not await self._done(self._reading, timeout_s):
            return None
        reading, self._reading = self._reading, None
        message = await self._result(reading)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # in no stub
            raise await self._why_it_ended()
        return message

    async def _done(self, task: asyncio.Task[Any], timeout_s: float | None = None) -> bool:
        """Waits for a task, but not on after :meth:`cancel`: gRPC leaves a write waiting
        for ever whose call was cancelled before it had a connection."""
        await asyncio.wait({task, self._cancelled}, timeout=timeout_s, return_when=FIRST_COMPLETED)
        if self._cancelled.done():
            raise self._explain(None)
        return task.done()

    async def _result(self, task: asyncio.Task[Any]) -> Any:
        # A call that was cancelled raises CancelledError, as if this task had been.
        if task.cancelled():
            raise self._explain(None)
        error = task.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            raise self._explain(error)
        if isinstance(error, asyncio.InvalidStateError):
            raise await self._why_it_ended()
        if error is not None:
            raise error
        return task.result()

    def silent(self) -> EtcdError:
        """For a stream that should have said something by now."""
        return self._explain(None)

    def cancel(self) -> None:
        """Ends the stream; whoever uses it gets an :class:`EtcdError`."""
        if not self._cancelled.done():
            self._cancelled.set_result(None)
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream and its read, at once."""
        self.on_close()
        self.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _why_it_ended(self) -> EtcdError:
        code, details = await self._call.code(), await self._call.details()
        metadata = grpc.aio.Metadata()
        return self._explain(grpc.aio.AioRpcError(code, metadata, metadata, details, ""))
