"""Registry and lease service replicas in this process, on real sockets and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease import prefix, rpc, tls
from kvlease.config import Settings
from kvlease.lease.app import serve_lease
from kvlease.registry.app import serve_registry
from kvlease.store import Store, open_store
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.registry_pb2 import Engine

START_DEADLINE_S = 15.0
CALL_S = 10.0
SEED = prefix.seed_for("acme", "qwen", "", "", "")
BLOCK = 4
CHUNK = 8


class ControlPlane:
    """``await start()`` it; stubs of replicas are in :attr:`registries` and
    :attr:`leases`."""

    def __init__(self, overrides: dict[str, Any], *, registries: int = 1, leases: int = 1) -> None:
        self.settings = Settings(
            registry_listen="127.0.0.1:0", lease_listen="127.0.0.1:0", **overrides
        )
        self._counts = (registries, leases)
        self._stack = contextlib.AsyncExitStack()
        self._shared: Store | None = None
        self.registries: list[Any] = []
        self.leases: list[Any] = []
        self.addresses: dict[str, list[str]] = {"registry": [], "lease": []}
        self.channels: dict[str, list[grpc.aio.Channel]] = {"registry": [], "lease": []}
        self.stops: dict[str, list[Callable[[], Any]]] = {"registry": [], "lease": []}

    @property
    def registry(self) -> Any:
        return self.registries[0]

    @property
    def lease(self) -> Any:
        return self.leases[0]

    async def start(self) -> None:
        for _ in range(self._counts[0]):
            channel = await self.add("registry")
            self.registries.append(registry_pb2_grpc.RegistryStub(channel))
        for _ in range(self._counts[1]):
            channel = await self.add("lease")
            self.leases.append(lease_pb2_grpc.LeaseServiceStub(channel))

    def store(self) -> Store:
        """A replica's own with etcd; with the embedded store, the one they share."""
        if self.settings.etcd_endpoints:
            return open_store(self.settings)
        if self._shared is None:
            self._shared = open_store(self.settings)
        return self._shared

    async def add(self, kind: str) -> grpc.aio.Channel:
        """Starts one more replica."""
        store = self.store()
        stop = asyncio.Event()
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serve = {"registry": serve_registry, "lease": serve_lease}[kind]
        task = asyncio.create_task(
            serve(self.settings, stop, store, lambda _, address: told.set_result(address))
        )

        async def end() -> None:
            stop.set()
            await task
            if store is not self._shared:
                await store.close()

        self._stack.push_async_callback(end)
        self.stops[kind].append(end)
        futures: set[asyncio.Future[Any]] = {task, told}
        await asyncio.wait(futures, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        address = await asyncio.wait_for(told, 0.1)
        channel = await self._stack.enter_async_context(
            rpc.aio_channel(address, tls.of(self.settings))
        )
        self.addresses[kind].append(address)
        self.channels[kind].append(channel)
        return channel

    async def stop(self) -> None:
        await self._stack.aclose()
        if self._shared is not None:
            await self._shared.close()

    async def register(self, engine: Engine | None = None, **fields: Any) -> Engine:
        """Registers a decode engine, unless told otherwise."""
        request = registry_pb2.RegisterRequest(engine=engine or new_engine(**fields))
        answer = await self.registry.Register(request, timeout=CALL_S)
        stored: Engine = answer.engine
        return stored

    async def health(self, kind: str) -> bool:
        stub = health_pb2_grpc.HealthStub(self.channels[kind][0])
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def new_engine(**fields: Any) -> Engine:
    values: dict[str, Any] = {
        "engine_id": "decode-0",
        "role": registry_pb2.ENGINE_ROLE_DECODE,
        "incarnation": uuid.uuid4().hex,
        "model": "qwen",
        "http_address": "http://127.0.0.1:8200",
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5600,
        "block_size": BLOCK,
        "kv_bytes_per_token": 4096,
        "compatibility_hash": "hash",
    }
    return Engine(**{**values, **fields})


def conversation(name: str = "c1", tenant: str = "acme") -> Conversation:
    return Conversation(tenant=tenant, model="qwen", conversation_id=name)


def grant_request(
    holder: Engine,
    talk: Conversation | None = None,
    tokens: Sequence[int] = range(20),
    chunk: int = CHUNK,
    **fields: Any,
) -> lease_pb2.GrantRequest:
    proof = prefix.prove(tokens, seed=SEED, chunk_tokens=chunk)
    values: dict[str, Any] = {
        "conversation": talk or conversation(),
        "lease_id": uuid.uuid4().hex,
        "engine_id": holder.engine_id,
        "incarnation": holder.incarnation,
        "session_id": holder.session_id,
        "num_tokens": len(tokens),
        "num_blocks": -(-len(tokens) // BLOCK),
        "block_size": BLOCK,
        "compatibility_hash": "hash",
        "proof": lease_pb2.PrefixProof(
            chunk_tokens=chunk, chunk_digests=proof.chunk_digests, tail_digest=proof.tail_digest
        ),
        "kv_transfer_params_json": '{"remote_block_ids": [[1, 2, 3]]}',
    }
    return lease_pb2.GrantRequest(**{**values, **fields})


def claim_request(
    talk: Conversation | None = None,
    tokens: Sequence[int] = range(25),
    chunk: int = CHUNK,
    **fields: Any,
) -> lease_pb2.ClaimRequest:
    proof = prefix.prove(tokens, seed=SEED, chunk_tokens=chunk)
    values: dict[str, Any] = {
        "conversation": talk or conversation(),
        "ticket_id": uuid.uuid4().hex,
        "reader_engine_id": "prefill-0",
        "reader_incarnation": "p1",
        "compatibility_hash": "hash",
        "proof": lease_pb2.PrefixProof(chunk_tokens=chunk, chunk_digests=proof.chunk_digests),
        "num_prompt_tokens": len(tokens),
        "min_tokens": 1,
    }
    return lease_pb2.ClaimRequest(**{**values, **fields})


def complete_request(answer: lease_pb2.ClaimResponse, talk: Conversation | None = None) -> Any:
    return lease_pb2.CompleteRequest(
        conversation=talk or conversation(),
        lease_id=answer.lease_id,
        ticket_id=answer.ticket.ticket_id,
        result=lease_pb2.READ_RESULT_DONE,
    )


@contextlib.asynccontextmanager
async def watching(call: Any) -> AsyncIterator[Callable[..., Any]]:
    """``await take(n)`` gives the next n events of a server's stream, in order."""

    async def take(count: int, timeout_s: float = CALL_S) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            return [await call.read() for _ in range(count)]

    try:
        yield take
    finally:
        call.cancel()


async def until(condition: Callable[[], Any], deadline_s: float = 10.0) -> None:
    """Polls until ``condition`` (plain or async) holds."""
    ends = time.monotonic() + deadline_s
    while True:
        holds = condition()
        if asyncio.iscoroutine(holds):
            holds = await holds
        if holds:
            return
        assert time.monotonic() < ends, "it did not happen in time"
        await asyncio.sleep(0.02)
