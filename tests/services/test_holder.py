"""The holder's last word: whatever the store shows, a reader asks the engine that owns the
blocks. Over real gRPC; the decode engine is one end of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from control_plane import BLOCK, CHUNK, SEED, ControlPlane, conversation, grant_request
from opentelemetry import trace

from kvlease import outcomes, rpc
from kvlease.v1 import holder_pb2, holder_pb2_grpc, lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.claims import Answer, Ask, Claims
from kvlease_connector.holder import HolderServer

PARAMS = {
    "remote_block_ids": [list(range(1, 11))],
    "remote_engine_id": "decode-0-i",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
TIMEOUT_S = 0.5


class Holder:
    """A decode engine with one lease, which answers as it is told."""

    def __init__(self) -> None:
        self.keep_s = 30.0
        self.asked: list[tuple[str, str]] = []
        self.server = HolderServer(self.confirm)

    def confirm(self, lease_id: str, ticket_id: str) -> float:
        self.asked.append((lease_id, ticket_id))
        return self.keep_s


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    started = ControlPlane({})
    await started.start()
    yield started
    await started.stop()


@pytest.fixture
async def holder(plane: ControlPlane) -> AsyncIterator[Holder]:
    """It holds 40 tokens of the conversation."""
    holder = Holder()
    address = await holder.server.start("127.0.0.1")
    await _grant(plane, address)
    yield holder
    await holder.server.stop()


async def _grant(plane: ControlPlane, address: str) -> None:
    engine = await plane.register(holder_address=address)
    request = grant_request(
        engine, tokens=range(40), turn=0, kv_transfer_params_json=json.dumps(PARAMS)
    )
    await plane.lease.Grant(request, timeout=5)


async def claim(plane: ControlPlane) -> Answer:
    """What a prefill engine gets for a prompt that goes on from those tokens."""
    reader = registry_pb2.Engine(engine_id="prefill-0", incarnation="p", compatibility_hash="hash")
    async with rpc.aio_channel(plane.addresses["lease"][0]) as channel:
        claims = Claims(
            lease_pb2_grpc.LeaseServiceStub(channel),
            reader,
            trace.NoOpTracer(),
            claim_timeout_s=2.0,
            connect_timeout_s=TIMEOUT_S,
        )
        return await claims.claim(
            Ask(
                conversation=conversation(),
                token_ids=range(60),
                seed=SEED,
                chunk_tokens=CHUNK,
                block_size=BLOCK,
                min_tokens=1,
                num_local_tokens=0,
                traceparent="",
            )
        )


async def open_tickets(plane: ControlPlane) -> int:
    request = lease_pb2.GetLeaseRequest(conversation=conversation())
    return len((await plane.lease.GetLease(request, timeout=5)).tickets)


async def test_a_reader_asks_the_holder_with_its_ticket(
    plane: ControlPlane, holder: Holder
) -> None:
    answer = await claim(plane)
    assert outcomes.word(answer.outcome) == "hit"
    assert holder.asked == [(answer.lease_id, answer.ticket_id)]


async def test_what_the_holder_promises_limits_the_read(
    plane: ControlPlane, holder: Holder
) -> None:
    holder.keep_s = 3.0
    before = time.monotonic()
    answer = await claim(plane)
    assert outcomes.word(answer.outcome) == "hit"
    assert before < answer.read_by - 3.0 < before + 0.2


async def test_the_ticket_limits_the_read_too(plane: ControlPlane, holder: Holder) -> None:
    holder.keep_s = 3600.0
    before = time.monotonic()
    answer = await claim(plane)
    assert answer.read_by <= before + plane.settings.claim_grace + 0.1


async def test_nothing_is_read_that_the_holder_does_not_keep_any_more(
    plane: ControlPlane, holder: Holder
) -> None:
    # given a lease that the store still shows, and whose blocks are in other use
    holder.keep_s = 0.0
    for _ in range(3):
        answer = await claim(plane)
        assert outcomes.word(answer.outcome) == "miss_engine"
        assert "does not keep" in answer.detail
        assert not answer.params
    assert await open_tickets(plane) == 0


async def test_a_holder_that_cannot_be_asked_is_not_read_from(plane: ControlPlane) -> None:
    await _grant(plane, "")
    answer = await claim(plane)
    assert outcomes.word(answer.outcome) == "miss_engine"
    assert "cannot be asked" in answer.detail


async def test_a_holder_that_hangs_is_not_waited_for(plane: ControlPlane) -> None:
    # given a process that is stopped: the kernel accepts connections for it
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        await _grant(plane, f"127.0.0.1:{stopped.getsockname()[1]}")
        began = time.monotonic()
        answer = await claim(plane)
    assert outcomes.word(answer.outcome) == "miss_engine"
    assert "does not answer" in answer.detail
    assert time.monotonic() - began < TIMEOUT_S + 0.4
    assert await open_tickets(plane) == 0


async def test_a_holder_that_was_killed_is_noticed_at_once(plane: ControlPlane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    await _grant(plane, address)
    began = time.monotonic()
    answer = await claim(plane)
    assert outcomes.word(answer.outcome) == "miss_engine"
    assert time.monotonic() - began < TIMEOUT_S - 0.1


async def test_a_new_start_of_the_holder_is_asked_at_its_own_address(
    plane: ControlPlane, holder: Holder
) -> None:
    assert outcomes.word((await claim(plane)).outcome) == "hit"
    again = Holder()
    try:
        await _grant(plane, await again.server.start("127.0.0.1"))
        assert outcomes.word((await claim(plane)).outcome) == "hit"
    finally:
        await again.server.stop()
    assert (len(holder.asked), len(again.asked)) == (1, 1)


async def test_a_question_without_a_ticket_is_refused() -> None:
    holder = Holder()
    address = await holder.server.start("127.0.0.1")
    try:
        async with rpc.aio_channel(address) as channel:
            stub = holder_pb2_grpc.HolderStub(channel)
            for request in (
                holder_pb2.ConfirmRequest(lease_id="l"),
                holder_pb2.ConfirmRequest(ticket_id="t"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Confirm(request, timeout=2)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert rpc.reason_of(caught.value) == "INVALID_TICKET"
    finally:
        await holder.server.stop()
    assert not holder.asked
