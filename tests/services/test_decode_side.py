"""A decode engine's leases from its own side: granted, renewed, given up and ended, against
a real lease service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from control_plane import ControlPlane, claim_request, complete_request, conversation, until
from decode_engine import DecodeEngine

from kvlease.v1 import lease_pb2

StartEngine = Callable[..., Awaitable[DecodeEngine]]


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    started = ControlPlane({"session_ttl": 3, "claim_grace": 2, "retention_ttl": 60})
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def start_engine(plane: ControlPlane) -> AsyncIterator[StartEngine]:
    started: list[DecodeEngine] = []

    async def start(total_blocks: int = 100, **settings: Any) -> DecodeEngine:
        given = plane.settings.model_copy(
            update={
                "registry_endpoint": plane.addresses["registry"][0],
                "lease_endpoint": plane.addresses["lease"][0],
                **settings,
            }
        )
        engine = DecodeEngine(given, total_blocks)
        await engine.start()
        started.append(engine)
        await until(lambda: engine.has_session)
        return engine

    yield start
    for engine in started:
        await engine.stop()


async def test_smoke(plane: ControlPlane, start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.turn("c1")
    await until(lambda: engine.usage.retained_leases == 1)
    async def gone() -> bool:
        engine.side.make_room("r", 400, 0)
        engine.step()
        return engine.pool.get_num_free_blocks() == 100
    await until(gone)
