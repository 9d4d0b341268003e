"""A prefill engine as a process of the simulation: the connector's real parts on a
make-believe vLLM."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from sim_blocks import BLOCK_TOKENS, CHUNK_TOKENS, Block, Text
from sim_decode import DecodeEngine, DecodeRun, TaskBackground
from sim_loop import Process, SimLoop
from sim_network import Network
from sim_services import Stub

from kvlease.config import Settings
from kvlease.v1 import registry_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease_connector.claims import Answer, Ask, Claims
from kvlease_connector.holder import Holders
from kvlease_connector.prefill import PrefillSide

if TYPE_CHECKING:
    from sim_oracle import Oracle

STEP_S = 0.005
"""An engine's scheduling step."""


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """The prefill half of a turn. Seconds: until there is room for the blocks, of the read,
    and of the computation."""

    request_id: str
    text: Text
    turn: int
    room_s: float
    read_s: float
    compute_s: float
    aborted: bool = False


@dataclass(eq=False, slots=True)
class Reader:
    """A prefill engine that was told to read."""

    run: PrefillRun
    source: DecodeRun | None
    answer: Answer
    text: Text
    blocks: list[Block] = field(default_factory=list)
    started: float = math.inf
    """By its own clock."""
    over: bool = False

    def may_use(self) -> bool:
        """Whether it may still use what it reads from now on."""
        if self.over or not self.run.process.alive:
            return False
        now, timeout_s = self.run.host.clock(), self.run.host.settings.pull_timeout
        if self.started == math.inf:
            return now + timeout_s < self.answer.read_by
        return now <= min(self.started + timeout_s, self.answer.read_by)


class OracleClaims(Claims):
    """Tells the oracle which claims were won, and when they are over."""

    run: PrefillRun

    async def claim(self, ask: Ask) -> Answer:
        answer = await super().claim(ask)
        self.run.host.oracle.claimed(self.run, ask, answer)
        return answer

    def complete(
        self, conversation: Conversation, answer: Answer, result: Any
    ) -> Coroutine[Any, Any, None]:
        self.run.host.oracle.closed(answer)
        return super().complete(conversation, answer, result)


class SimHolders(Holders):
    """Asks a holder over the simulation's network."""

    def __init__(self, host: PrefillEngine, process: Process) -> None:
        super().__init__(host.settings.connect_timeout)
        self._host = host
        self._process = process

    async def confirm(self, holder: registry_pb2.Engine, lease_id: str, ticket_id: str) -> float:
        """As :class:`kvlease_connector.holder.HolderServer` answers it."""
        decoder = self._host.decoders[holder.engine_id]
        run = decoder.run

        async def handler() -> float:
            assert run is not None
            return run.side.confirm(lease_id, ticket_id)

        network, timeout_s = self._host.network, self._host.settings.connect_timeout
        process = run.process if run else None
        return await network.call(self._process, process, decoder.name, handler, timeout_s)


class PrefillRun:
    """One start of a prefill engine."""

    def __init__(self, host: PrefillEngine, number: int) -> None:
        self.host = host
        self.incarnation = f"{host.name}-{number}"
        self.process = Process(host.name, host.loop)
        self.process.run(self._build)

    def _build(self) -> None:
        host = self.host
        record = registry_pb2.Engine(
            engine_id=host.name, incarnation=self.incarnation, compatibility_hash="hash"
        )
        claims = OracleClaims(
            Stub(host.network, self.process, host.leases),  # type: ignore[arg-type]
            record,
            trace.NoOpTracer(),
            claim_timeout_s=host.settings.claim_timeout,
            connect_timeout_s=host.settings.connect_timeout,
            clock=host.clock,
            holders=SimHolders(host, self.process),
        )
        claims.run = self
        self.side = PrefillSide(
            claims,
            TaskBackground(self.process),  # type: ignore[arg-type]
            trace.NoOpTracer(),
            host.settings,
            kv_bytes_per_token=1,
            clock=host.clock,
        )

    # As vLLM's scheduler and worker do it.

    async def prefill(self, job: PrefillJob) -> dict[str, Any]:
        """What the router is told."""
        params: dict[str, Any] = {"do_remote_decode": True, "kvlease": {}}
        num_tokens = len(job.text.tokens)

        def match() -> int | None:
            return self.side.match(job.request_id, params, num_tokens, 0, lambda: self._ask(job))

        while (count := match()) is None:  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)
        if count and job.room_s:
            await asyncio.sleep(job.room_s)
            count = match() or 0
        read_by = self.side.allocated(job.request_id, count)
        if read_by is not None and job.aborted:
            report = self.side.finished(job.request_id, num_tokens)
            await self._read(job, read_by)
            return report
        if read_by is not None:
            await self._read(job, read_by)
            assert match() == 0, "a second read was offered"
        await asyncio.sleep(job.compute_s)
        return self.side.finished(job.request_id, num_tokens)

    def _ask(self, job: PrefillJob) -> Ask:
        return Ask(
            conversation=job.text.conversation,
            token_ids=job.text.tokens,
            seed=job.text.seed,
            chunk_tokens=CHUNK_TOKENS,
            block_size=BLOCK_TOKENS,
            min_tokens=self.host.settings.min_pull_tokens,
            num_local_tokens=0,
            traceparent="",
        )

    async def _read(self, job: PrefillJob, read_by: float) -> None:
        """worker.py: given up after the pull timeout, failed if it ends after the ticket."""
        reader = self.host.oracle.starts(self, job, read_by)
        timeout_s = self.host.settings.pull_timeout
        source = reader.source
        hangs = source is not None and source.process.paused and self.host.random.random() < 0.5
        await asyncio.sleep(timeout_s if hangs else min(job.read_s, timeout_s))
        failed = (
            hangs
            or job.read_s > timeout_s
            or source is None
            or not source.process.alive
            or self.host.clock() > read_by
        )
        if not failed:
            self.host.oracle.uses(reader)
        self.side.received([job.request_id], [job.request_id] if failed else [])


class PrefillEngine:
    """A place where prefill engines run, one after the other."""

    def __init__(
        self,
        name: str,
        loop: SimLoop,
        network: Network,
        oracle: Oracle,
        settings: Settings,
        leases: Sequence[Any],
        *,
        uptime_s: float,
    ) -> None:
        self.name = name
        self.loop = loop
        self.network = network
        self.oracle = oracle
        self.settings = settings
        self.leases = leases
        self._uptime_s = uptime_s
        self.random = random.Random(f"{network.seed}/{name}")
        self.decoders: dict[str, DecodeEngine] = {}
        self.runs: list[PrefillRun] = []

    def clock(self) -> float:
        """This machine's monotonic clock."""
        return self.loop.now + self._uptime_s

    @property
    def run(self) -> PrefillRun | None:
        """The one that runs."""
        return self.runs[-1] if self.runs and self.runs[-1].process.alive else None

    @property
    def process(self) -> Process | None:
        return self.run.process if self.run else None

    def start(self) -> None:
        self.runs.append(PrefillRun(self, len(self.runs) + 1))

    def kill(self) -> None:
        if self.run is not None:
            self.run.process.kill()
