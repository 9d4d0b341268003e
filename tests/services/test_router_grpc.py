"""The router's gRPC face."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_stack import Stack, running, running_pair, until

from kvlease import rpc
from kvlease.v1 import (
    common_pb2,
    registry_pb2,
    registry_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_pair() as made:
        yield made


async def plan(stack: Stack, **fields: Any) -> router_pb2.PlanResponse:
    stub = router_pb2_grpc.RouterStub(stack.router_channel)
    return await stub.Plan(router_pb2.PlanRequest(**{"model": "sim", **fields}), timeout=5)


async def refused(stack: Stack, **fields: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await plan(stack, **fields)
    return error.value.code(), rpc.reason_of(error.value), error.value.details() or ""


async def turn(stack: Stack) -> None:
    body = {"model": "sim", "messages": [], "conversation_id": "c"}
    async with stack.client.post(f"{stack.url}/v1/chat/completions", json=body) as response:
        await response.read()


async def test_a_plan_names_engines_and_reasons_and_runs_nothing(stack: Stack) -> None:
    answer = await plan(stack, conversation_id="c")

    assert (answer.prefill.engine_id, answer.decode.engine_id) == ("prefill-0", "decode-0")
    assert answer.foreseen_outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    assert not answer.HasField("lease")
    assert "the conversation has no lease" in answer.reason
    await turn(stack)
    assert stack.engines["prefill-0"].seen[0].told["turn"] == 1  # the plan has counted none


async def test_a_plan_without_a_conversation_foresees_that_reuse_is_off(stack: Stack) -> None:
    answer = await plan(stack)

    assert answer.foreseen_outcome == common_pb2.OUTCOME_OFF


async def test_a_plan_shows_the_lease_and_leaves_the_outcome_to_the_prompt(stack: Stack) -> None:
    await stack.add("decode", "decode-1")
    await turn(stack)
    await stack.grant(stack.engines["decode-1"], "c", turn=1)

    answer = await plan(stack, conversation_id="c")

    assert answer.decode.engine_id == "decode-1"
    assert answer.foreseen_outcome == common_pb2.OUTCOME_UNSPECIFIED
    assert answer.lease.num_tokens == 256
    assert not answer.lease.HasField("proof")
    assert not answer.lease.kv_transfer_params_json
    assert "decode-1 holds the conversation's blocks" in answer.reason


async def test_a_plan_foresees_that_a_draining_holder_is_not_read(stack: Stack) -> None:
    await stack.add("decode", "decode-1")
    await turn(stack)
    await stack.grant(stack.engines["decode-0"], "c", turn=1)
    registry = registry_pb2_grpc.RegistryStub(stack.registry_channel)
    request = registry_pb2.DrainRequest(role=registry_pb2.ENGINE_ROLE_DECODE, engine_id="decode-0")
    await registry.Drain(request, timeout=5)

    async def foreseen() -> bool:
        answer = await plan(stack, conversation_id="c")
        return answer.foreseen_outcome == common_pb2.OUTCOME_MISS_ENGINE

    await until(foreseen, "the plan does not know it")
    assert (await plan(stack, conversation_id="c")).decode.engine_id == "decode-1"


async def test_a_plan_foresees_that_without_the_lease_service_nothing_is_reused(
    stack: Stack,
) -> None:
    await stack.lease.stop()

    answer = await plan(stack, conversation_id="c")

    assert answer.foreseen_outcome == common_pb2.OUTCOME_MISS_UNAVAILABLE
    assert answer.decode.engine_id == "decode-0"


async def test_a_plan_that_cannot_be_made_is_refused_with_a_reason(stack: Stack) -> None:
    code, reason, message = await refused(stack, model="other")
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_ENGINE")
    assert "start one for 'other'" in message

    assert (await refused(stack, model=""))[1] == "INVALID_CONVERSATION"
    code, reason, _ = await refused(stack, conversation_id="x" * 513)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_CONVERSATION")


async def test_a_plan_needs_the_registry_once() -> None:
    async with running() as stack:
        await stack.registry.stop()
        await stack.router.stop()
        await stack.start("router")

        code, reason, _ = await refused(stack)

        assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "REGISTRY_UNAVAILABLE")


async def test_routers_announce_themselves_and_disappear_after_their_session(
    stack: Stack,
) -> None:
    stub = router_pb2_grpc.RouterStub(stack.router_channel)

    async def replicas() -> list[registry_pb2.Replica]:
        answer = await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=5)
        return list(answer.replicas)

    async def one() -> bool:
        return len(await replicas()) == 1

    await until(one, "the router did not announce itself")
    (replica,) = await replicas()
    assert replica.http_address == stack.router.addresses["router_http"]
    assert replica.grpc_address == stack.router.addresses["router_grpc"]
    assert replica.start_time.seconds > 0
    registry = registry_pb2_grpc.RegistryStub(stack.registry_channel)
    await stack.router.stop()

    async def none() -> bool:
        answer = await registry.ListRouters(registry_pb2.ListRoutersRequest(), timeout=5)
        return not answer.replicas

    await until(none, "the record outlives its session", timeout_s=6)


async def test_health_is_as_ready_is() -> None:
    async with running(session_ttl=60) as stack:
        health = health_pb2_grpc.HealthStub(stack.router_channel)

        async def status() -> Any:
            request = health_pb2.HealthCheckRequest(service="kvlease.v1.Router")
            return (await health.Check(request, timeout=5)).status

        serving = health_pb2.HealthCheckResponse.ServingStatus
        assert await status() == serving.NOT_SERVING
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")

        async def is_serving() -> bool:
            return await status() == serving.SERVING

        await until(is_serving, "health does not follow")

        await stack.engines["decode-0"].kill()
        async with stack.client.get(f"{stack.url}/ready") as response:
            assert response.status == 503

        async def is_not_serving() -> bool:
            return not await is_serving()

        await until(is_not_serving, "health does not follow")
