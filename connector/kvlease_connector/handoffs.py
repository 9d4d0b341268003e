"""Prompts' blocks that a prefill engine keeps for decode engines. Scheduler's thread, unless
it says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlease_connector.blocks import BlockHolder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Handoffs:
    """What waits for a decode engine to fetch it."""

    @dataclass(slots=True)
    class _Held:
        blocks: list[KVCacheBlock]
        reads_left: int
        free_at: float

    def __init__(self, holder: BlockHolder) -> None:
        self._holder = holder
        self._held: dict[str, Handoffs._Held] = {}
        self.retained_blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, num_blocks: list[int], *, reads: int, free_at: float) -> None:
        """Keeps a finished request's blocks until ``reads`` workers have read them, or
        until ``free_at``."""
        blocks = self._holder.hold(request_id, num_blocks)
        self._held[request_id] = self._Held(blocks, reads, free_at)
        self.retained_blocks += len(blocks)

    def read(self, counts: Mapping[str, int]) -> None:
        """Workers have read the blocks of these requests so many times."""
        for request_id, count in counts.items():
            held = self._held.get(request_id)
            if held is not None:
                held.reads_left -= count
                if held.reads_left <= 0:
                    self._free(request_id)

    def drain(self, now: float) -> None:
        """Frees what was not fetched in time."""
        for request_id in [key for key, held in self._held.items() if held.free_at <= now]:
            self._free(request_id)

    def expired_blocks(self, now: float) -> int:
        """Blocks that the next drain frees. Safe to call from another thread."""
        return sum(len(held.blocks) for held in list(self._held.values()) if held.free_at <= now)

    def expired(self, now: float) -> int:
        """Handoffs that the next drain ends. Safe to call from another thread."""
        return sum(1 for held in list(self._held.values()) if held.free_at <= now)

    def _free(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        self.retained_blocks -= len(held.blocks)
        self._holder.release(held.blocks)
