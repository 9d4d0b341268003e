"""Prompts' blocks that a prefill engine keeps until decode engines have fetched them. Only
vLLM's block pool is a fake."""

from __future__ import annotations

import pytest
from decode_engine import FakeManager

from kvlease_connector.blocks import BlockHolder
from kvlease_connector.handoffs import Handoffs

TOTAL = 10


@pytest.fixture
def pool() -> FakeManager:
    return FakeManager(TOTAL)


@pytest.fixture
def handoffs(pool: FakeManager) -> Handoffs:
    return Handoffs(BlockHolder(pool))  # type: ignore[arg-type]


def prefilled(
    pool: FakeManager, handoffs: Handoffs, name: str, *, reads: int = 1, free_at: float = 60.0
) -> None:
    """A request of three blocks has ended on the prefill engine."""
    pool.allocate(name, 3)
    handoffs.hold(name, [3], reads=reads, free_at=free_at)
    pool.free(name)


def test_a_prompts_blocks_are_free_once_every_reader_has_read_them(
    pool: FakeManager, handoffs: Handoffs
) -> None:
    prefilled(pool, handoffs, "r1", reads=2)
    handoffs.read({"r1": 1, "of-somebody-else": 1})
    assert pool.get_num_free_blocks() == TOTAL - 3
    handoffs.read({"r1": 1})
    assert pool.get_num_free_blocks() == TOTAL
    assert (len(handoffs), handoffs.retained_blocks) == (0, 0)


def test_a_prompt_that_a_decode_engine_refused_is_free_when_its_time_is_over(
    pool: FakeManager, handoffs: Handoffs
) -> None:
    # given two prompts, of which nobody comes to read the first
    prefilled(pool, handoffs, "refused", free_at=60.0)
    prefilled(pool, handoffs, "expected", free_at=90.0)
    handoffs.drain(59.9)
    assert pool.get_num_free_blocks() == TOTAL - 6
    # then its blocks count as free from its time on, also on an engine that makes no step
    assert (handoffs.expired(60.0), handoffs.expired_blocks(60.0)) == (1, 3)
    handoffs.drain(60.0)
    assert pool.get_num_free_blocks() == TOTAL - 3
    # and a reader that comes too late frees nothing twice
    handoffs.read({"refused": 1})
    assert (len(handoffs), handoffs.retained_blocks) == (1, 3)
