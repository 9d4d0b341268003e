"""A decode engine whose network to registry and lease service is cut: the services run on a
host of their own (a network namespace), and packets between are lost.

engines/test_fault_table.py does this to a real engine, among the other faults.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from control_plane import claim_request, conversation, until
from decode_engine import DecodeEngine
from network_namespace import NetworkNamespace, require

from kvlease import config, rpc
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvlease_connector.retention import Phase

TTL_S, GRACE_S = 3.0, 2.0
RECOVERY_S = 20.0
"""gRPC sees that a silent connection is dead after 13 s (kvlease/rpc.py)."""


@pytest.fixture
def host() -> Iterator[NetworkNamespace]:
    """Where the services run."""
    require()
    made = NetworkNamespace("cable")
    yield made
    made.remove()


@pytest.fixture
async def settings(host: NetworkNamespace) -> AsyncIterator[config.Settings]:
    """For engines; the services are started."""
    inside = host.link("cable").inside
    # Every port is free where nobody else is.
    own = {
        "registry_listen": f"{inside}:7401",
        "lease_listen": f"{inside}:7402",
        "session_ttl": TTL_S,
        "claim_grace": GRACE_S,
        "claim_margin": 0,
    }
    process = await asyncio.create_subprocess_exec(
        *(*host.command, sys.executable, "-m", "kvlease.cli", "serve", "all"),
        *(f"--set={name}={value}" for name, value in own.items()),
        env={k: v for k, v in os.environ.items() if not k.startswith(config.ENV_PREFIX)},
    )
    ways = {"registry_endpoint": own["registry_listen"], "lease_endpoint": own["lease_listen"]}
    try:
        yield config.load(overrides={**own, **ways}, env={})
    finally:
        process.terminate()
        await process.wait()


async def test_an_engine_that_is_cut_off_frees_by_its_own_clock_and_comes_back_by_itself(
    host: NetworkNamespace, settings: config.Settings
) -> None:
    # given an engine that holds a lease
    engine = DecodeEngine(settings)
    await engine.start()
    channel = rpc.aio_channel(settings.lease_endpoint)
    leases = lease_pb2_grpc.LeaseServiceStub(channel)
    try:
        await until(lambda: engine.has_session, 30.0)
        engine.turn("c1", num_tokens=40)
        await until(lambda: engine.phases.get("c1") is Phase.HELD)
        assert engine.free == 90
        # when its network is cut, it keeps the blocks for as long as they may be read
        host.link("cable").cut()
        cut_at = time.monotonic()
        await until(lambda: engine.free == 100, TTL_S + GRACE_S + 5.0)
        assert time.monotonic() - cut_at >= GRACE_S
        assert not engine.has_session
        # and frees them although nobody has told it to; so what ends now is granted nothing
        engine.turn("c1", num_tokens=44, number=2)
        assert engine.free == 100
        # then, when the network is back, it has a session again
        host.link("cable").mend()
        await until(lambda: engine.has_session, RECOVERY_S)
        # the lease from before is gone, and new ones are granted and hit
        request = claim_request(conversation("c1"), range(44))
        answer = await leases.Claim(request, timeout=RECOVERY_S, wait_for_ready=True)
        assert answer.outcome == common_pb2.OUTCOME_MISS_ENGINE
        engine.turn("c1", num_tokens=48, number=3)
        await until(lambda: engine.phases.get("c1") is Phase.HELD)
        request = claim_request(conversation("c1"), range(48))
        answer = await leases.Claim(request, timeout=5)
        assert answer.outcome == common_pb2.OUTCOME_HIT
        listed = await leases.ListLeases(lease_pb2.ListLeasesRequest(), timeout=5)
        assert [lease.turn for lease in listed.leases] == [3]
    finally:
        await engine.stop()
        await channel.close(None)
