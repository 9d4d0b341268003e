"""What a lease is worth: by its conversation's pauses, the engine's, and the prior."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import eviction

from kvlease_connector import value
from kvlease_connector.value import Belief, Pauses, keep_value

LEFT_S = 480.0

beliefs = st.builds(
    Belief,
    median_s=st.floats(0.1, 1000),
    shape=st.floats(value.MIN_SHAPE, value.MAX_SHAPE),
    returns=st.floats(0.0, 0.99),
    typical_s=st.floats(0.1, 1000),
)


def seen(*lengths_s: float, conversation: str = "c", pauses: Pauses | None = None) -> Pauses:
    """Pauses of these lengths, one after the other."""
    pauses = pauses or Pauses()
    now = 0.0
    for length_s in lengths_s:
        pauses.began(conversation, now, LEFT_S)
        now += length_s
        pauses.ended(conversation, now)
    return pauses


# --- the chance that the turn still comes -----------------------------------------------


def test_without_data_a_fresh_turn_is_expected_with_the_priors_chance() -> None:
    belief = Pauses().belief("c")
    assert belief.median_s == pytest.approx(value.PRIOR_MEDIAN_S)
    # half of those that come at all come within the median
    assert belief.chance(0.0, LEFT_S) == pytest.approx(value.PRIOR_RETURNS / 2)


def test_without_data_an_older_lease_is_worth_less() -> None:
    chances = [Belief().chance(age_s, LEFT_S) for age_s in (0, 10, 60, 300, 3000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[3] < chances[0] / 5


@given(beliefs, st.floats(1.0, 100.0), st.floats(1.01, 10.0))
def test_beyond_the_typical_pause_the_chance_only_falls(
    belief: Belief, times: float, longer: float
) -> None:
    age_s = belief.median_s * times
    older_s = age_s * longer
    left_s = 10_000.0
    assert belief.chance(older_s, left_s) <= belief.chance(age_s, left_s) + 1e-12


@given(beliefs, st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_chance_is_a_probability(belief: Belief, age_s: float, left_s: float) -> None:
    assert 0.0 <= belief.chance(age_s, left_s) <= 1.0


@given(beliefs, st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 1e3))
def test_less_time_left_is_less_chance(
    belief: Belief, age_s: float, left_s: float, more_s: float
) -> None:
    assert belief.chance(age_s, left_s) <= belief.chance(age_s, left_s + more_s) + 1e-12


def test_a_lease_whose_time_is_over_has_no_chance() -> None:
    assert Belief().chance(10.0, 0.0) == 0.0
    assert Belief().chance(10.0, -1.0) == 0.0


def test_a_turn_that_is_due_counts_more_than_one_that_has_just_ended() -> None:
    # given conversations that come back every 30 seconds, more or less
    pauses = seen(*[30.0, 25.0, 36.0] * 10)
    belief = pauses.belief("c")
    # then a lease is worth most shortly before its turn, and little long after
    assert belief.chance(20.0, LEFT_S) > belief.chance(0.0, LEFT_S)
    assert belief.chance(300.0, LEFT_S) < belief.chance(0.0, LEFT_S) / 3


# --- what is believed -------------------------------------------------------------------


def test_the_engines_pauses_move_what_is_believed_of_an_unknown_conversation() -> None:
    quick = seen(*[2.0] * 20, conversation="other")
    slow = seen(*[200.0] * 20, conversation="other")
    assert quick.belief("new").median_s < 10 < 100 < slow.belief("new").median_s


def test_a_conversations_own_pauses_beat_the_engines() -> None:
    # given an engine whose conversations come back in seconds, and one that takes minutes
    pauses = seen(*[2.0] * 100, conversation="others")
    seen(200.0, 220.0, 180.0, conversation="slow", pauses=pauses)
    # then that one is still expected after a minute, and another one is not
    slow, other = pauses.belief("slow"), pauses.belief("new")
    assert slow.median_s > 50
    assert other.median_s < 5
    assert slow.lasts(60.0) > 0.5 > 0.1 > other.lasts(60.0)


def test_one_own_pause_weighs_as_much_as_the_engine() -> None:
    pauses = seen(*[1.0] * 200, conversation="others")
    engine_s = pauses.belief("new").median_s
    seen(100.0, conversation="c", pauses=pauses)
    assert pauses.belief("c").median_s == pytest.approx((engine_s * 100.0) ** 0.5, rel=0.15)


def test_what_was_long_ago_counts_less() -> None:
    assert seen(*[300.0] * 50, *[3.0] * 30).belief("c").median_s < 10


def test_regular_pauses_make_a_steeper_guess_but_never_a_certain_one() -> None:
    regular, wild = seen(*[30.0] * 50), seen(*[1.0, 900.0] * 25)
    assert regular.belief("c").shape == value.MAX_SHAPE
    assert value.MIN_SHAPE <= wild.belief("c").shape < 1.0


def test_conversations_that_do_not_come_back_lower_the_chance() -> None:
    pauses = Pauses()
    for number in range(40):
        pauses.began(number, 0.0, LEFT_S)
    pauses.give_up(LEFT_S + 1)
    assert pauses.belief("c").returns < 0.2
    assert pauses.belief("c").chance(0.0, LEFT_S) < Belief().chance(0.0, LEFT_S) / 3


def test_a_pause_is_given_up_when_its_own_retention_is_over() -> None:
    pauses = Pauses()
    pauses.began("long", 0.0, 1000.0)
    pauses.began("short", 0.0, 10.0)
    pauses.give_up(11.0)
    assert pauses.age_s("long", 11.0) == 11.0
    assert pauses.age_s("short", 11.0) is None


def test_only_the_first_sign_of_a_turn_ends_its_pause() -> None:
    pauses = Pauses()
    pauses.began("c", 0.0, LEFT_S)
    pauses.ended("c", 10.0)
    once = pauses.belief("c")
    pauses.ended("c", 400.0)
    assert pauses.belief("c") == once
    assert pauses.age_s("c", 400.0) is None


def test_a_turn_of_an_unknown_conversation_tells_nothing() -> None:
    pauses = Pauses()
    pauses.ended("c", 10.0)
    assert pauses.belief("c") == Pauses().belief("c")


def test_a_conversation_that_was_ended_is_forgotten() -> None:
    pauses = seen(5.0, 5.0, conversation="c")
    pauses.began("c", 100.0, LEFT_S)
    pauses.forget("c")
    assert pauses.age_s("c", 101.0) is None
    assert pauses.belief("c") == pauses.belief("another")


def test_a_pause_without_length_is_a_short_one() -> None:
    assert seen(0.0, -1.0, 0.0).belief("c").median_s > 0.0


def test_only_so_many_conversations_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value, "MAX_CONVERSATIONS", 3)
    pauses = Pauses()
    for number in range(5):
        seen(10.0, conversation=str(number), pauses=pauses)
        pauses.began(str(number), 20.0, LEFT_S)
    assert pauses.age_s("1", 21.0) is None
    assert pauses.age_s("2", 21.0) == 1.0
    assert pauses.belief("1") == pauses.belief("unknown") != pauses.belief("4")


# --- the value --------------------------------------------------------------------------


def test_value_is_tokens_saved_a_block_times_the_chance() -> None:
    assert keep_value(1280, 10, 0.5) == 64.0
    assert keep_value(1153, 10, 0.5) < keep_value(1280, 10, 0.5)
    assert keep_value(1280, 10, 0.1) < keep_value(1280, 10, 0.5)


@pytest.mark.parametrize(
    ("spread", "variety", "times"),
    [(0.3, 0.0, 2.0), (0.7, 0.0, 1.5), (1.3, 0.0, 1.0), (0.5, 1.5, 1.4)],
)
def test_a_working_set_larger_than_the_budget_hits_more_often_than_oldest_first(
    spread: float, variety: float, times: float
) -> None:
    workload = eviction.Workload(spread, variety, conversations=30, in_all=120)
    ours, oldest = (
        sum(
            eviction.hits(workload, eviction.POLICIES[name], budget=6, seed=seed)
            for seed in range(3)
        )
        for name in ("least chance soon (kvlease)", "oldest first")
    )
    assert ours > times * oldest
