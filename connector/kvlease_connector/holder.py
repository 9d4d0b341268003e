"""The holder's last word: a reader asks the decode engine itself whether it may read.

The lease service tells what the store shows. A store may show a lease that its holder has
given up: it keeps a session for longer than its TTL when it elects a leader or restarts,
and replicas' clocks differ. So the engine that owns the blocks is asked before each read.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from kvlease import rpc, times
from kvlease.tls import Tls
from kvlease.v1 import holder_pb2, holder_pb2_grpc, registry_pb2

SERVICE = "kvlease.v1.Holder"

Confirm = Callable[[str, str], float]
"""From a lease and a ticket to the seconds for which the blocks are kept; 0: they are not."""


class HolderServer(holder_pb2_grpc.HolderServicer):
    """A decode engine's side. It lives in the background loop."""

    def __init__(self, confirm: Confirm, tls: Tls | None = None) -> None:
        self._confirm = confirm
        self._server = rpc.Server([SERVICE], tls)
        holder_pb2_grpc.add_HolderServicer_to_server(self, self._server.grpc)

    async def start(self, host: str) -> str:
        """Listens on a free port. Returns host:port for readers. Raises
        :class:`~kvlease.config.ConfigError`."""
        port = await self._server.start(f"{host}:0", "VLLM_NIXL_SIDE_CHANNEL_HOST")
        await self._server.set_ready(True)
        return f"{host}:{port}"

    async def stop(self) -> None:
        """No reader is let in any more."""
        await self._server.stop(0)

    async def Confirm(
        self, request: holder_pb2.ConfirmRequest, context: rpc.Context
    ) -> holder_pb2.ConfirmResponse:
        if not request.lease_id or not request.ticket_id:
            await rpc.abort(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_TICKET",
                "lease_id and ticket_id are required: take them from ClaimResponse",
            )
        keep_s = self._confirm(request.lease_id, request.ticket_id)
        return holder_pb2.ConfirmResponse(keep=times.duration(keep_s))


class Holders:
    """A reader's side: one connection to each decode engine that was asked."""

    def __init__(self, timeout_s: float, tls: Tls | None = None) -> None:
        self._tls = tls
        self._timeout_s = timeout_s
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}

    async def confirm(self, holder: registry_pb2.Engine, lease_id: str, ticket_id: str) -> float:
        """The seconds, from before this call, for which the holder keeps the blocks; 0: it
        does not. Raises AioRpcError if it does not answer in time."""
        stub = holder_pb2_grpc.HolderStub(await self._channel(holder))
        request = holder_pb2.ConfirmRequest(lease_id=lease_id, ticket_id=ticket_id)
        answer = await stub.Confirm(request, timeout=self._timeout_s)
        return times.seconds(answer.keep)

    async def _channel(self, holder: registry_pb2.Engine) -> grpc.aio.Channel:
        """To the engine's present start."""
        name, address = holder.engine_id, holder.holder_address
        known = self._channels.get(name)
        if known is not None and known[0] == address:
            return known[1]
        channel = rpc.aio_channel(address, self._tls)
        self._channels[name] = (address, channel)
        if known is not None:
            await known[1].close(None)
        return channel
