"""A TCP proxy that fails as a network does: between a request and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    held: bytearray = field(default_factory=bytearray)


class TcpProxy:
    """Forwards connections to a port of 127.0.0.1."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self.hold_requests = False
        """Keep what clients send instead of forwarding it."""
        self.drop_responses = False
        """Throw away what the server answers."""
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens; after :meth:`stop`, on the same port again."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Breaks every connection."""
        for connection in self._connections:
            connection.client.transport.abort()
            connection.server.transport.abort()

    def cut_clients(self) -> list[_Connection]:
        """Breaks every connection on the client's side only. What clients had sent, and
        is held, can still be :meth:`release` d to the server."""
        for connection in self._connections:
            connection.client.transport.abort()
        return list(self._connections)

    def release(self, connections: list[_Connection]) -> None:
        """Forwards what was held of these connections, late."""
        for connection in connections:
            connection.server.write(bytes(connection.held))
            connection.held.clear()

    @property
    def held_bytes(self) -> int:
        return sum(len(connection.held) for connection in self._connections)

    async def stop(self) -> None:
        """Refuses new connections and breaks those there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # the event loop closes aborted sockets in its next round

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            back, server = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            return
        else:
            connection = _Connection(writer, server)
            self._connections.add(connection)
            try:
                await asyncio.gather(
                    self._requests(connection, reader), self._responses(connection, back)
                )
            finally:
                self._connections.discard(connection)
                server.transport.abort()
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _requests(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(65536):
                if self.hold_requests:
                    connection.held += data
                else:
                    connection.server.write(data)
        except OSError:
            pass
        if not connection.held:
            connection.server.transport.abort()

    async def _responses(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(65536):
                if not self.drop_responses and not connection.client.is_closing():
                    connection.client.write(data)
        except OSError:
            pass
        connection.client.transport.abort()
