"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvlease.metrics import MILLISECONDS, render
from kvlease.router.engines import Engines
from kvlease.router.handoff import Handoff

# From a local cache hit on a GPU to a long prompt recomputed on a CPU.
_TTFT_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.4, 3.2, 5, 7.5, 10, 15, 20, 30, 45, 60, 120,
)  # fmt: skip

# From a small read through shared memory to one that its timeout ends.
_PULL_BUCKETS = (
    0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4,
)  # fmt: skip


class Metrics:
    """What :data:`GET /metrics` shows: all of ``registry``, by default one of this router's
    own, so that tests can run several. Histograms of a turn's times carry exemplars: the ids
    of its traces."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.ttft = Histogram(
            "kvlease_turn_ttft_seconds",
            "From a turn's arrival to its first content byte to the client.",
            ["model", "outcome"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.turns = Counter(
            "kvlease_turns",
            "Turns that ended, by what became of their KV blocks and how they ended "
            "(ok, client_error, failed, disconnected).",
            ["model", "outcome", "end"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvlease_turns_in_flight", "Turns that run now.", registry=self.registry
        )
        self.prompt_tokens = Counter(
            "kvlease_turn_prompt_tokens",
            "Prompt tokens of turns.",
            ["model"],
            registry=self.registry,
        )
        self.reused_tokens = Counter(
            "kvlease_turn_reused_tokens",
            "Prompt tokens whose KV was read from a decode engine.",
            ["model"],
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
        self.turn_records_dropped = Counter(
            "kvlease_turn_records_dropped",
            "Turns of which GetConversation will not tell: the lease service was away for long.",
            registry=self.registry,
        )

        self._add_costs()

    def _add_costs(self) -> None:
        """What prefill engines expected of turns, beside what came of it."""

        def histogram(name: str, text: str, label: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, [label], buckets=buckets, registry=self.registry)

        self.claim = histogram(
            "kvlease_turn_claim_seconds",
            "A turn's claim as its prefill engine sees it, by the turn's outcome: to the answer "
            "of the lease service, and that of the holder where it was asked.",
            "outcome",
            MILLISECONDS,
        )
        self.pull = histogram(
            "kvlease_pull_seconds",
            "Reads of leased blocks that succeeded, by the decode engine they came from.",
            "source",
            _PULL_BUCKETS,
        )
        self.pull_predicted = histogram(
            "kvlease_pull_predicted_seconds",
            "How long reads were expected to take, before they began.",
            "source",
            _PULL_BUCKETS,
        )
        self.pull_compute_predicted = histogram(
            "kvlease_pull_predicted_compute_seconds",
            "How long computing the tokens that were read instead was expected to take.",
            "source",
            _TTFT_BUCKETS,
        )
        self.pull_bytes = Counter(
            "kvlease_pull_bytes",
            "Bytes of KV cache read from a decode engine.",
            ["source"],
            registry=self.registry,
        )
        self.prefill = histogram(
            "kvlease_prefill_seconds",
            "A turn's part of a prefill engine's steps.",
            "engine_id",
            _TTFT_BUCKETS,
        )
        self.prefill_predicted = histogram(
            "kvlease_prefill_predicted_seconds",
            "What that was expected to be when the steps began.",
            "engine_id",
            _TTFT_BUCKETS,
        )

    def observe(self, engine_id: str, handoff: Handoff, trace_id: str) -> None:
        """A prefill engine has answered."""
        costs, exemplar = handoff.costs, {"trace_id": trace_id}
        if costs.claim_s is not None:
            self.claim.labels(handoff.outcome).observe(costs.claim_s, exemplar)
        if costs.prefill_s is not None:
            self.prefill.labels(engine_id).observe(costs.prefill_s, exemplar)
        if costs.predicted_prefill_s is not None:
            self.prefill_predicted.labels(engine_id).observe(costs.predicted_prefill_s)
        if costs.pull_s is None:
            return
        self.pull.labels(costs.pull_source).observe(costs.pull_s, exemplar)
        self.pull_bytes.labels(costs.pull_source).inc(costs.pull_bytes)
        if costs.predicted_pull_s is not None:
            self.pull_predicted.labels(costs.pull_source).observe(costs.predicted_pull_s)
        if costs.predicted_compute_s is not None:
            self.pull_compute_predicted.labels(costs.pull_source).observe(costs.predicted_compute_s)

    def show(self, engines: Engines) -> None:
        """Adds the engines as this router sees them."""
        self.registry.register(_EnginesCollector(engines))

    def render(self, accept: str) -> tuple[bytes, str]:
        """A scrape's answer and its Content-Type."""
        return render(self.registry, accept)


class _EnginesCollector(Collector):
    """Read when Prometheus scrapes, maybe in its own thread, so that an engine that has gone
    disappears."""

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
