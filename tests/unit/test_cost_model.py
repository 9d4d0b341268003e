"""The fit behind the pull policy: seconds as a sum of costs, from noisy samples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease_connector.cost_model import CostModel


def model() -> CostModel:
    return CostModel((1.0, 2000.0, 1 / 256), floor=64.0)


def step(tokens: float, depth: float) -> tuple[float, float, float]:
    return (tokens, tokens * (depth + tokens / 2), 1.0)


def truth(tokens: float, depth: float) -> float:
    """This machine's, with the small model."""
    return 0.01 + 0.85e-3 * tokens + 0.14e-6 * tokens * (depth + tokens / 2)


def bucket(tokens: float, depth: float) -> int:
    return (int(depth + tokens / 2) // 256).bit_length()


def test_nothing_is_predicted_before_the_first_sample() -> None:
    assert model().predict(step(100, 0)) is None


def test_one_sample_predicts_the_same_again_and_the_rest_in_proportion() -> None:
    fitted = model()
    fitted.add(step(1000, 0), 1.0, 1)
    assert fitted.predict(step(1000, 0)) == pytest.approx(1.0, rel=0.1)
    assert fitted.predict(step(4000, 0)) == pytest.approx(4.0, rel=0.15)


def test_few_samples_of_several_depths_tell_what_depth_costs() -> None:
    fitted = model()
    for tokens, depth in ((1500, 0), (300, 2000), (300, 4000), (2000, 0), (300, 8000)):
        fitted.add(step(tokens, depth), truth(tokens, depth), bucket(tokens, depth))
    for tokens, depth in ((2000, 0), (1000, 6000), (8000, 0), (300, 12_000)):
        predicted = fitted.predict(step(tokens, depth))
        assert predicted == pytest.approx(truth(tokens, depth), rel=0.25), (tokens, depth)


def test_noise_averages_out() -> None:
    noise = random.Random(1)
    fitted = model()
    for _ in range(300):
        tokens, depth = noise.randrange(50, 2000), noise.randrange(0, 12_000)
        seconds = truth(tokens, depth) * noise.uniform(0.7, 1.3)
        fitted.add(step(tokens, depth), seconds, bucket(tokens, depth))
    for tokens, depth in ((500, 0), (2000, 8000), (8000, 0)):
        predicted = fitted.predict(step(tokens, depth))
        assert predicted == pytest.approx(truth(tokens, depth), rel=0.3), (tokens, depth)


def test_a_sample_that_took_a_hundred_times_as_long_moves_little() -> None:
    fitted = model()
    for _ in range(20):
        fitted.add(step(1000, 0), 1.0, 1)
    fitted.add(step(1000, 0), 100.0, 1)
    assert fitted.predict(step(1000, 0)) == pytest.approx(1.6, rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_lasting_change_is_learned_within_some_twenty_samples(factor: float) -> None:
    fitted = model()
    for _ in range(50):
        fitted.add(step(1000, 0), 1.0, 1)
    for _ in range(20):
        fitted.add(step(1000, 0), factor, 1)
    assert fitted.predict(step(1000, 0)) == pytest.approx(factor, rel=0.3)


def test_many_short_prompts_do_not_wash_away_what_long_ones_cost() -> None:
    fitted = model()
    for depth in (0, 8000, 8000, 8000, 8000, 8000):
        fitted.add(step(500, depth), truth(500, depth), bucket(500, depth))
    for _ in range(1000):
        fitted.add(step(200, 0), truth(200, 0), bucket(200, 0))
    assert fitted.predict(step(500, 8000)) == pytest.approx(truth(500, 8000), rel=0.3)


def test_work_that_took_no_time_or_was_none_is_no_sample() -> None:
    fitted = model()
    fitted.add(step(1000, 0), 0.0, 1)
    fitted.add(step(1000, 0), -1.0, 1)
    fitted.add((0.0, 0.0, 1.0), 1.0, 1)
    assert fitted.samples == 0


amounts = st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1e-6, 1e4))


@given(st.lists(amounts, min_size=1, max_size=40), amounts)
def test_predictions_are_never_negative_and_grow_with_the_work(
    samples: list[tuple[int, int, float]], asked: tuple[int, int, float]
) -> None:
    fitted = model()
    for tokens, depth, seconds in samples:
        fitted.add(step(tokens, depth), seconds, bucket(tokens, depth))
    tokens, depth, _ = asked
    predicted = fitted.predict(step(tokens, depth))
    assert predicted is not None
    assert predicted >= 0
    for more in (step(tokens + 1, depth), step(tokens, depth + 100)):
        assert (fitted.predict(more) or 0.0) >= predicted
    assert min(fitted.coefficients or (-1.0,)) >= 0
    assert max(fitted.coefficients or (0.0,)) > 0
