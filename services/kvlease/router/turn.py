"""What one turn is made of, shared by its prefill and its decode half."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from kvlease import logs
from kvlease.router import handoff
from kvlease.router.ask import Ask
from kvlease.router.engines import Engines
from kvlease.router.handoff import Handoff, TurnInfo
from kvlease.router.metrics import Metrics
from kvlease.router.spans import TurnTrace
from kvlease.router.upstream import EngineFailed, Upstream
from kvlease.v1 import lease_pb2, registry_pb2

_log = structlog.get_logger("kvlease.router")

PREFILL = registry_pb2.ENGINE_ROLE_PREFILL
DECODE = registry_pb2.ENGINE_ROLE_DECODE


@dataclass(slots=True)
class Tools:
    """What turns are done with; one set a router."""

    engines: Engines
    upstream: Upstream
    metrics: Metrics
    prefill_timeout_s: float


@dataclass(slots=True)
class Turn:
    """One turn in progress. ``headers`` go to engines as they are. ``failed`` holds the
    incarnations that have failed this turn; ``tries`` counts requests to prefill engines."""

    ask: Ask
    trace: TurnTrace
    headers: Mapping[str, str]
    number: int = 0
    lease: lease_pb2.Lease | None = None
    tries: int = 0
    failed: set[str] = field(default_factory=set)
    forgiven: set[str] = field(default_factory=set)

    @property
    def info(self) -> TurnInfo:
        """What engines learn about it."""
        return TurnInfo(self.ask.tenant, self.ask.conversation_id, self.ask.model, self.number)

    @property
    def ids(self) -> dict[str, object]:
        """What a log line needs, so that someone finds the turn."""
        ids = logs.turn_ids(self.ask.conversation_id)
        trace_id, request_id = self.trace.trace_id, self.ask.request_id
        return {**ids, "trace_id": trace_id, "request_id": request_id, "turn": self.number}

    def miss(self, outcome: str, detail: str) -> Handoff:
        """A handoff of nothing. Where reuse was not asked for, nothing was missed."""
        wanted = self.ask.reuse and self.ask.conversation_id
        return Handoff(outcome if wanted else handoff.OFF, detail=detail)

    def next_request_id(self) -> str:
        """The client's for the first try; later ones have their own, so that engines do
        not take them for the same request (a claim of its own, a ticket of its own)."""
        self.tries += 1
        suffix = f"-r{self.tries - 1}" if self.tries > 1 else ""
        return self.ask.request_id + suffix

    def note(self, tools: Tools, role: str, failure: EngineFailed) -> None:
        """An engine has failed the turn: remember, count and log it."""
        engine = failure.engine
        self.failed.add(engine.incarnation)
        tools.engines.suspect(engine)
        tools.metrics.engine_errors.labels(role, engine.engine_id, failure.reason).inc()
        _log.warning(
            "engine failed a turn",
            role=role,
            engine_id=engine.engine_id,
            incarnation=engine.incarnation,
            reason=failure.reason,
            detail=failure.detail,
            **self.ids,
        )

    async def forgive(self, tools: Tools, failure: EngineFailed) -> bool:
        """Whether to ask the same engine once more: it has closed a connection, and still
        accepts new ones. (Servers close idle connections, and a request may just have been
        on its way.)"""
        incarnation = failure.engine.incarnation
        if failure.reason != "lost" or incarnation in self.forgiven:
            return False
        self.forgiven.add(incarnation)
        if not await tools.upstream.accepts(failure.engine):
            return False
        self.failed.discard(incarnation)
        return True


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What is left of the prefill half: the handoff, when it came (monotonic, seconds),
    and the request id that the decode half shares with it."""

    handoff: Handoff
    request_id: str
    at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """How long the prefill engine still keeps the prompt's blocks."""
        return max(0.0, self.handoff.ttl_s - (time.monotonic() - self.at))

    @property
    def is_over(self) -> bool:
        """Whether they may have been freed: reading them would read another's."""
        return self.handoff.params is not None and self.handoff.ttl_s > 0 and not self.remaining_s
