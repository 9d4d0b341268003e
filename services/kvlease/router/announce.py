"""Tells the registry that this router runs, so that ``ListReplicas`` shows it."""

from __future__ import annotations

import asyncio

import grpc
import structlog

from kvlease.v1 import registry_pb2, registry_pb2_grpc

_log = structlog.get_logger("kvlease.router")


async def announce(
    channel: grpc.aio.Channel, replica: registry_pb2.Replica, session_ttl_s: float
) -> None:
    """Announces every third of the session TTL until cancelled. A registry that is down
    is told later: nothing depends on it."""
    stub = registry_pb2_grpc.RegistryStub(channel)
    request = registry_pb2.AnnounceRouterRequest(replica=replica)
    failing = False
    while True:
        period_s = session_ttl_s / 3
        try:
            answer: registry_pb2.AnnounceRouterResponse = await stub.AnnounceRouter(
                request, timeout=max(1.0, period_s)
            )
        except grpc.aio.AioRpcError as error:
            period_s = min(period_s, 1.0)
            if not failing:
                failing = True
                _log.warning("registry not told of this router", code=error.code().name)
        else:
            failing = False
            session_ttl_s = answer.session_ttl.ToTimedelta().total_seconds() or session_ttl_s
        await asyncio.sleep(period_s)
