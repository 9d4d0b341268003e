"""HTTP to engines: one request, with deadlines, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from kvlease.router.engines import Engines
from kvlease.router.split import Endpoint
from kvlease.v1 import registry_pb2

IDLE_CONNECTION_S = 4.0
"""Connections idle for longer are closed here: below the 5 s after which vLLM's server
closes them (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so that a request seldom meets a closing one."""

_READ_BUFFER = 2**18


class EngineFailed(Exception):
    """An engine did not answer. ``sent``: it may have got the request and worked on it.
    ``reason`` is one of a few words, for metrics."""

    def __init__(
        self, engine: registry_pb2.Engine, reason: str, detail: str, *, sent: bool
    ) -> None:
        super().__init__(f"{engine.engine_id} {detail}")
        self.engine = engine
        self.reason = reason
        self.detail = detail
        self.sent = sent


def open_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """A session for all engines. It sets no total deadline: callers do."""
    connector = aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=IDLE_CONNECTION_S,
        socket_factory=_socket,
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER,
        headers={"Accept-Encoding": "identity", "User-Agent": "kvlease-router"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _socket(address: tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, object]
            ) -> socket.socket:  # fmt: skip
    """Probes an idle peer, so that a machine that has vanished ends a stream in half a
    minute instead of never."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class Upstream:
    """Requests to engines."""

    def __init__(
        self, session: aiohttp.ClientSession, engines: Engines, connect_timeout_s: float
    ) -> None:
        self._session = session
        self._engines = engines
        self._connect_timeout_s = connect_timeout_s

    async def accepts(self, engine: registry_pb2.Engine) -> bool:
        """Whether the engine's server accepts a connection now."""
        url = urlsplit(engine.http_address)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, writer = await asyncio.open_connection(url.hostname, url.port or 80)
        except OSError:  # also TimeoutError
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    @asynccontextmanager
    async def post(
        self,
        engine: registry_pb2.Engine,
        endpoint: Endpoint,
        body: bytes,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; the response when its head has come. Leaving the block early
        closes the connection, upon which vLLM aborts the request.

        Raises :class:`EngineFailed`, also from inside the block where an ``aiohttp``
        error leaves it.
        """
        url = engine.http_address.rstrip("/") + endpoint.value
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.post(
                url,
                data=body,
                headers={"Content-Type": "application/json", **headers},
                allow_redirects=False,
            )
            yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineFailed(
                engine,
                "refused",
                f"does not accept connections ({type(error).__name__})",
                sent=False,
            ) from error
        except aiohttp.InvalidURL as error:
            raise EngineFailed(
                engine, "refused", "has an address that is no URL", sent=False
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            detail = f"closed its connection without an answer ({type(error).__name__})"
            raise EngineFailed(engine, "lost", detail, sent=True) from error
        finally:
            if response is not None:
                if response.content.at_eof():
                    response.release()
                else:
                    response.close()

    @asynccontextmanager
    async def deadline(
        self,
        engine: registry_pb2.Engine,
        limit_s: float | None,
        may_leave: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[None]:
        """Ends what is inside after ``limit_s``, or when the engine's session has ended
        and it has not come back for a while (an engine that hangs or a machine that is
        gone closes no connection). ``may_leave`` says whether there is anywhere to go.

        Raises :class:`EngineFailed`.
        """
        now = asyncio.get_running_loop().time
        limit = None if limit_s is None else now() + limit_s
        gone = False

        def moved(departed: bool) -> None:
            nonlocal gone
            if timer.expired() or (departed and not may_leave()):
                return
            gone = departed
            grace = now() + self._engines.return_grace_s
            timer.reschedule(min(limit or grace, grace) if departed else limit)

        try:
            async with asyncio.timeout_at(limit) as timer:
                with self._engines.departures(engine, moved):
                    yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            reason, detail = (
                ("departed", "is gone: its session has ended")
                if gone
                else ("timeout", f"did not answer within {limit_s:g} s")
            )
            raise EngineFailed(engine, reason, detail, sent=True) from error
