"""How clients say what becomes of what is kept for a conversation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import grpc
import pytest
from router_stack import Stack, running_pair, until
from sim_engine import Hang, Status

from kvlease import rpc
from kvlease.v1 import lease_pb2, lease_pb2_grpc

CHAT = "/v1/chat/completions"
LAST = {"x-kvlease-end": "true"}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_pair() as made:
        yield made


async def ask(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> int:
    body = {"model": "sim", "messages": [], "conversation_id": "c", **fields}
    async with stack.client.post(stack.url + CHAT, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def has_lease(stack: Stack) -> bool:
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    leases = (await stub.ListLeases(lease_pb2.ListLeasesRequest(), timeout=5)).leases
    return "c" in [lease.conversation.conversation_id for lease in leases]


async def without_lease(stack: Stack) -> bool:
    return not await has_lease(stack)


async def test_after_the_last_turn_the_conversations_lease_has_ended(stack: Stack) -> None:
    # given a conversation with a lease
    await ask(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)
    # when its last turn has been answered
    assert await ask(stack, LAST) == 200
    # then the lease has ended within a second
    await until(lambda: without_lease(stack), "the lease is still there", timeout_s=1.0)
    # and that turn's own grant, however late, is refused
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stack.grant(stack.engines["decode-0"], "c", turn=2)
    assert rpc.reason_of(refused.value) == "CONVERSATION_ENDED"


async def test_a_last_turn_that_fails_can_be_sent_again_and_hit(stack: Stack) -> None:
    await ask(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)
    stack.engines["decode-0"].fault = Status(500)

    assert await ask(stack, LAST) == 500

    assert await has_lease(stack)


async def test_a_client_that_leaves_in_the_middle_of_its_last_turn_ends_it(stack: Stack) -> None:
    await ask(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)
    decode = stack.engines["decode-0"]
    decode.fault = Hang()
    turn = asyncio.ensure_future(ask(stack, LAST))
    await until(lambda: len(decode.seen) == 2, "the decode engine was not asked")

    turn.cancel()

    await until(lambda: without_lease(stack), "the lease is still there", timeout_s=1.0)
    with contextlib.suppress(asyncio.CancelledError):
        await turn


async def test_a_last_turn_is_answered_without_the_lease_service(stack: Stack) -> None:
    await stack.lease.stop()

    assert await ask(stack, LAST) == 200


async def test_several_answers_claim_but_do_not_grant(stack: Stack) -> None:
    assert await ask(stack, n=2) == 200

    assert stack.engines["prefill-0"].seen[0].told["conversation_id"] == "c"
    assert stack.engines["decode-0"].seen[0].told["conversation_id"] == ""


async def test_a_conversation_can_be_kept_for_longer(stack: Stack) -> None:
    await ask(stack)
    lease = await stack.grant(stack.engines["decode-0"], "c", turn=1)
    url = f"{stack.url}/v1/conversations/c/renew"

    async with stack.client.post(url, headers={"x-kvlease-retain": "1200"}) as response:
        answer = await response.json()

    assert response.status == 200
    assert (answer["id"], answer["leases_renewed"]) == ("c", ["sim"])
    until_s = datetime.fromisoformat(answer["expire_time"]).timestamp()
    assert until_s - lease.grant_time.ToSeconds() == pytest.approx(1200, abs=5)


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({}, 400, "x-kvlease-retain"),
        ({"x-kvlease-retain": "0"}, 400, "x-kvlease-retain"),
        ({"x-kvlease-retain": "60"}, 404, "conversation_id"),
    ],
)
async def test_what_cannot_be_renewed_is_said(
    stack: Stack, headers: dict[str, str], status: int, param: str
) -> None:
    url = f"{stack.url}/v1/conversations/c/renew"

    async with stack.client.post(url, headers=headers) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["param"]) == (status, param)


async def test_without_the_lease_service_nothing_is_renewed(stack: Stack) -> None:
    await stack.lease.stop()
    url = f"{stack.url}/v1/conversations/c/renew"

    async with stack.client.post(url, headers={"x-kvlease-retain": "60"}) as response:
        answer = await response.json()

    assert (response.status, answer["error"]["code"]) == (503, "lease_service_unavailable")
