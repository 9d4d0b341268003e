"""The lease service's Prometheus metrics."""

from __future__ import annotations

import functools
from collections import Counter as Count
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvlease import outcomes
from kvlease.metrics import MILLISECONDS
from kvlease.v1 import lease_pb2
from kvlease.v1.lease_pb2 import EndReason, LeaseState

if TYPE_CHECKING:
    from kvlease.lease.knowledge import LeaseView
    from kvlease.mirror import Mirror

LEASES_GRANTED = Counter("kvlease_leases_granted", "Leases granted by this process.")

GRANTS_REFUSED = Counter(
    "kvlease_grants_refused", "Grants refused by this process, by ErrorInfo reason.", ["reason"]
)

CLAIM_SECONDS = Histogram(
    "kvlease_claim_seconds",
    "Time from a claim's arrival to its answer, by outcome.",
    ["outcome"],
    buckets=MILLISECONDS,
)

LEASES_ENDED = Counter(
    "kvlease_leases_ended",
    "Leases that this process ended, by reason. Those that ended with their engine's session "
    "are not among them: see kvlease_engine_sessions_lost_total.",
    ["reason"],
)

COMMIT_CONFLICTS = Counter(
    "kvlease_commit_conflicts", "Writes that were decided again because another came first."
)


@functools.cache
def end_word(reason: EndReason.ValueType) -> str:
    """The label's value."""
    return EndReason.Name(reason).removeprefix("END_REASON_").lower()


# So that the first of each is seen as an increase from 0.
for _word in outcomes.ALL_WORDS:
    CLAIM_SECONDS.labels(_word)
for _reason in EndReason.values():
    if _reason not in (lease_pb2.END_REASON_UNSPECIFIED, lease_pb2.END_REASON_SESSION_LOST):
        LEASES_ENDED.labels(end_word(_reason))


class LeasesCollector(Collector):
    """Counts the leases whenever Prometheus scrapes, in its thread."""

    def __init__(self, leases: Mirror[LeaseView]) -> None:
        self._leases = leases

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvlease_leases",
            "Leases that exist, as this replica sees them. state: held, or ending (its last "
            "readers are still reading).",
            labels=["model", "state"],
        )
        found: Count[tuple[str, LeaseState.ValueType]] = Count()
        for entry in self._leases.entries():
            lease = entry.record.lease
            found[lease.conversation.model, lease.state] += 1
        for model in sorted({model for model, _ in found}):
            for state in (lease_pb2.LEASE_STATE_HELD, lease_pb2.LEASE_STATE_ENDING):
                word = LeaseState.Name(state).removeprefix("LEASE_STATE_").lower()
                family.add_metric([model, word], found[model, state])
        yield family
