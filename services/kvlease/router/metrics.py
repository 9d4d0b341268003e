"""The router's Prometheus metrics. One registry a router, so that tests can run several."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvlease.router.engines import Engines

# From a local cache hit on a GPU to a long prompt recomputed on a CPU.
_TTFT_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.4, 3.2, 5, 7.5, 10, 15, 20, 30, 45, 60, 120,
)  # fmt: skip


class Metrics:
    """What :data:`GET /metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = Histogram(
            "kvlease_turn_ttft_seconds",
            "From a turn's arrival to its first content byte to the client.",
            ["outcome"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.turns = Counter(
            "kvlease_turns",
            "Turns that ended, by what became of their KV blocks and how they ended "
            "(ok, client_error, failed, disconnected).",
            ["outcome", "end"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvlease_turns_in_flight", "Turns that run now.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "kvlease_turn_prompt_tokens", "Prompt tokens of turns.", registry=self.registry
        )
        self.reused_tokens = Counter(
            "kvlease_turn_reused_tokens",
            "Prompt tokens whose KV was read from a decode engine.",
            registry=self.registry,
        )
        self.engine_errors = Counter(
            "kvlease_engine_errors",
            "Requests to engines that failed, by reason (refused, lost, timeout, departed, "
            "status).",
            ["role", "engine_id", "reason"],
            registry=self.registry,
        )
        self.start_turn_failures = Counter(
            "kvlease_start_turn_failures",
            "Turns that the lease service could not be asked about.",
            registry=self.registry,
        )

    def show(self, engines: Engines) -> None:
        """Adds the engines as this router sees them."""
        self.registry.register(_EnginesCollector(engines))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class _EnginesCollector(Collector):
    """Read when Prometheus scrapes, so that an engine that has gone disappears."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvlease_router_engine_requests",
            "Requests of this router in flight on each engine it knows. state: serving, draining, "
            "suspect (failed a moment ago) or departed (its session has ended).",
            labels=["role", "engine_id", "incarnation", "state"],
        )
        for role, state, candidate in self._engines.overview():
            engine = candidate.engine
            labels = [role, engine.engine_id, engine.incarnation, state]
            family.add_metric(labels, candidate.in_flight)
        yield family
