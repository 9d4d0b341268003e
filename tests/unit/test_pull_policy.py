"""Whether a pull is worth it, from measurements that a test makes up."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlease_connector.pull_policy import (
    EXPLORE_EVERY_S,
    EXPLORE_SHARE,
    MAX_SOURCES,
    Chunk,
    Mode,
    PullPolicy,
    Verdict,
)

BYTES_PER_TOKEN = 16_384
MEGABYTE = 2**20
FAST, SLOW = 1e9, 5e6
"""Bytes a second: a local network, and one that computing beats."""


def new_policy(mode: Mode = "adaptive") -> PullPolicy:
    return PullPolicy(mode, min_pull_tokens=64, kv_bytes_per_token=BYTES_PER_TOKEN)


def compute_s(tokens: int, depth: int = 0) -> float:
    """What this machine takes with the small model."""
    return 0.01 + 0.85e-3 * tokens + 0.14e-6 * tokens * (depth + tokens / 2)


def learn_prefill(policy: PullPolicy) -> None:
    for tokens, depth in ((500, 0), (1500, 0), (300, 1500), (300, 4000), (300, 8000), (2000, 0)):
        policy.prefill.add([Chunk("r", tokens, depth)], compute_s(tokens, depth))


def read(
    policy: PullPolicy,
    seconds: float,
    *,
    tokens: int = 2000,
    source: str = "d0",
    incarnation: str = "i1",
    at_least_s: float | None = None,
    now: float = 0.0,
) -> None:
    policy.read_started(source, incarnation, None, now)
    policy.read_ended(
        source,
        incarnation,
        tokens,
        None,
        at_least_s=seconds if at_least_s is None else at_least_s,
        at_most_s=seconds,
        now=now,
    )


def learn_reads(policy: PullPolicy, bytes_per_s: float, *, now: float = 0.0) -> None:
    for tokens in (500, 500, 2000, 4000):  # the first one does not count
        seconds = 0.02 + policy.bytes_of(tokens) / bytes_per_s
        read(policy, seconds, tokens=tokens, now=now)


def trained(bytes_per_s: float, mode: Mode = "adaptive") -> PullPolicy:
    policy = new_policy(mode)
    learn_prefill(policy)
    learn_reads(policy, bytes_per_s)
    return policy


def decide(
    policy: PullPolicy,
    tokens: int = 2000,
    *,
    local: int = 0,
    source: str = "d0",
    incarnation: str = "i1",
    now: float = 1.0,
) -> Verdict:
    return policy.decide(source, incarnation, local, local + tokens, now)


# --- the decision -----------------------------------------------------------------------


def test_a_fast_link_is_pulled_from_and_a_slow_one_is_not() -> None:
    assert decide(trained(FAST)).pull
    refused = decide(trained(SLOW))
    assert not refused.pull
    assert refused.predicted_pull_s == pytest.approx(0.02 + 2000 * BYTES_PER_TOKEN / SLOW, rel=0.3)
    assert refused.predicted_compute_s == pytest.approx(compute_s(2000), rel=0.3)


def test_a_refusal_names_both_predictions() -> None:
    verdict = decide(trained(SLOW))
    assert "2000 tokens from d0" in verdict.detail
    assert f"{verdict.predicted_pull_s:.4f} s" in verdict.detail
    assert f"{verdict.predicted_compute_s:.4f} s" in verdict.detail


def test_deep_tokens_are_worth_a_link_that_shallow_ones_are_not() -> None:
    # given a link that takes longer for a token than computing does at the beginning of
    # a prompt, and less than it does behind 8,000 tokens of context
    policy = trained(bytes_per_s=BYTES_PER_TOKEN / 1.5e-3)
    assert not decide(policy, 1000, local=0).pull
    assert decide(policy, 1000, local=8000).pull


def test_a_pull_s_fixed_cost_keeps_few_tokens_here() -> None:
    policy = new_policy()
    learn_prefill(policy)
    for tokens in (100, 100, 1000, 4000):
        read(policy, 0.3 + policy.bytes_of(tokens) / FAST, tokens=tokens)
    assert not decide(policy, 100).pull
    assert decide(policy, 4000).pull


@pytest.mark.parametrize("mode", ["adaptive", "threshold"])
def test_fewer_tokens_than_the_threshold_are_never_pulled(mode: Mode) -> None:
    verdict = decide(trained(FAST, mode), 63, local=128)
    assert not verdict.pull
    assert verdict.detail.startswith("63 tokens beyond the 128 in the local cache")


def test_always_pulls_a_single_token_but_not_none() -> None:
    policy = trained(SLOW, "always")
    assert policy.min_tokens == 1
    assert decide(policy, 1).pull
    assert not decide(policy, 0).pull


def test_a_threshold_pulls_whatever_was_measured_and_still_predicts() -> None:
    verdict = decide(trained(SLOW, "threshold"))
    assert verdict.pull
    assert verdict.predicted_pull_s is not None
    assert verdict.predicted_compute_s is not None
    assert verdict.predicted_pull_s > verdict.predicted_compute_s


def test_before_anything_is_measured_the_threshold_decides() -> None:
    policy = new_policy()
    assert decide(policy, 64) == Verdict(True)
    assert not decide(policy, 63).pull


def test_without_a_measure_of_computing_a_slow_link_is_pulled_from() -> None:
    policy = new_policy()
    learn_reads(policy, SLOW)
    assert decide(policy).pull


# --- sources ----------------------------------------------------------------------------


def test_an_engine_that_was_never_read_from_is_tried() -> None:
    policy = trained(SLOW)
    assert not decide(policy, source="d0").pull
    assert decide(policy, source="d1").pull


def test_a_new_start_of_an_engine_is_another_engine() -> None:
    policy = trained(SLOW)
    assert decide(policy, incarnation="i2").pull
    # and when it has been read from, nothing of the earlier one is left
    read(policy, 10.0, incarnation="i2")
    assert decide(policy, incarnation="i2").predicted_pull_s is None
    assert decide(policy, incarnation="i1").predicted_pull_s is None


def test_the_first_read_does_not_count_because_engines_shake_hands_before_it() -> None:
    policy = new_policy()
    learn_prefill(policy)
    read(policy, 30.0)
    assert decide(policy).predicted_pull_s is None
    read(policy, 0.05)
    assert decide(policy).predicted_pull_s == pytest.approx(0.05, rel=0.05)


def test_sources_that_are_not_read_from_any_more_are_forgotten() -> None:
    policy = new_policy()
    learn_prefill(policy)
    for number in range(MAX_SOURCES + 1):
        for _ in range(2):
            read(policy, 0.05, source=f"d{number}", now=float(number))
    assert decide(policy, source="d0").predicted_pull_s is None
    assert decide(policy, source="d1").predicted_pull_s is not None


# --- finding out that things got better -------------------------------------------------


def test_a_refused_source_is_tried_again_once_in_a_while() -> None:
    policy = trained(SLOW)
    assert not decide(policy, now=EXPLORE_EVERY_S - 1).pull

    tried = decide(policy, now=EXPLORE_EVERY_S + 1)
    assert tried.pull
    assert tried.explores

    # by one turn, not by all that come meanwhile
    policy.read_started("d0", "i1", tried, EXPLORE_EVERY_S + 1)
    assert not decide(policy, now=EXPLORE_EVERY_S + 2).pull


def test_trying_again_costs_a_small_part_of_the_time() -> None:
    policy = trained(SLOW)
    tried = decide(policy, now=100.0)
    assert tried.explores
    policy.read_started("d0", "i1", tried, 100.0)
    excess = (tried.predicted_pull_s or 0) - (tried.predicted_compute_s or 0)
    assert excess / EXPLORE_SHARE > EXPLORE_EVERY_S
    assert not decide(policy, now=100.0 + 0.99 * excess / EXPLORE_SHARE).pull
    assert decide(policy, now=100.0 + 1.01 * excess / EXPLORE_SHARE).explores


def test_a_link_that_became_fast_is_used_again_with_the_first_try() -> None:
    policy = trained(SLOW)
    now = 0.0
    while not decide(policy, now=now).pull:
        now += 1.0
        assert now < 120, "it was never tried"
    # from then on every turn pulls: as long as tries pay off, the next one follows
    for _ in range(20):
        verdict = decide(policy, now=now)
        assert verdict.pull
        policy.read_started("d0", "i1", verdict, now)
        seconds = 0.02 + policy.bytes_of(2000) / FAST
        policy.read_ended(
            "d0", "i1", 2000, verdict, at_least_s=seconds, at_most_s=seconds, now=now + seconds
        )
        now += 1.0
    assert not decide(policy, now=now).explores


def test_a_try_that_was_slow_is_paid_for_by_a_long_pause() -> None:
    policy = trained(SLOW)
    verdict = decide(policy, now=100.0)
    policy.read_started("d0", "i1", verdict, 100.0)
    policy.read_ended("d0", "i1", 2000, verdict, at_least_s=9.0, at_most_s=9.0, now=109.0)
    pause = (9.0 - (verdict.predicted_compute_s or 0)) / EXPLORE_SHARE
    assert not decide(policy, now=109.0 + 0.99 * pause).pull
    assert decide(policy, now=109.0 + 1.01 * pause).explores


def test_an_engine_that_became_slow_is_pulled_from_again() -> None:
    # given an engine that computes faster than it could pull
    policy = new_policy()
    learn_reads(policy, 50e6)
    for _ in range(10):
        policy.prefill.add([Chunk("r", 2000, 0)], 0.2)
    assert not decide(policy).pull
    # when it becomes ten times slower
    for _ in range(20):
        policy.prefill.add([Chunk("r", 2000, 0)], 2.0)
    # then pulls are worth it
    assert decide(policy).pull


# --- measuring --------------------------------------------------------------------------


def test_a_read_that_ended_during_another_request_s_step_tells_only_what_is_sure() -> None:
    # given a read that takes 0.1 s
    policy = new_policy()
    for _ in range(5):
        read(policy, 0.1)
    # when later ones are seen to be over after steps of 2 s, it may have been 0.1 s again
    for _ in range(5):
        read(policy, 2.0, at_least_s=0.0)
    assert decide(policy).predicted_pull_s == pytest.approx(0.1, rel=0.05)
    # but if they were not over after 1 s, they took longer
    for _ in range(10):
        read(policy, 2.0, at_least_s=1.0)
    assert decide(policy).predicted_pull_s == pytest.approx(1.0, rel=0.2)


def test_a_vague_first_measure_is_none() -> None:
    policy = new_policy()
    for _ in range(5):
        read(policy, 2.0, at_least_s=0.0)
    assert decide(policy).predicted_pull_s is None


def test_an_engine_s_first_step_and_tiny_ones_do_not_count() -> None:
    policy = new_policy()
    policy.prefill.add([Chunk("r", 1000, 0)], 60.0)
    for _ in range(100):
        policy.prefill.add([Chunk(f"r{n}", 1, 5000) for n in range(8)], 0.05)
    assert policy.prefill.tokens_s(Chunk("", 100, 0)) is None


def test_a_step_s_cost_is_that_of_all_its_requests() -> None:
    policy = new_policy()
    learn_prefill(policy)
    both = [Chunk("a", 1000, 0), Chunk("b", 500, 4000)]
    expected = compute_s(1000) + compute_s(500, 4000)
    assert policy.prefill.step_s(both) == pytest.approx(expected, rel=0.25)


# --- before the claim -------------------------------------------------------------------


def test_a_prompt_that_is_computed_faster_than_a_claim_is_answered_is_not_claimed() -> None:
    policy = new_policy()
    for tokens in (1000, 1000, 2000):
        policy.prefill.add([Chunk("r", tokens, 0)], tokens * 10e-6)  # a GPU
    policy.claimed(0.005, now=0.0)
    refused = policy.before_claim(0, 300, now=1.0)
    assert not refused.pull
    assert "a claim alone would take 0.0050 s" in refused.detail
    assert policy.before_claim(0, 3000, now=1.0).pull
    assert not policy.before_claim(2800, 3000, now=1.0).pull
    # but now and then, since claims may have become faster
    assert policy.before_claim(0, 300, now=EXPLORE_EVERY_S + 1).explores
    assert not policy.before_claim(0, 300, now=EXPLORE_EVERY_S + 2).pull


@pytest.mark.parametrize("mode", ["threshold", "always"])
def test_other_policies_claim_whatever_it_takes(mode: Mode) -> None:
    policy = new_policy(mode)
    for _ in range(3):
        policy.prefill.add([Chunk("r", 1000, 0)], 0.001)
    policy.claimed(1.0, now=0.0)
    assert policy.before_claim(0, 300, now=1.0).pull


# --- whatever was measured --------------------------------------------------------------

steps = st.lists(
    st.tuples(st.integers(1, 20_000), st.integers(0, 200_000), st.floats(1e-5, 100)), max_size=20
)
reads = st.lists(st.tuples(st.integers(1, 200_000), st.floats(1e-5, 100)), max_size=20)


def after(
    measured_steps: list[tuple[int, int, float]], measured_reads: list[tuple[int, float]]
) -> PullPolicy:
    policy = new_policy()
    for tokens, depth, seconds in measured_steps:
        policy.prefill.add([Chunk("r", tokens, depth)], seconds)
    for tokens, seconds in measured_reads:
        read(policy, seconds, tokens=tokens)
    return policy


@given(steps, reads, st.integers(0, 100_000), st.integers(1, 50_000), st.integers(1, 50_000))
def test_more_tokens_are_never_a_reason_against_a_pull(
    measured_steps: list[tuple[int, int, float]],
    measured_reads: list[tuple[int, float]],
    local: int,
    tokens: int,
    more: int,
) -> None:
    policy = after(measured_steps, measured_reads)
    few = decide(policy, tokens, local=local)
    assume(few.pull)
    if few.predicted_pull_s is not None and few.predicted_compute_s is not None:
        assume(few.predicted_pull_s < 0.999999 * few.predicted_compute_s)
    assert decide(policy, tokens + more, local=local).pull


@given(steps, reads, st.integers(64, 50_000), st.floats(1.01, 100))
def test_a_slower_link_is_never_a_reason_for_a_pull(
    measured_steps: list[tuple[int, int, float]],
    measured_reads: list[tuple[int, float]],
    tokens: int,
    factor: float,
) -> None:
    slower = [(size, seconds * factor) for size, seconds in measured_reads]
    if not decide(after(measured_steps, measured_reads), tokens).pull:
        assert not decide(after(measured_steps, slower), tokens).pull


@given(steps, reads, st.integers(64, 50_000), st.integers(0, 100_000), st.integers(1, 100_000))
def test_deeper_tokens_are_never_less_worth_a_pull(
    measured_steps: list[tuple[int, int, float]],
    measured_reads: list[tuple[int, float]],
    tokens: int,
    local: int,
    deeper: int,
) -> None:
    policy = after(measured_steps, measured_reads)
    if decide(policy, tokens, local=local).pull:
        assert decide(policy, tokens, local=local + deeper).pull
