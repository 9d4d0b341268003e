"""A control plane in this process for the router's tests: real registry, lease service
and router over gRPC and HTTP, engines simulated."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
from sim_engine import COMPATIBILITY, Role, SimEngine

from kvlease import rpc, tls
from kvlease.config import Settings
from kvlease.lease.app import serve_lease
from kvlease.registry.app import serve_registry
from kvlease.router.app import serve_router
from kvlease.store.base import Store
from kvlease.store.memory import MemoryStore
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc

ANY = "127.0.0.1:0"


class Part:
    """One service, running in a task of its own."""

    def __init__(self, serve: Callable[..., Awaitable[None]], settings: Settings, *more: Any):
        self._stop = asyncio.Event()
        self.addresses: dict[str, str] = {}
        self._told = asyncio.Event()
        self._task = asyncio.ensure_future(serve(settings, self._stop, *more, self._ready))

    def _ready(self, name: str, address: str) -> None:
        self.addresses[name] = address
        self._told.set()

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(10):
            while not set(names) <= set(self.addresses):
                self._told.clear()
                told = asyncio.ensure_future(self._told.wait())
                await asyncio.wait({told, self._task}, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if self._task.done():
                    await self._task
                    raise AssertionError("the service has ended")

    async def stop(self) -> None:
        """Stops it in order. Stopping one that has ended is not an error."""
        self._stop.set()
        async with asyncio.timeout(15):
            await self._task


@dataclass
class Stack:
    """Addresses of all parts, and the engines by id."""

    settings: Settings
    registry: Part
    lease: Part
    router: Part
    registry_channel: grpc.aio.Channel
    lease_channel: grpc.aio.Channel
    router_channel: grpc.aio.Channel
    client: aiohttp.ClientSession
    store: Store
    engines: dict[str, SimEngine] = field(default_factory=dict)
    started: list[Part] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.router.addresses['router_http']}"

    async def add(
        self, role: Role, engine_id: str, model: str = "sim", other_models: Sequence[str] = ()
    ) -> SimEngine:
        """Starts and registers an engine; the router knows it when this returns."""
        engine = self.engines[engine_id] = SimEngine(role, engine_id, model)
        engine.other_models += other_models
        await engine.start()
        await engine.register(self.registry_channel)
        await self.until_known(engine_id)
        return engine

    async def start(self, name: str, store: Store | None = None) -> Part:
        """Starts a part that was stopped, at its old addresses. ``name`` is that of its
        attribute."""
        serve, stored, told = {
            "registry": (serve_registry, True, ["registry"]),
            "lease": (serve_lease, True, ["lease"]),
            "router": (serve_router, False, ["router_http", "router_grpc"]),
        }[name]
        part = Part(serve, self.settings, *([store or self.store] if stored else []))
        self.started.append(part)
        await part.wait_for(*told)
        setattr(self, name, part)
        return part

    async def until_known(self, engine_id: str) -> None:
        """Until the router has this incarnation of the engine."""
        engine = self.engines[engine_id]
        await until(lambda: self._plans_with(engine), "the router does not know the engine")

    async def _plans_with(self, engine: SimEngine) -> bool:
        text = await self.metrics()
        return f'engine_id="{engine.engine_id}",incarnation="{engine.incarnation}"' in text

    async def metrics(self) -> str:
        async with self.client.get(f"{self.url}/metrics") as response:
            return await response.text()

    async def metric(self, line: str) -> float:
        """The value of a sample, named with its labels; 0 where it is absent."""
        for found in (await self.metrics()).splitlines():
            name, _, value = found.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0

    async def grant(
        self, engine: SimEngine, conversation_id: str, turn: int, **fields: Any
    ) -> lease_pb2.Lease:
        """As the engine's connector does at the end of a turn."""
        stub = lease_pb2_grpc.LeaseServiceStub(self.lease_channel)
        request = lease_pb2.GrantRequest(
            conversation=common_pb2.Conversation(
                tenant=fields.pop("tenant", "default"),
                model=engine.model,
                conversation_id=conversation_id,
            ),
            lease_id=f"lease-{conversation_id}-{turn}-{engine.incarnation}",
            turn=turn,
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            session_id=engine.session_id,
            num_tokens=256,
            num_blocks=16,
            block_size=16,
            compatibility_hash=COMPATIBILITY,
            proof=lease_pb2.PrefixProof(chunk_tokens=256, chunk_digests=b"x" * 16),
            kv_transfer_params_json="{}",
            **fields,
        )
        answer: lease_pb2.GrantResponse = await stub.Grant(request, timeout=5)
        return answer.lease


async def ask_traced(stack: Stack, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The trace id of a turn, which may break off."""
    body = {"model": "sim", "messages": [], "conversation_id": "c", **fields}
    url = stack.url + "/v1/chat/completions"
    async with stack.client.post(url, json=body, headers=headers) as response:
        with suppress(aiohttp.ClientError):
            await response.read()
        return response.headers["x-kvlease-trace-id"]


@asynccontextmanager
async def running_pair(**settings: Any) -> AsyncIterator[Stack]:
    """As :func:`running`, with prefill-0 and decode-0."""
    async with running(**settings) as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        yield stack


@asynccontextmanager
async def running(store: Store | None = None, **settings: Any) -> AsyncIterator[Stack]:
    """All services on free ports; at the end everything is gone, and no task is left."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        store = store or MemoryStore()
        stack.push_async_callback(store.close)
        given = Settings(
            registry_listen=ANY,
            lease_listen=ANY,
            router_listen=ANY,
            router_grpc_listen=ANY,
            **{"session_ttl": 2, "start_turn_timeout": 1.0, **settings},
        )
        registry = Part(serve_registry, given, store)
        stack.push_async_callback(registry.stop)
        lease = Part(serve_lease, given, store)
        stack.push_async_callback(lease.stop)
        await registry.wait_for("registry")
        await lease.wait_for("lease")
        # From here on on fixed ports, so that a part that is started again is found.
        given = given.model_copy(
            update={
                "registry_endpoint": registry.addresses["registry"],
                "registry_listen": registry.addresses["registry"],
                "lease_endpoint": lease.addresses["lease"],
                "lease_listen": lease.addresses["lease"],
            }
        )
        router = Part(serve_router, given)
        stack.push_async_callback(router.stop)
        await router.wait_for("router_http", "router_grpc")
        given = given.model_copy(
            update={
                "router_listen": router.addresses["router_http"],
                "router_grpc_listen": router.addresses["router_grpc"],
            }
        )
        channels = [
            await stack.enter_async_context(rpc.aio_channel(address, tls.of(given)))
            for address in (
                given.registry_endpoint,
                given.lease_endpoint,
                router.addresses["router_grpc"],
            )
        ]
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        made = Stack(given, registry, lease, router, *channels, client, store)
        stack.push_async_callback(_stop_all, made)
        yield made
    await until(lambda: not _tasks_since(before), f"{_tasks_since(before)} is left", timeout_s=5)


def _tasks_since(before: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() - before if task is not current}


async def _stop_all(stack: Stack) -> None:
    for engine in stack.engines.values():
        await engine.stop()
    for part in reversed(stack.started):
        await part.stop()


async def until(condition: Callable[[], Any], otherwise: str, timeout_s: float = 10.0) -> None:
    """Polls ``condition`` (which may be a coroutine function) until it holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{otherwise} within {timeout_s} s")
        await asyncio.sleep(0.01)


def events(raw: bytes) -> list[Any]:
    """The data of server-sent events; the last one of vLLM is "[DONE]"."""
    return [_data(event) for event in _events(raw)]


def _events(raw: bytes) -> Iterable[str]:
    return (event for event in raw.decode().split("\n\n") if event.startswith("data: "))


def _data(event: str) -> Any:
    text = event.removeprefix("data: ")
    return text if text == "[DONE]" else json.loads(text)
