"""KV blocks that know what they hold, in vLLM's block pool as far as the connector knows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvlease import prefix
from kvlease.v1.common_pb2 import Conversation

BLOCK_TOKENS = 4
CHUNK_TOKENS = 8
MODEL = "m"


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, and everything else that their KV values depend on."""

    conversation: Conversation
    tokens: tuple[int, ...]
    salt: str = ""
    weights: str = ""

    @property
    def seed(self) -> bytes:
        tenant = self.conversation.tenant
        return prefix.seed_for(tenant, MODEL, self.weights, "", self.salt)

    @property
    def num_blocks(self) -> int:
        return math.ceil(len(self.tokens) / BLOCK_TOKENS)

    def block(self, index: int) -> Content:
        """What the block at ``index`` holds once this text is computed."""
        world = (self.conversation.tenant, self.weights, self.salt)
        return Content(world, self.tokens[: (index + 1) * BLOCK_TOKENS])

    def extended(self, tokens: Iterable[int]) -> Text:
        return Text(self.conversation, (*self.tokens, *tokens), self.salt, self.weights)


@dataclass(frozen=True, slots=True)
class Content:
    """KV values depend on all tokens before them."""

    world: tuple[str, str, str]
    tokens: tuple[int, ...]

    def serves(self, wanted: Content, num_tokens: int) -> bool:
        """Whether it can stand in for ``wanted`` in a prompt's first ``num_tokens``."""
        end = min(len(wanted.tokens), num_tokens)
        return self.world == wanted.world and self.tokens[:end] == wanted.tokens[:end]


@dataclass(eq=False, slots=True)
class Block:
    """One KV block (vllm/v1/core/kv_cache_utils.py, KVCacheBlock)."""

    block_id: int
    ref_cnt: int = 0
    content: Content | None = None
    is_null: bool = False


class Pool:
    """vLLM's block pool, as far as the connector knows it (vllm/v1/core/block_pool.py)."""

    def __init__(self, num_blocks: int, on_free: Callable[[Block], None]) -> None:
        self.num_gpu_blocks = num_blocks + 1
        self.blocks = [Block(i + 1) for i in range(num_blocks)]
        self._free = list(self.blocks)
        self._on_free = on_free

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self, text: Text) -> list[Block]:
        """Blocks for a text, which overwrites what they held."""
        taken, self._free = self._free[: text.num_blocks], self._free[text.num_blocks :]
        assert len(taken) == text.num_blocks
        for index, block in enumerate(taken):
            block.ref_cnt = 1
            block.content = text.block(index)
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "only blocks in use are held"
            block.ref_cnt += 1

    def free_blocks(self, ordered: Iterable[Block]) -> None:
        for block in ordered:
            assert block.ref_cnt > 0, "a block was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                block.content = None  # as if another request had it at once
                self._free.append(block)
                self._on_free(block)


@dataclass(slots=True)
class _Blocks:
    blocks: tuple[list[Block], ...]


class Manager:
    """vLLM's KV cache manager, as far as the connector knows it."""

    def __init__(self, pool: Pool) -> None:
        self.block_pool = pool
        self.requests: dict[str, list[Block]] = {}

    def get_blocks(self, request_id: str) -> _Blocks:
        return _Blocks((self.requests[request_id],))
