"""Holding a finished request's KV blocks by reference in vLLM's block pool.

vLLM's own way of keeping blocks (answering "free them later" when a request finishes)
counts the request as unfinished, so the engine steps in a busy loop for as long. A
reference in the block pool keeps the blocks just as well and lets the engine go idle.

Everything here runs in the scheduler's thread: the pool is not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockHolder:
    """References on KV blocks (vllm/v1/core/block_pool.py: ``touch``, ``free_blocks``)."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can use: all but the pool's null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        """Blocks without a reference. Safe to read from any thread: one integer."""
        return int(self._pool.get_num_free_blocks())

    def num_blocks(self, request_id: str) -> list[int]:
        """How many blocks a request has, a number for each group."""
        return [len(group) for group in self._manager.get_blocks(request_id).blocks]

    def hold(self, request_id: str, num_blocks: Sequence[int]) -> list[KVCacheBlock]:
        """Takes a reference on a request's first ``num_blocks[g]`` blocks of each group g.
        The request must not have been freed yet."""
        held = [
            block
            for group, count in zip(
                self._manager.get_blocks(request_id).blocks, num_blocks, strict=True
            )
            for block in group[:count]
            if not block.is_null
        ]
        self._pool.touch(held)
        return held

    def release(self, held: Sequence[KVCacheBlock]) -> None:
        """Gives the references back, last block first, so that a prefix stays cached
        longest."""
        self._pool.free_blocks(reversed(held))
