"""The services as processes of the simulation: the real servers, rules and mirrors, on a
store that is far away and with clocks that are wrong; and the stubs that engines call."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message
from sim_loop import Process, SimLoop
from sim_network import Network, failed
from sim_store import StoreClient, StoreCore

from kvlease import serving
from kvlease.config import Settings
from kvlease.lease.buckets import Buckets
from kvlease.lease.history import History
from kvlease.lease.knowledge import Knowledge, mirror_of_leases
from kvlease.lease.records import Records
from kvlease.lease.rules import Limits
from kvlease.lease.server import LeaseServer
from kvlease.lease.service import LeaseOperations
from kvlease.lease.sweeper import Sweeper
from kvlease.mirror import Mirror
from kvlease.registry import keys as registry_keys
from kvlease.registry.server import RegistryServer, parse_engine
from kvlease.v1.registry_pb2 import Engine

EPOCH = 1_800_000_000.0
"""What wall clocks show when the simulation's time is 0."""


class _Health:
    """Where the monitor reports to: nobody asks."""

    async def set_ready(self, ready: bool) -> None:
        pass


class _Context:
    """What a handler gets to know about its call."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def time_remaining(self) -> float | None:
        return self._timeout_s

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any) -> NoReturn:
        raise failed(code, details, trailing)


class Service:
    """One replica of a service. It can be killed and started again."""

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        network: Network,
        core: StoreCore,
        settings: Settings,
        *,
        skew_s: float,
    ) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.core = core
        self.settings = settings
        self.skew_s = skew_s
        self.process: Process | None = None
        self.processes: list[Process] = []
        self.server: Any = None

    def clock(self) -> float:
        """This replica's wall clock."""
        return EPOCH + self.loop.now + self.skew_s

    def start(self) -> None:
        self.process = process = Process(self.name, self.loop)
        self.processes.append(process)
        process.run(self.build, process, StoreClient(self.core, process))

    def build(self, process: Process, store: StoreClient) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


class LeaseReplica(Service):
    """A replica of the lease service, put together as ``kvlease.lease.app`` does it."""

    def build(self, process: Process, store: StoreClient) -> None:
        leases = mirror_of_leases(store)
        engines: Mirror[Engine] = Mirror(store, registry_keys.ENGINES, parse_engine)
        monitor = serving.StoreMonitor(store, _Health(), [leases, engines])  # type: ignore[arg-type]
        limits = Limits.of(self.settings)
        buckets = Buckets(store, self.settings.conversation_ttl, clock=self.loop.time)
        records = Records(Knowledge(store, leases, engines, buckets))
        operations = LeaseOperations(records, leases, limits, clock=self.clock)
        history = History(store, leases, buckets, self.clock)
        self.server = LeaseServer(operations, history, leases, monitor)
        process.spawn(leases.run())
        process.spawn(engines.run())
        process.spawn(monitor.run())
        process.spawn(Sweeper(operations, leases, limits, clock=self.clock).run())


class RegistryReplica(Service):
    """A replica of the registry."""

    def build(self, process: Process, store: StoreClient) -> None:
        engines: Mirror[Engine] = Mirror(store, registry_keys.ENGINES, parse_engine)
        monitor = serving.StoreMonitor(store, _Health(), [engines])  # type: ignore[arg-type]
        self.server = RegistryServer(self.settings, store, engines, monitor, clock=self.clock)
        process.spawn(engines.run())
        process.spawn(monitor.run())


class Stub:
    """A client's stub for the replicas of a service: each call goes to one of them by
    chance, as a channel with several addresses does it."""

    def __init__(self, network: Network, client: Process, replicas: Sequence[Service]) -> None:
        self._network = network
        self._client = client
        self._replicas = replicas
        self._random = random.Random(f"{network.seed}/{client.name}/{replicas[0].name}")

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Message, timeout: float = 10.0, metadata: object = None) -> Any:
            replica = self._random.choice(self._replicas)
            sent = _copy(request)

            async def handler() -> Any:
                answer = getattr(replica.server, method)
                return _copy(await answer(_copy(sent), _Context(timeout)))

            return await self._network.call(
                self._client, replica.process, replica.name, handler, timeout
            )

        return call

    def WatchLeases(self, request: Message) -> AsyncIterator[Any]:
        replica = self._random.choice(self._replicas)
        return Stream(self._network, self._client, replica, request).messages()


class Stream:
    """A watch: messages in order, late; it breaks when its server dies or does not answer
    pings."""

    PING_PERIOD_S = 5.0

    def __init__(
        self, network: Network, client: Process, replica: Service, request: Message
    ) -> None:
        self._network = network
        self._client = client
        self._replica = replica
        self._request = request
        self._loop = replica.loop
        self._link = network.link(client.name, replica.name)
        self._wake = asyncio.Event()
        self._on_the_way: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._last = 0.0
        self._silent = False
        self._end: grpc.aio.AioRpcError | None = None

    async def messages(self) -> AsyncIterator[Any]:
        self._open()
        while True:
            self._wake.clear()
            while self._arrived:
                yield self._arrived.popleft()
            if self._end is not None:
                raise self._end
            await self._wake.wait()

    def cut(self) -> None:
        """The connection breaks."""
        self._break("connection reset")

    def _open(self) -> None:
        server = self._replica.process
        if server is None or self._loop.ending:
            self._loop.outside(self._link.delay(), self._break, "connection refused")
            return
        self._network.streams.append(self)
        server.on_death.append(self.cut)
        self._loop.outside(self._link.delay(), self._serve, server)
        self._loop.outside(self.PING_PERIOD_S, self._ping, server)

    def _serve(self, server: Process) -> None:
        if server.alive and self._end is None:
            server.spawn(self._push())

    async def _push(self) -> None:
        why = "the stream is over"  # its client starts another, whatever it says
        try:
            async for message in self._replica.server.WatchLeases(self._request, _Context(None)):
                if self._end is not None:
                    return
                self._on_the_way.append(_copy(message))
                self._last = max(self._last, self._loop.now + self._link.delay())
                self._loop.outside(self._last - self._loop.now, self._arrive)
        except grpc.aio.AioRpcError as error:
            why = error.details() or ""
        self._loop.outside(max(0.0, self._last - self._loop.now), self._break, why)

    def _arrive(self) -> None:
        # While the link is cut TCP keeps what was sent, and delivers it if it heals in time.
        if not self._link.weather.cut and self._end is None:
            self._arrived.extend(self._on_the_way)
            self._on_the_way.clear()
            self._wake.set()

    def _ping(self, server: Process) -> None:
        if self._end is not None or self._loop.ending:
            return
        was_silent, self._silent = self._silent, self._link.weather.cut or server.paused
        if was_silent and self._silent:
            self._break("no answer to pings")
            return
        self._arrive()
        self._loop.outside(self.PING_PERIOD_S, self._ping, server)

    def _break(self, why: str) -> None:
        if self._end is None:
            self._end = failed(grpc.StatusCode.UNAVAILABLE, why)
            self._network.streams = [s for s in self._network.streams if s is not self]
            self._wake.set()


def _copy(message: Any) -> Any:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied
