"""The router's mirror of the registry: which engines there are, kept in memory.

A watch fills it. While the registry cannot be reached, the last known state stays: no
turn fails because the registry does. An engine whose session has ended is remembered
for a while as *departed*: it is tried when nothing else is left, since a registry that
has just come back may not know its engines yet.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import structlog

from kvlease.router.rules import Candidate
from kvlease.v1 import registry_pb2, registry_pb2_grpc

SUSPECT_S = 5.0
"""How long an engine that failed a request is passed over. Long enough for a burst of
turns not to run into it one by one, short enough to use it again soon after a restart."""

REMEMBER_SESSIONS = 4
"""A departed engine is remembered for so many session TTLs."""

RECONNECT_S = 0.2
"""Pause between two tries to watch. The channel itself backs off up to a second."""

_Kind = registry_pb2.WatchEnginesResponse

_ROLE_WORDS = {
    registry_pb2.ENGINE_ROLE_PREFILL: "prefill",
    registry_pb2.ENGINE_ROLE_DECODE: "decode",
}

_log = structlog.get_logger("kvlease.router")


@dataclass(slots=True)
class _Known:
    engine: registry_pb2.Engine
    departed_at: float | None = None  # monotonic
    listeners: list[Callable[[bool], None]] = field(default_factory=list)


class Engines:
    """All engines of all models. ``clock`` is a monotonic clock in seconds."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Callable[[], float],
        *,
        session_ttl_s: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._stub = registry_pb2_grpc.RegistryStub(channel)
        self._clock = clock
        self._remember_s = session_ttl_s * REMEMBER_SESSIONS
        self._on_change = on_change
        self._known: dict[str, _Known] = {}  # by incarnation
        self._in_flight: Counter[str] = Counter()
        self._suspect_until: dict[str, float] = {}
        self._prefilled: set[str] = set()
        """Models that have had a prefill engine."""
        self.synced = False
        """Whether the registry has told of all engines at least once."""

    async def watch(self) -> None:
        """Follows the registry until cancelled."""
        reported = False
        while True:
            try:
                await self._follow()
            except grpc.aio.AioRpcError as error:
                if not reported:
                    reported = True
                    _log.warning(
                        "registry watch ended; the last known engines stay in use",
                        code=error.code().name,
                        detail=error.details(),
                        engines=len(self._known),
                    )
            else:
                reported = False
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self) -> None:
        call = self._stub.WatchEngines(registry_pb2.WatchEnginesRequest(), wait_for_ready=True)
        seen: set[str] | None = set()
        try:
            async for event in call:
                if event.kind == _Kind.KIND_UPSERT:
                    self._upsert(event.engine)
                    if seen is not None:
                        seen.add(event.engine.incarnation)
                elif event.kind == _Kind.KIND_DELETE:
                    self._depart(event.engine.incarnation)
                elif event.kind == _Kind.KIND_SYNCED and seen is not None:
                    for incarnation in self._known.keys() - seen:
                        self._depart(incarnation)
                    seen = None
                    self.synced = True
                    _log.info("registry synced", engines=len(self._known))
                self._on_change()
        finally:
            call.cancel()

    def _upsert(self, engine: registry_pb2.Engine) -> None:
        if engine.role == registry_pb2.ENGINE_ROLE_PREFILL:
            self._prefilled.add(engine.model)
        for other in list(self._known.values()):
            if (
                (other.engine.role, other.engine.engine_id) == (engine.role, engine.engine_id)
                and other.engine.incarnation != engine.incarnation
            ):  # fmt: skip
                self._forget(other.engine.incarnation)
        known = self._known.get(engine.incarnation)
        if known is None:
            self._known[engine.incarnation] = _Known(engine)
            return
        known.engine = engine
        if known.departed_at is not None:
            known.departed_at = None
            for listener in list(known.listeners):
                listener(False)

    def _depart(self, incarnation: str) -> None:
        known = self._known.get(incarnation)
        if known is None or known.departed_at is not None:
            return
        known.departed_at = self._clock()
        for listener in list(known.listeners):
            listener(True)

    def _forget(self, incarnation: str) -> None:
        """The engine has been started anew: this incarnation will never answer again."""
        self._depart(incarnation)
        self._known.pop(incarnation, None)
        self._suspect_until.pop(incarnation, None)

    def candidates(self, role: registry_pb2.EngineRole.ValueType, model: str) -> list[Candidate]:
        """Engines of a role and model, by engine_id, with what is known of their state."""
        return [
            candidate
            for candidate in self._candidates()
            if candidate.engine.role == role and model in _names(candidate.engine)
        ]

    def overview(self) -> list[tuple[str, str, Candidate]]:
        """(role, state, engine) of all engines, in words, for people. Any thread."""
        return [
            (_ROLE_WORDS.get(candidate.engine.role, "unknown"), _state(candidate), candidate)
            for candidate in self._candidates()
        ]

    def _candidates(self) -> list[Candidate]:
        now = self._clock()
        found = [
            Candidate(
                engine=known.engine,
                in_flight=self._in_flight[incarnation],
                suspect=self._suspect_until.get(incarnation, now) > now,
                departed=known.departed_at is not None,
            )
            for incarnation, known in list(self._known.items())
            if not self._is_old(known, now)
        ]
        return sorted(found, key=lambda candidate: candidate.engine.engine_id)

    def _is_old(self, known: _Known, now: float) -> bool:
        return known.departed_at is not None and now - known.departed_at > self._remember_s

    def _drop_old(self, now: float) -> None:
        for incarnation, known in list(self._known.items()):
            if self._is_old(known, now):
                self._forget(incarnation)

    def models(self) -> dict[str, registry_pb2.Engine]:
        """Every name of a model that is served, and the engine that had it first. The name
        is a LoRA adapter's, or a further one of the model, if it is not ``engine.model``."""
        first: dict[str, registry_pb2.Engine] = {}
        self._drop_old(self._clock())
        engines = (known.engine for known in self._known.values())
        for engine in sorted(engines, key=lambda engine: engine.register_time.ToNanoseconds()):
            for name in _names(engine):
                first.setdefault(name, engine)
        return dict(sorted(first.items()))

    def unready_reason(self) -> str:
        """Why turns cannot be served, by what the registry has told alone, as a sentence;
        empty if some engine may take them (:class:`~kvlease.router.readiness.Readiness`
        says whether one does)."""
        if not self.synced:
            return (
                "The registry has not been reached yet: check registry_endpoint, and that it runs."
            )
        if self.complete_models():
            return ""
        decode = registry_pb2.ENGINE_ROLE_DECODE
        there = {candidate.engine.role for candidate in self._candidates()}
        if self._prefilled:
            there.add(registry_pb2.ENGINE_ROLE_PREFILL)
        missing = [name for role, name in _ROLE_WORDS.items() if role not in there]
        if not missing:
            return "No model has both a prefill and a decode engine: start the one that is missing."
        meanwhile = " Until then the decode engine computes whole prompts." * (decode in there)
        return f"No {' and no '.join(missing)} engine is registered: start one.{meanwhile}"

    def complete_models(self) -> list[str]:
        """Models that have a decode engine, in whatever state, and have had a prefill
        engine since this router was started."""
        decode = registry_pb2.ENGINE_ROLE_DECODE
        models = {c.engine.model for c in self._candidates() if c.engine.role == decode}
        return sorted(models & self._prefilled)

    def suspect(self, engine: registry_pb2.Engine) -> None:
        """The engine has failed a request: pass it over for :data:`SUSPECT_S`."""
        self._suspect_until[engine.incarnation] = self._clock() + SUSPECT_S

    def trust(self, engine: registry_pb2.Engine) -> None:
        """The engine has answered: a suspicion is over."""
        self._suspect_until.pop(engine.incarnation, None)

    @contextmanager
    def use(self, engine: registry_pb2.Engine) -> Iterator[None]:
        """Counts a request in flight on ``engine``."""
        incarnation = engine.incarnation
        self._in_flight[incarnation] += 1
        try:
            yield
        finally:
            self._in_flight[incarnation] -= 1
            if not self._in_flight[incarnation]:
                del self._in_flight[incarnation]

    @contextmanager
    def departures(
        self, engine: registry_pb2.Engine, listener: Callable[[bool], None]
    ) -> Iterator[None]:
        """Calls ``listener(True)`` when the engine's session ends and ``listener(False)``
        when the same incarnation is back."""
        known = self._known.get(engine.incarnation)
        if known is None:
            yield
            return
        known.listeners.append(listener)
        try:
            yield
        finally:
            known.listeners.remove(listener)

    @property
    def return_grace_s(self) -> float:
        """How long a live engine needs at most to be back after its session was lost with
        the store: it renews every third of the TTL."""
        return self._remember_s / REMEMBER_SESSIONS / 3 + 2.0


def _names(engine: registry_pb2.Engine) -> tuple[str, ...]:
    return (engine.model, *engine.other_models)


def _state(candidate: Candidate) -> str:
    if candidate.departed:
        return "departed"
    if candidate.engine.state == registry_pb2.ENGINE_STATE_DRAINING:
        return "draining"
    return "suspect" if candidate.suspect else "serving"
