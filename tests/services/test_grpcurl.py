"""Each server as an operator meets it: through the real grpcurl, with nothing but
reflection to go by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from control_plane import CALL_S, ControlPlane, claim_request, conversation, grant_request, until
from grpcurl import Grpcurl, grpcurl_binary

from kvlease.router.app import serve_router
from kvlease.v1 import lease_pb2, registry_pb2

SHARED = ["grpc.channelz.v1.Channelz", "grpc.health.v1.Health"]
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


@pytest.fixture(scope="session")
def grpcurl() -> Grpcurl:
    return Grpcurl(grpcurl_binary())


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """What grpcurl shows does not depend on the store: the embedded one."""
    return {}


@pytest.fixture
async def decode_address() -> AsyncIterator[str]:
    """Something accepts connections there, as an engine does: a router knocks at it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def stocked(plane: ControlPlane, decode_address: str) -> ControlPlane:
    """One engine of each role, and a lease that is being read."""
    holder = await plane.register(
        http_address=decode_address,
        kv_bytes_per_token=4096,
        parallelism=registry_pb2.Parallelism(tensor=1, pipeline=1, decode_context=1, data=1),
        engine_version="0.32.0",
    )
    await plane.register(
        engine_id="prefill-0",
        role=registry_pb2.ENGINE_ROLE_PREFILL,
        http_address="http://127.0.0.1:8100",
    )
    await plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S)
    await plane.lease.Claim(claim_request(), timeout=CALL_S)
    return plane


@pytest.fixture
async def router(stocked: ControlPlane) -> AsyncIterator[dict[str, str]]:
    settings = stocked.settings.model_copy(
        update={
            "router_listen": "127.0.0.1:0",
            "router_grpc_listen": "127.0.0.1:0",
            "registry_endpoint": stocked.addresses["registry"][0],
            "lease_endpoint": stocked.addresses["lease"][0],
        }
    )
    addresses: dict[str, str] = {}
    listening = asyncio.Event()

    def ready(name: str, address: str) -> None:
        addresses[name] = address
        if len(addresses) == 2:
            listening.set()

    stop = asyncio.Event()
    task = asyncio.create_task(serve_router(settings, stop, ready))
    await asyncio.wait_for(listening.wait(), CALL_S)
    yield addresses
    stop.set()
    await task


async def text(grpcurl: Grpcurl, *arguments: str) -> str:
    return await asyncio.to_thread(grpcurl.text, *arguments)


async def call(grpcurl: Grpcurl, method: str, **request: Any) -> dict[str, Any]:
    return await asyncio.to_thread(lambda: grpcurl.call(method, **request))


async def _is_serving(at: Grpcurl, service: str) -> bool:
    return await call(at, "grpc.health.v1.Health/Check", service=service) == {"status": "SERVING"}


async def test_the_registry_tells_what_it_offers(stocked: ControlPlane, grpcurl: Grpcurl) -> None:
    registry = grpcurl.at(stocked.addresses["registry"][0])
    assert (await text(registry, "list")).split() == [
        *SHARED,
        REFLECTION,
        "kvlease.v1.Registry",
    ]
    described = await text(registry, "describe", "kvlease.v1.Registry")
    assert "rpc ListEngines ( .kvlease.v1.ListEnginesRequest )" in described
    assert "stream .kvlease.v1.WatchEnginesResponse" in described
    method = await text(registry, "describe", "kvlease.v1.Registry.Drain")
    assert "rpc Drain ( .kvlease.v1.DrainRequest )" in method
    message = await text(registry, "describe", "kvlease.v1.Engine")
    assert "string compatibility_hash = 12;" in message


async def test_engines_are_listed_as_a_person_would_read_them(
    stocked: ControlPlane, decode_address: str, grpcurl: Grpcurl
) -> None:
    registry = grpcurl.at(stocked.addresses["registry"][0])
    answer = await call(registry, "kvlease.v1.Registry/ListEngines", role="ENGINE_ROLE_DECODE")
    (engine,) = answer["engines"]
    assert engine["engine_id"] == "decode-0"
    assert engine["state"] == "ENGINE_STATE_SERVING"
    assert engine["http_address"] == decode_address
    assert engine["session_ttl"] == "15s"
    assert engine["register_time"].endswith("Z")
    assert engine["parallelism"]["tensor"] == 1
    both = await call(registry, "kvlease.v1.Registry/ListEngines")
    assert len(both["engines"]) == 2


async def test_leases_are_listed_as_a_person_would_read_them(
    stocked: ControlPlane, grpcurl: Grpcurl
) -> None:
    lease_service = grpcurl.at(stocked.addresses["lease"][0])
    assert "kvlease.v1.LeaseService" in await text(lease_service, "list")
    answer = await call(lease_service, "kvlease.v1.LeaseService/ListLeases", tenant="acme")
    (lease,) = answer["leases"]
    assert lease["conversation"] == {
        "tenant": "acme",
        "model": "qwen",
        "conversation_id": "c1",
    }
    assert lease["state"] == "LEASE_STATE_HELD"
    assert lease["holder_engine_id"] == "decode-0"
    assert (lease["num_tokens"], lease["num_blocks"], lease["chunk_tokens"]) == (20, 5, 8)
    (ticket,) = lease["tickets"]
    assert ticket["reader_engine_id"] == "prefill-0"
    assert {"ticket_id", "open_time", "deadline", "num_tokens"} <= set(ticket)
    # Nothing in it that only a machine could read.
    assert "proof" not in lease
    assert "kv_transfer_params_json" not in lease


async def test_a_refused_call_says_what_to_mend(stocked: ControlPlane, grpcurl: Grpcurl) -> None:
    lease_service = grpcurl.at(stocked.addresses["lease"][0])
    said = await asyncio.to_thread(
        lambda: lease_service.error("kvlease.v1.LeaseService/EndConversation")
    )
    assert "Code: InvalidArgument" in said
    assert "conversation.tenant is empty: it is required" in said
    assert "INVALID_CONVERSATION" in said


async def test_a_conversation_is_ended_by_hand(stocked: ControlPlane, grpcurl: Grpcurl) -> None:
    lease_service = grpcurl.at(stocked.addresses["lease"][0])
    talk = {"tenant": "acme", "model": "qwen", "conversation_id": "c1"}
    ended = await call(lease_service, "kvlease.v1.LeaseService/EndConversation", conversation=talk)
    assert ended == {"lease_ended": True}
    lease = await call(lease_service, "kvlease.v1.LeaseService/GetLease", conversation=talk)
    assert lease["state"] == "LEASE_STATE_ENDING"
    assert lease["end_reason"] == "END_REASON_CONVERSATION_ENDED"


async def test_an_engine_is_drained_by_hand(stocked: ControlPlane, grpcurl: Grpcurl) -> None:
    registry = grpcurl.at(stocked.addresses["registry"][0])
    drained = await call(
        registry, "kvlease.v1.Registry/Drain", role="ENGINE_ROLE_DECODE", engine_id="decode-0"
    )
    assert drained["state"] == "ENGINE_STATE_DRAINING"


@pytest.mark.parametrize(
    ("server", "service"),
    [
        ("registry", "kvlease.v1.Registry"),
        ("lease", "kvlease.v1.LeaseService"),
        ("router", "kvlease.v1.Router"),
    ],
)
async def test_every_server_tells_its_health(
    stocked: ControlPlane,
    router: dict[str, str],
    grpcurl: Grpcurl,
    server: str,
    service: str,
) -> None:
    address = router["router_grpc"] if server == "router" else stocked.addresses[server][0]
    await until(lambda: _is_serving(grpcurl.at(address), service))


async def test_the_router_plans_without_running(
    stocked: ControlPlane, router: dict[str, str], grpcurl: Grpcurl
) -> None:
    at = grpcurl.at(router["router_grpc"])
    assert "kvlease.v1.Router" in await text(at, "list")
    assert "rpc Plan" in await text(at, "describe", "kvlease.v1.Router")
    request = {"model": "qwen", "tenant": "acme", "conversation_id": "c1"}
    await until(lambda: _is_serving(at, "kvlease.v1.Router"))
    plan = await call(at, "kvlease.v1.Router/Plan", **request)
    assert plan["prefill"]["engine_id"] == "prefill-0"
    assert plan["decode"]["engine_id"] == "decode-0"
    assert plan["lease"]["conversation"]["conversation_id"] == "c1"
    assert plan["reason"]
    asked = lease_pb2.GetConversationRequest(conversation=conversation())
    remembered = await stocked.lease.GetConversation(asked, timeout=CALL_S)
    assert remembered.turn == 1  # nothing was counted
