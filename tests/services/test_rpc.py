"""The gRPC plumbing that all servers share, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kvlease import rpc
from kvlease.config import ConfigError
from kvlease.v1 import registry_pb2, registry_pb2_grpc

SERVICE = "kvlease.v1.Registry"


class Refusing(registry_pb2_grpc.RegistryServicer):
    """Refuses everything, as rules do."""

    async def GetEngine(
        self, request: registry_pb2.GetEngineRequest, context: rpc.Context
    ) -> registry_pb2.Engine:
        return await rpc.answer(context, self._refuse())

    async def _refuse(self) -> registry_pb2.Engine:
        raise rpc.Refused(grpc.StatusCode.NOT_FOUND, "ENGINE_NOT_FOUND", "there is no such engine")


REFUSING = Refusing()  # type: ignore[abstract]  # what it lacks is UNIMPLEMENTED


@pytest.fixture
async def served() -> AsyncIterator[tuple[rpc.Server, str]]:
    server = rpc.Server([SERVICE])
    registry_pb2_grpc.add_RegistryServicer_to_server(REFUSING, server.grpc)
    port = await server.start("127.0.0.1:0")
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


async def health_of(channel: Any, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(answer.status)


async def test_a_server_is_healthy_only_once_it_says_so(served: tuple[rpc.Server, str]) -> None:
    server, address = served
    states = health_pb2.HealthCheckResponse
    async with rpc.aio_channel(address) as channel:
        assert await health_of(channel, SERVICE) == states.NOT_SERVING
        await server.set_ready(True)
        assert await health_of(channel, SERVICE) == states.SERVING
        assert await health_of(channel, "") == states.SERVING
        await server.set_ready(False)
        assert await health_of(channel, "") == states.NOT_SERVING


async def test_a_refusal_carries_code_sentence_and_reason(served: tuple[rpc.Server, str]) -> None:
    _, address = served
    async with rpc.aio_channel(address) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetEngine(registry_pb2.GetEngineRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "there is no such engine"
    assert rpc.reason_of(caught.value) == "ENGINE_NOT_FOUND"


async def test_a_thread_reads_the_same_reason(served: tuple[rpc.Server, str]) -> None:
    _, address = served

    def call() -> grpc.RpcError:
        with rpc.channel(address) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetEngine(registry_pb2.GetEngineRequest(), timeout=5)
            return caught.value

    assert rpc.reason_of(await asyncio.to_thread(call)) == "ENGINE_NOT_FOUND"


async def test_an_error_without_a_reason_has_none(served: tuple[rpc.Server, str]) -> None:
    _, address = served
    async with rpc.aio_channel(address) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Drain(registry_pb2.DrainRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert rpc.reason_of(caught.value) == ""
    assert rpc.reason_of(grpc.RpcError()) == ""


async def test_a_server_can_be_looked_into(served: tuple[rpc.Server, str]) -> None:
    _, address = served

    def services() -> list[str]:
        with rpc.channel(address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {SERVICE, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= set(
        await asyncio.to_thread(services)
    )
    async with rpc.aio_channel(address) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        answer = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=5)
    assert len(answer.server) >= 1


async def test_a_taken_port_is_told_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: the port is taken"):
            await rpc.Server([SERVICE]).start(address)


async def test_calls_go_on_through_the_replicas_that_are_left() -> None:
    servers = []
    for _ in range(2):
        server = rpc.Server([SERVICE])
        registry_pb2_grpc.add_RegistryServicer_to_server(REFUSING, server.grpc)
        servers.append((server, await server.start("127.0.0.1:0")))
    addresses = ",".join(f"127.0.0.1:{port}" for _, port in servers)
    async with rpc.aio_channel(addresses) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        await servers[0][0].stop(0)
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetEngine(
                    registry_pb2.GetEngineRequest(), timeout=5, wait_for_ready=True
                )
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await servers[1][0].stop(0)


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        ("registry:7401", "dns:///registry:7401"),
        ("127.0.0.1:1, 127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        ("localhost:1,no-such-host.invalid:2", "ipv4:127.0.0.1:1"),
    ],
)
def test_endpoints_become_a_target(endpoints: str, expected: str) -> None:
    assert rpc.target(endpoints) == expected


@pytest.mark.parametrize(
    ("endpoints", "sentence"),
    [
        ("", "an endpoint is empty"),
        ("7401", "not of the form host:port"),
        ("host:http", "not of the form host:port"),
        ("a.invalid:1,b.invalid:2", "none of the hosts"),
    ],
)
def test_an_unusable_endpoint_is_told_in_one_sentence(endpoints: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        rpc.target(endpoints)
