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
class ReadsSeen(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """To the scheduler: how often peers have said that they have read a request's blocks."""

    counts: Counter[str] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Over the engine's workers."""
        assert isinstance(other, ReadsSeen)
        return ReadsSeen(self.counts + other.counts)
