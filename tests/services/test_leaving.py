"""An engine that is told to end leaves the registry at once, while what runs on it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane, until
from decode_engine import DecodeEngine

from kvlease.v1 import registry_pb2
from kvlease_connector.retention import Phase


@pytest.fixture
def told() -> Iterator[list[int]]:
    """Signals that reached the handler which vLLM would have set before."""
    numbers: list[int] = []

    def vllms(number: int, frame: Any) -> None:
        numbers.append(number)

    before = {each: signal.signal(each, vllms) for each in (signal.SIGTERM, signal.SIGINT)}
    yield numbers
    left = [signal.getsignal(each) for each in before]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == [vllms, vllms], "the engine has put the handlers back"


async def listed(plane: ControlPlane) -> list[str]:
    answer = await plane.registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5)
    return [engine.engine_id for engine in answer.engines]


async def test_an_engine_that_is_told_to_end_leaves_before_it_has_ended(told: list[int]) -> None:
    plane = ControlPlane({"session_ttl": 60, "claim_grace": 30, "retention_ttl": 60})
    await plane.start()
    addresses = {f"{name}_endpoint": value[0] for name, value in plane.addresses.items()}
    engine = DecodeEngine(plane.settings.model_copy(update=addresses))
    await engine.start()
    try:
        # given an engine in its session, that holds a lease
        engine.control.leave_when_told_to_end()
        await until(lambda: engine.has_session)
        engine.turn("c1", num_tokens=40)
        await until(lambda: engine.phases.get("c1") is Phase.HELD)
        assert await listed(plane) == ["decode-0"]
        # when its process is told to end
        os.kill(os.getpid(), signal.SIGTERM)
        # then vLLM hears of it, the registry does long before the session's TTL is over, and
        # the engine does not come back, though its HTTP server still answers
        await until(lambda: not engine.has_session)
        await asyncio.sleep(1.0)
        assert told == [signal.SIGTERM]
        assert await listed(plane) == []
        # and what ends on it from now on is granted nothing
        engine.turn("c2", num_tokens=40)
        assert "c2" not in engine.phases
    finally:
        engine.control.stop()  # in the main thread, as vLLM does
        await engine._runner.cleanup()
        await plane.stop()
