"""The registry's Prometheus metrics: the engines, as their sessions and they themselves tell
of them. An engine that only keeps blocks does nothing, so vLLM's own metrics stand still
then; what it tells the registry does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvlease.mirror import Change, Mirror
from kvlease.registry import rules
from kvlease.registry.keys import ROLE_WORDS
from kvlease.v1.registry_pb2 import BlockUsage, Engine

REGISTRATIONS = Counter(
    "kvlease_engine_registrations",
    "Sessions that this process has opened for engines: starts, and returns after a loss.",
    ["role", "engine_id"],
)

SESSIONS_LOST = Counter(
    "kvlease_engine_sessions_lost",
    "Engine sessions that ended without Deregister, as this replica saw it: crashes, hangs, "
    "restarts. Every replica counts each.",
    ["role", "engine_id"],
)

_LABELS = ("role", "engine_id", "model")

_USAGE: tuple[tuple[str, str, Callable[[BlockUsage], int]], ...] = (
    ("blocks", "KV blocks that an engine has.", lambda usage: usage.total_blocks),
    ("free_blocks", "KV blocks that its next request could use.", lambda usage: usage.free_blocks),
    (
        "retained_blocks",
        "KV blocks that it keeps only for leases (decode), or for a decode engine that has "
        "still to fetch them (prefill).",
        lambda usage: usage.retained_blocks,
    ),
    (
        "retained_leases",
        "Leases (decode) or fetches (prefill) that keep those blocks.",
        lambda usage: usage.retained_leases,
    ),
    (
        "retention_budget_blocks",
        "KV blocks that it may keep for leases (max_retained_fraction of them all); absent "
        "where it keeps none.",
        lambda usage: usage.retention_budget_blocks,
    ),
)


def ids(engine: Engine) -> tuple[str, str]:
    """Labels that stay the same over restarts of an engine."""
    return ROLE_WORDS[engine.role], engine.engine_id


@dataclass(slots=True)
class _Retention:
    """What one registration has retained: block-seconds up to ``since``."""

    blocks: int
    since: float
    block_seconds: float = 0.0

    def at(self, now: float) -> float:
        return self.block_seconds + self.blocks * (now - self.since)


class EnginesCollector(Collector):
    """The engines as this replica sees them. Prometheus collects in its own thread;
    :meth:`seen` is called in the event loop's, with every change."""

    def __init__(
        self, engines: Mirror[Engine], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engines = engines
        self._clock = clock
        self._retention: dict[str, _Retention] = {}  # by key

    def seen(self, change: Change[Engine]) -> None:
        """Adds up what is retained, as often as an engine tells of it (4 times a second,
        while it changes)."""
        now, engine = self._clock(), change.after
        if engine is None:
            self._retention.pop(change.key, None)
            return
        known = self._retention.get(change.key)
        total = known.at(now) if known else 0.0
        self._retention[change.key] = _Retention(engine.usage.retained_blocks, now, total)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        engines = {entry.item.key: entry.record for entry in self._engines.entries()}
        yield self._counts(list(engines.values()))
        for name, text, value in _USAGE:
            family = GaugeMetricFamily(f"kvlease_engine_{name}", text, labels=_LABELS)
            for engine in engines.values():
                if value(engine.usage) or name != "retention_budget_blocks":
                    family.add_metric([*ids(engine), engine.model], value(engine.usage))
            yield family
        seconds = CounterMetricFamily(
            "kvlease_engine_retained_block_seconds",
            "For how long blocks were retained, in seconds, summed over the blocks, since this "
            "replica has seen the engine register. Its rate is the number of blocks retained, on "
            "average.",
            labels=_LABELS,
        )
        over = CounterMetricFamily(
            "kvlease_engine_turns_over_budget",
            "Turns whose blocks an engine did not keep because its budget was full of leases that "
            "are worth more: the next turns of those conversations miss.",
            labels=_LABELS,
        )
        for engine in engines.values():
            if engine.usage.retention_budget_blocks:
                over.add_metric([*ids(engine), engine.model], engine.usage.turns_over_budget)
        yield over
        now = self._clock()
        for key, retention in list(self._retention.items()):
            if key in engines:
                labels = [*ids(engines[key]), engines[key].model]
                seconds.add_metric(labels, retention.at(now))
        yield seconds

    def _counts(self, engines: list[Engine]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "kvlease_engines",
            "Engines that are registered, as this replica sees it. state: serving or draining.",
            labels=["role", "state"],
        )
        for role, word in ROLE_WORDS.items():
            for state, draining in (("serving", False), ("draining", True)):
                found = (e.role == role and rules.is_draining(e) == draining for e in engines)
                family.add_metric([word, state], sum(found))
        return family
