"""An engine's session with the registry: registered, kept alive, registered again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

import grpc
import structlog

from kvlease import rpc
from kvlease.v1 import registry_pb2, registry_pb2_grpc

log = structlog.get_logger("kvlease.connector.session")

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.5
"""Pause before a failed registration or keep-alive is tried again."""

USAGE_PERIOD_S = 0.25
"""Changed block usage is published at most so often."""


class Session:
    """Registers an engine once its HTTP server answers, and keeps it registered.

    :attr:`session_id` is None while there is no session. ``on_lost(session_id, ended_by)``
    is called when one has ended; ``ended_by`` is the latest moment at which the store may
    still have shown it, or what the engine granted under it. ``clock`` gives moments;
    ``answers`` tells whether the engine's HTTP server does. When that is gone, nobody can
    use the engine: the session ends, ``on_gone`` is called, and the engine registers again
    should the server come back. ``other_models`` are asked for each time.
    """

    def __init__(
        self,
        stub: registry_pb2_grpc.RegistryAsyncStub,
        engine: registry_pb2.Engine,
        *,
        usage: Callable[[], registry_pb2.BlockUsage],
        on_opened: Callable[[str], None],
        on_lost: Callable[[str, float], None],
        on_gone: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[], Awaitable[bool]] | None = None,
        other_models: Callable[[], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        self._stub = stub
        self._engine = engine
        self._usage = usage
        self._on_opened = on_opened
        self._on_lost = on_lost
        self._clock = clock
        self._on_gone = on_gone
        self._answers = answers or self._http_answers
        self._other_models = other_models
        self._listens = answers or self._http_listens
        self._published: registry_pb2.BlockUsage | None = None
        self._leaving = False
        self.session_id: str | None = None
        self.last_acknowledged = 0.0
        """When the last acknowledged renewal was sent."""
        self.last_attempt = 0.0
        """When the last renewal was sent that may have been applied."""
        self.ttl_s = 0.0

    async def run(self) -> None:
        """Until cancelled, or told to leave. Deregisters on the way out."""
        try:
            while not self._leaving:
                await self._until_http_answers()
                if self._other_models is not None:
                    self._engine.other_models[:] = await self._other_models()
                await self._register()
                await self._keep()
        finally:
            await self._deregister()

    def leave(self) -> None:
        """The engine is about to end: deregisters within :data:`USAGE_PERIOD_S`, for good.
        What runs on it may still end. From any thread, and from a signal's handler."""
        self._leaving = True

    @property
    def is_fresh(self) -> bool:
        """Whether the registry has acknowledged the session within half its TTL."""
        age = self._clock() - self.last_acknowledged
        return self.session_id is not None and age <= self.ttl_s / 2

    async def _until_http_answers(self) -> None:
        """A router sends turns as soon as an engine is registered."""
        while not await self._answers():  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)

    async def _http_answers(self) -> bool:
        url = urlsplit(self._engine.http_address)
        return await _healthy(url.hostname or "", url.port or 80)

    async def _http_listens(self) -> bool:
        """Whether connections to the HTTP server are not refused. (A busy server may not
        answer for a while.)"""
        url = urlsplit(self._engine.http_address)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                _, writer = await asyncio.open_connection(url.hostname, url.port or 80)
            writer.close()
        except ConnectionRefusedError:
            return False
        except (OSError, TimeoutError):
            return True
        return True

    async def _register(self) -> None:
        request = registry_pb2.RegisterRequest(engine=self._engine)
        request.engine.usage.CopyFrom(self._usage())
        failed = False
        while True:
            sent = self._clock()
            try:
                answer = await self._stub.Register(request, timeout=CALL_TIMEOUT_S)
                break
            except grpc.aio.AioRpcError as error:
                if not failed:
                    log.warning("registration failed; trying on", error=error.details())
                failed = True
                await asyncio.sleep(RETRY_S)
        self._published = request.engine.usage
        self.ttl_s = answer.engine.session_ttl.ToTimedelta().total_seconds()
        self.last_acknowledged = self.last_attempt = sent
        self.session_id = answer.engine.session_id
        log.info(
            "registered",
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            session_id=self.session_id,
        )
        self._on_opened(self.session_id)

    async def _keep(self) -> None:
        """Renews every third of the TTL, and when the usage has changed. Returns when the
        session has ended."""
        period = self.ttl_s / 3
        due = self._clock() + period
        while True:
            await asyncio.sleep(min(USAGE_PERIOD_S, max(0.0, due - self._clock())))
            if self._leaving:
                await self._leave("the engine was told to end")
                return
            usage = self._usage()
            if self._clock() < due and usage == self._published:
                continue
            if self._clock() >= self.last_acknowledged + self.ttl_s:
                log.warning("session lost: no acknowledgement within its TTL")
                self._lose(self.last_attempt + self.ttl_s)
                return
            if self._clock() >= due and not await self._listens():
                await self._leave("the engine's HTTP server is gone")
                self._on_gone()
                return
            try:
                await self._renew(usage)
                due = self._clock() + period
            except grpc.aio.AioRpcError as error:
                if rpc.reason_of(error) == "SESSION_LOST":
                    log.warning("session lost: the registry does not know it")
                    self._lose(self._clock())
                    return
                log.warning("keep-alive failed; trying on", error=error.details())
                due = self._clock() + RETRY_S
                await asyncio.sleep(RETRY_S)

    async def _renew(self, usage: registry_pb2.BlockUsage) -> None:
        sent = self.last_attempt = self._clock()
        await self._stub.KeepAlive(
            registry_pb2.KeepAliveRequest(
                session_id=self.session_id or "",
                role=self._engine.role,
                engine_id=self._engine.engine_id,
                incarnation=self._engine.incarnation,
                usage=usage,
            ),
            timeout=min(CALL_TIMEOUT_S, self.ttl_s / 3),
        )
        self.last_acknowledged = sent
        self._published = usage

    async def _leave(self, why: str) -> None:
        """Nobody is to use the engine any more."""
        log.warning(f"session ended: {why}")
        left = self.session_id or ""
        await self._deregister()
        # Should that have failed, the store shows the session until its TTL is over.
        self._on_lost(left, self.last_attempt + self.ttl_s)

    def _lose(self, ended_by: float) -> None:
        lost, self.session_id = self.session_id, None
        self._on_lost(lost or "", ended_by)

    async def _deregister(self) -> None:
        if self.session_id is None:
            return
        request = registry_pb2.DeregisterRequest(session_id=self.session_id)
        self.session_id = None
        try:
            await self._stub.Deregister(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("deregistration failed; the session runs out", error=error.details())


async def _healthy(host: str, port: int) -> bool:
    """Whether GET /health answers 200. (A few lines instead of an HTTP client: nothing
    else in the connector speaks HTTP.)"""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(
                f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
            )
            status = await reader.readline()
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return b" 200 " in status
