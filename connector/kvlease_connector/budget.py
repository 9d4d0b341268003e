"""How many blocks an engine keeps for leases, and which leases it gives up when those are
too many.

Leases share blocks with each other (forks of a history) and with requests that run (the
next turn finds the prompt in the engine's own prefix cache). So blocks are counted one by
one: giving a lease up brings back only those that nobody else has.

Pure: no I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Block(Protocol):
    """What is used of vLLM's ``KVCacheBlock``."""

    ref_cnt: int
    """References of requests and of leases; 0: free."""


@dataclass(slots=True)
class Retained:
    """The blocks that leases keep, each counted once. Not thread-safe."""

    _leases: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, blocks: Iterable[Block]) -> None:
        """A lease keeps these."""
        for block in blocks:
            self._leases[id(block)] = self._leases.get(id(block), 0) + 1

    def remove(self, blocks: Iterable[Block]) -> None:
        """It keeps them no longer."""
        for block in blocks:
            left = self._leases.pop(id(block)) - 1
            if left:
                self._leases[id(block)] = left

    def leases_of(self, block: Block) -> int:
        """How many leases keep a block."""
        return self._leases.get(id(block), 0)


class Release:
    """What comes back when some let go of their blocks, step by step.

    ``references(block)``: how many have to let go of a block until it is back.
    """

    def __init__(self, references: Callable[[Block], int]) -> None:
        self._references = references
        self._left: dict[int, int] = {}
        self.coming = 0
        """Blocks that come back."""

    def let_go(self, blocks: Iterable[Block]) -> None:
        """One more lets go of these."""
        for block in blocks:
            left = self._left.get(id(block))
            left = (self._references(block) if left is None else left) - 1
            self._left[id(block)] = left
            self.coming += left == 0

    def keep(self, blocks: Iterable[Block]) -> None:
        """Takes :meth:`let_go` back."""
        for block in blocks:
            self.coming -= self._left[id(block)] == 0
            self._left[id(block)] += 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A lease that may be given up, and what keeping it is worth a block."""

    lease_id: str
    blocks: Sequence[Block]
    value: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Leases to give up, cheapest first. ``coming``: the blocks that come back when they
    have gone, and those that are going already."""

    lease_ids: list[str]
    coming: int


def cheapest(
    candidates: Iterable[Candidate],
    *,
    needed: int,
    going: Iterable[Sequence[Block]],
    references: Callable[[Block], int],
) -> Choice:
    """The leases of least value that bring ``needed`` blocks back, together with the
    blocks of leases that are ``going`` already; all that bring any, if those are too few.

    ``references`` as in :class:`Release`.
    """
    release = Release(references)
    for blocks in going:
        release.let_go(blocks)
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda item: item.value):
        if release.coming >= needed:
            break
        release.let_go(candidate.blocks)
        chosen.append(candidate)
    # One may bring nothing back after all (others keep its blocks too), or not be needed
    # any more beside a dearer one that brings much: those stay, the dearest first.
    enough = min(needed, release.coming)
    staying = set()
    for candidate in reversed(chosen):
        release.keep(candidate.blocks)
        if release.coming >= enough:
            staying.add(candidate.lease_id)
        else:
            release.let_go(candidate.blocks)
    return Choice(
        [item.lease_id for item in chosen if item.lease_id not in staying], release.coming
    )
