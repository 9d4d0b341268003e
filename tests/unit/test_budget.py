"""Which leases go, block by block."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvlease_connector.budget import Candidate, Choice, Release, Retained, cheapest


@dataclass(eq=False)
class Block:
    ref_cnt: int = 1


def blocks(count: int) -> list[Block]:
    return [Block() for _ in range(count)]


def references(block: Block) -> int:
    return block.ref_cnt


def choose(needed: int, *candidates: Candidate, going: tuple[list[Block], ...] = ()) -> Choice:
    return cheapest(candidates, needed=needed, going=going, references=lambda block: block.ref_cnt)


def test_the_cheapest_go_until_enough_blocks_come_back() -> None:
    chosen = choose(
        15,
        Candidate("fresh", blocks(10), 3.0),
        Candidate("old", blocks(10), 1.0),
        Candidate("middle", blocks(10), 2.0),
    )
    assert chosen == Choice(["old", "middle"], 20)


def test_nothing_goes_for_nothing() -> None:
    assert choose(0, Candidate("a", blocks(10), 1.0)) == Choice([], 0)


def test_too_few_blocks_are_better_than_none() -> None:
    assert choose(99, Candidate("a", blocks(10), 1.0)) == Choice(["a"], 10)


def test_blocks_that_are_coming_back_already_count() -> None:
    chosen = choose(10, Candidate("a", blocks(10), 1.0), going=(blocks(10),))
    assert chosen == Choice([], 10)


def test_a_lease_whose_blocks_a_request_uses_too_is_not_given_up_for_nothing() -> None:
    used = [Block(ref_cnt=2) for _ in range(10)]
    chosen = choose(5, Candidate("used", used, 1.0), Candidate("idle", blocks(10), 2.0))
    assert chosen == Choice(["idle"], 10)
    assert choose(5, Candidate("used", used, 1.0)) == Choice([], 0)


def test_leases_that_share_their_blocks_go_together_or_not_at_all() -> None:
    shared = [Block(ref_cnt=2) for _ in range(10)]
    one, two = Candidate("one", shared, 1.0), Candidate("two", shared, 2.0)
    assert choose(5, one, two) == Choice(["one", "two"], 10)
    assert choose(5, one, two, Candidate("cheap", blocks(5), 0.5)) == Choice(["cheap"], 5)


def test_a_cheap_lease_stays_where_a_dearer_one_is_needed_anyway() -> None:
    chosen = choose(10, Candidate("small", blocks(2), 1.0), Candidate("large", blocks(10), 2.0))
    assert chosen == Choice(["large"], 10)


def test_a_block_is_back_when_the_last_one_lets_go() -> None:
    block = Block(ref_cnt=3)
    release = Release(references)
    for coming in (0, 0, 1):
        release.let_go([block])
        assert release.coming == coming
    release.keep([block])
    assert release.coming == 0


def test_a_block_that_several_leases_keep_is_retained_once() -> None:
    retained, shared = Retained(), blocks(3)
    retained.add(shared)
    retained.add([*shared[:2], *blocks(1)])
    assert len(retained) == 4
    assert [retained.leases_of(block) for block in shared] == [2, 2, 1]
    retained.remove(shared)
    assert len(retained) == 3
    assert retained.leases_of(shared[2]) == 0


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1), st.floats(0, 1)), max_size=6),
    st.sets(st.integers(0, 9)),
    st.integers(0, 12),
)
def test_what_is_promised_comes_back_and_nobody_goes_for_nothing(
    leases: list[tuple[set[int], float]], running: set[int], needed: int
) -> None:
    # given leases and a request that share blocks
    pool = [Block(ref_cnt=0) for _ in range(10)]
    for numbers in (*(numbers for numbers, _ in leases), running):
        for number in numbers:
            pool[number].ref_cnt += 1
    candidates = [
        Candidate(str(index), [pool[n] for n in numbers], worth)
        for index, (numbers, worth) in enumerate(leases)
    ]
    free = sum(block.ref_cnt == 0 for block in pool)

    def freed(names: list[str]) -> int:
        left = {id(block): block.ref_cnt for block in pool}
        for candidate in candidates:
            if candidate.lease_id in names:
                for block in candidate.blocks:
                    left[id(block)] -= 1
        return sum(count == 0 for count in left.values()) - free

    # when some are chosen
    chosen = choose(needed, *candidates)
    # then so many blocks come back as was said, enough if all together bring enough
    everything = freed([candidate.lease_id for candidate in candidates])
    assert chosen.coming == freed(chosen.lease_ids) >= min(needed, everything)
    # and without any one of them it would be too few
    for name in chosen.lease_ids:
        rest = [other for other in chosen.lease_ids if other != name]
        assert freed(rest) < min(needed, everything)
