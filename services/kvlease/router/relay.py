"""Bytes from an engine to a client, as they come and unparsed.

The client's response begins with the engine's first byte, not with its head: until then
another engine can still take over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web

from kvlease.router.errors import HttpError

_EVENT_STREAM = "text/event-stream"

_REFUSAL_BYTES = 2**16
"""Of an engine's client error so much is read here too, to say what was wrong."""


class ClientGone(Exception):
    """The client has closed its connection."""


class EngineGone(Exception):
    """The engine's answer has ended too early. The message says how."""


class Relay:
    """One client's answer.

    ``headers`` are asked for when the answer begins, with its status. ``first_content`` is
    called when the first chunk that carries content has been written: an answer's first
    bytes, except for comments of an event stream, which vLLM sends to keep connections
    alive. (A chat stream begins with an event that carries only the role. vLLM sends it
    together with the first token, not before: ``chat_completion_stream_generator``.)
    """

    def __init__(
        self,
        request: web.Request,
        headers: Callable[[int], Mapping[str, str]],
        first_content: Callable[[], None],
    ) -> None:
        self._request = request
        self._headers = headers
        self._first_content = first_content
        self._stream = False
        self._clean_end = True
        self._refused = False
        self.refusal = b""
        """The body of an engine's answer with a client error, as far as it has come."""
        self.response: web.StreamResponse | None = None
        self.content_began = False

    async def begin(self, upstream: aiohttp.ClientResponse) -> None:
        """Waits for the engine's first content, and passes it on with what came before.

        Raises :class:`EngineGone` while another engine can still take over, if the answer
        ends before (also ``aiohttp``'s errors, of the engine's connection), and
        :class:`ClientGone`.
        """
        stream = upstream.content_type == _EVENT_STREAM
        if self.response is not None and (upstream.status != 200 or not stream):
            # The client has the head of a stream already.
            raise EngineGone(f"answered with status {upstream.status}, not with a stream")
        self._stream = stream
        self._refused = 400 <= upstream.status < 500
        while not self.content_began:
            chunk = await upstream.content.readany()
            if not chunk:
                if self._stream and upstream.status == 200:
                    raise EngineGone("ended its stream before the first event")
                await self._prepare(upstream)
                return
            self.content_began = not (self._stream and _is_comment(chunk))
            await self._prepare(upstream)
            await self._write(chunk)
            if self.content_began and upstream.status == 200:
                self._first_content()

    async def rest(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Passes on everything after :meth:`begin`, and ends the answer.

        Raises :class:`EngineGone` if the engine's connection breaks, :class:`ClientGone`.
        """
        read = upstream.content.readany
        assert self.response is not None
        write = self.response.write
        chunk = b""
        while True:
            try:
                following = await read()
            except (aiohttp.ClientError, OSError) as error:
                self._clean_end = chunk.endswith(b"\n\n") if chunk else self._clean_end
                raise EngineGone("closed its connection in the middle of the answer") from error
            if not following:
                break
            chunk = following
            if self._refused:
                self._note(chunk)
            try:
                await write(chunk)
            except ConnectionError as error:
                raise ClientGone from error
        await self._end()
        return self.response

    async def fail(self, error: HttpError) -> None:
        """Ends an answer that has begun, honestly: with an error event where the client
        can read one, else by breaking the connection off."""
        assert self.response is not None
        if self._stream and self._clean_end:
            await self._write(error.event())
            await self._end()
        elif self._request.transport is not None:
            self._request.transport.abort()

    async def _prepare(self, upstream: aiohttp.ClientResponse) -> None:
        if self.response is not None:
            return
        status = upstream.status
        response = web.StreamResponse(status=status, headers=self._headers(status))
        response.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
        if self._stream:
            response.headers["Cache-Control"] = "no-cache"
            response.headers["X-Accel-Buffering"] = "no"
        if "Retry-After" in upstream.headers:
            response.headers["Retry-After"] = upstream.headers["Retry-After"]
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        self.response = response
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def _write(self, chunk: bytes) -> None:
        assert self.response is not None
        self._clean_end = chunk.endswith(b"\n\n")
        if self._refused:
            self._note(chunk)
        try:
            await self.response.write(chunk)
        except ConnectionError as error:
            raise ClientGone from error

    def _note(self, chunk: bytes) -> None:
        self.refusal += chunk[: _REFUSAL_BYTES - len(self.refusal)]

    async def _end(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error


def _is_comment(chunk: bytes) -> bool:
    """Whether an event stream's chunk holds nothing but comments (HTML standard, 9.2.6:
    lines that begin with a colon)."""
    return all(not line or line.startswith(b":") for line in chunk.splitlines())
