"""A decode engine as a process of the simulation: the connector's real parts on a make-believe
vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from sim_blocks import BLOCK_TOKENS, CHUNK_TOKENS, MODEL, Manager, Pool, Text
from sim_loop import Process, SimLoop
from sim_network import Network
from sim_services import Stub

from kvlease.config import Settings
from kvlease.v1 import registry_pb2
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.decode import DecodeSide
from kvlease_connector.grants import Finished
from kvlease_connector.session import Session
from kvlease_connector.table import LeaseTable

if TYPE_CHECKING:
    from sim_oracle import Oracle

STEP_S = 0.05
"""How often a request that waits for room is looked at."""
BUSY_S = 0.2
"""How often a busy engine looks for blocks that it may free."""


class Holder(BlockHolder):
    """Tells the oracle what is held for which request, and when that is over."""

    def __init__(self, run: DecodeRun, manager: Manager, oracle: Oracle) -> None:
        super().__init__(manager)
        self._run = run
        self._oracle = oracle
        self._held: dict[int, str] = {}

    def hold(self, request_id: str, num_blocks: Sequence[int]) -> list[Any]:
        held = super().hold(request_id, num_blocks)
        self._held[id(held)] = request_id
        self._oracle.held(self._run, request_id, held)
        return held

    def release(self, held: Sequence[Any]) -> None:
        self._oracle.released(self._run, self._held.pop(id(held)))
        super().release(held)


def _eager(drain: Callable[[], None]) -> type[LeaseTable]:
    """A table of leases whose engine takes a step after whatever it hears, as a busy one
    may: what can be freed only for a moment is freed."""

    def wrap(name: str) -> Callable[..., Any]:
        def hear(self: LeaseTable, *args: Any, **kwargs: Any) -> Any:
            result = getattr(LeaseTable, name)(self, *args, **kwargs)
            asyncio.get_running_loop().call_soon(drain)
            return result

        return hear

    names = ("show", "removed", "synced", "session_lost", "granted", "refused", "revoked")
    return type("EagerTable", (LeaseTable,), {"__slots__": (), **{n: wrap(n) for n in names}})


class TaskBackground:
    """Stands for the background thread: its coroutines run in the engine's process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
        return self._process.spawn(coroutine)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """The decode half of a turn."""

    request_id: str
    text: Text
    turn: int
    seconds: float
    retention_s: float
    end: bool = False


class DecodeRun:
    """One start of a decode engine."""

    def __init__(self, host: DecodeEngine, number: int) -> None:
        self.host = host
        self.incarnation = f"{host.name}-{number}"
        self.process = Process(host.name, host.loop)
        self.process.run(self._build)

    def _build(self) -> None:
        host = self.host
        self.pool = Pool(host.num_blocks, lambda block: host.oracle.freed(self, block))
        self.manager = Manager(self.pool)
        self.record = registry_pb2.Engine(
            engine_id=host.name,
            role=registry_pb2.ENGINE_ROLE_DECODE,
            incarnation=self.incarnation,
            model=MODEL,
            weights_version=host.weights,
            http_address="http://engine:8000",
            side_channel_host=host.name,
            side_channel_port=5600,
            block_size=BLOCK_TOKENS,
            compatibility_hash="hash",
            holder_address=f"{host.name}:1",
        )
        self.side = DecodeSide(
            Stub(host.network, self.process, host.leases),  # type: ignore[arg-type]
            self.record,
            TaskBackground(self.process),  # type: ignore[arg-type]
            trace.NoOpTracer(),
            host.settings,
            chunk_tokens=CHUNK_TOKENS,
            clock=host.clock,
        )
        self.session = Session(
            Stub(host.network, self.process, host.registries),  # type: ignore[arg-type]
            self.record,
            usage=self.side.usage,
            on_opened=self._opened,
            on_lost=self._lost,
            clock=host.clock,
            answers=_yes,
        )
        self.side.bind(Holder(self, self.manager, host.oracle), self.session)
        self.side._table.__class__ = _eager(self.side.drain)
        self._watch: asyncio.Task[None] | None = None
        self.process.spawn(self.side.sweep())
        self.process.spawn(self.session.run())
        self.process.spawn(self._step_for_ever())

    async def _step_for_ever(self) -> None:
        """Other requests keep the engine busy: it frees what it may as soon as it may."""
        while True:
            await asyncio.sleep(BUSY_S)
            self.side.drain()
            self.side.keep_reserve()

    # As in control.py.

    def _opened(self, session_id: str) -> None:
        self.host.oracle.registered(self)
        self._watch = self.process.spawn(self.side.watch(session_id))

    def _lost(self, session_id: str, ended_by: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.side.session_lost(session_id, ended_by)

    # As vLLM's scheduler does it.

    async def decode(self, job: DecodeJob) -> bool:
        """Whether the answer was generated; not if there was no room for it."""
        arrived = self.host.clock()
        if not await self._make_room(job):
            return False
        blocks = self.pool.allocate(job.text)
        self.manager.requests[job.request_id] = blocks
        await asyncio.sleep(job.seconds)
        self.side.drain()
        params = {
            "remote_block_ids": [[block.block_id for block in blocks]],
            "remote_engine_id": self.incarnation,
            "remote_request_id": job.request_id,
            "remote_host": self.host.name,
            "remote_port": 5600,
        }
        turn = Finished(
            conversation=job.text.conversation,
            turn=job.turn,
            token_ids=list(job.text.tokens),
            seed=job.text.seed,
            transfer_params_json=json.dumps(params),
            traceparent="",
            retention_s=job.retention_s,
            end=job.end,
            seconds_since_arrival=self.host.clock() - arrived,
        )
        self.host.oracle.finishing(self, job)
        self.side.finished(job.request_id, turn, [len(blocks)])
        del self.manager.requests[job.request_id]
        self.pool.free_blocks(reversed(blocks))
        return True

    async def _make_room(self, job: DecodeJob) -> bool:
        for _ in range(400):
            self.side.drain()
            self.side.make_room(job.text.num_blocks, 0, job.request_id)
            if self.pool.get_num_free_blocks() >= job.text.num_blocks:
                return True
            await asyncio.sleep(STEP_S)
        return False


class DecodeEngine:
    """A place where decode engines run, one after the other."""

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        network: Network,
        oracle: Oracle,
        settings: Settings,
        leases: Sequence[Any],
        registries: Sequence[Any],
        *,
        num_blocks: int,
        uptime_s: float,
        weights: str = "",
    ) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.oracle = oracle
        self.settings = settings
        self.leases = leases
        self.registries = registries
        self.num_blocks = num_blocks
        self.weights = weights
        self._uptime_s = uptime_s
        self.runs: list[DecodeRun] = []

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.loop.now + self._uptime_s

    @property
    def run(self) -> DecodeRun | None:
        """The one that runs."""
        return self.runs[-1] if self.runs and self.runs[-1].process.alive else None

    @property
    def process(self) -> Process | None:
        return self.run.process if self.run else None

    def start(self) -> None:
        self.runs.append(DecodeRun(self, len(self.runs) + 1))

    def kill(self) -> None:
        if self.run is not None:
            self.oracle.died(self.run)
            self.run.process.kill()


async def _yes() -> bool:
    return True
