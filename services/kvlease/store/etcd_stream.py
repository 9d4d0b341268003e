"""A stream of etcd (``Watch``, ``LeaseKeepAlive``) whose reads can time out.

In gRPC for asyncio a read that is cancelled ends the whole call; so here a read goes on
when whoever waited for it has gone.
"""

from __future__ import annotations

import asyncio
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
        self._read: asyncio.Task[Any] | None = None
        self._writing = asyncio.Lock()

    async def send(self, request: Message, timeout_s: float) -> None:
        """Raises :class:`EtcdError` if the stream has ended or takes nothing in time."""
        try:
            async with asyncio.timeout(timeout_s), self._writing:
                await self._call.write(request)
        except TimeoutError:
            raise self._explain(None) from None
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from None
        except asyncio.InvalidStateError:
            raise await self._why_it_ended() from None

    async def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None if there is none within ``timeout_s`` (None: waits).
        Raises :class:`EtcdError` when the stream has ended."""
        if self._read is None:
            self._read = asyncio.create_task(self._call.read(), name="etcd-read")
        await asyncio.wait({self._read}, timeout=timeout_s)
        if not self._read.done():
            return None
        read, self._read = self._read, None
        if read.cancelled():
            raise self._explain(None)
        error = read.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            raise self._explain(error)
        if error is not None:
            raise error
        message = read.result()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # in no stub
            raise await self._why_it_ended()
        return message

    def silent(self) -> EtcdError:
        """For a stream that should have said something by now."""
        return self._explain(None)

    def cancel(self) -> None:
        """Ends the stream; whoever reads gets an :class:`EtcdError`."""
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream and its read, at once."""
        self.on_close()
        self._call.cancel()
        if self._read is not None:
            self._read.cancel()
            await asyncio.gather(self._read, return_exceptions=True)

    async def _why_it_ended(self) -> EtcdError:
        code, details = await self._call.code(), await self._call.details()
        metadata = grpc.aio.Metadata()
        return self._explain(grpc.aio.AioRpcError(code, metadata, metadata, details, ""))
