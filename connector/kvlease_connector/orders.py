"""What scheduler and workers of one engine tell each other, beside vLLM's own metadata."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata


@dataclass
class WorkerOrders:
    """From the scheduler, with each step."""

    read_within_s: dict[str, float] = field(default_factory=dict)
    """For reads that start with this step: seconds until the blocks may be gone."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """To the scheduler, after a step. Counts are over the engine's workers."""

    read_by_peers: Counter[str] = field(default_factory=Counter)
    """How often peers have said that they have read a request's blocks."""
    given_up: Counter[str] = field(default_factory=Counter)
    """Requests whose own read was given up while NIXL may still write to their blocks."""
    settled: Counter[str] = field(default_factory=Counter)
    """Of those, requests to whose blocks nothing can be written any more."""

    def __bool__(self) -> bool:
        return bool(self.read_by_peers or self.given_up or self.settled)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Over the engine's workers."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.read_by_peers + other.read_by_peers,
            self.given_up + other.given_up,
            self.settled + other.settled,
        )
