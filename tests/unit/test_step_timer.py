"""How long steps took, as a scheduler sees them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvlease_connector.prefill_meter import PrefillMeter
from kvlease_connector.pull_policy import Chunk, PullPolicy
from kvlease_connector.step_timer import MAX_IN_FLIGHT, StepTimer, chunks_of

A, B = [Chunk("a", 100, 0)], [Chunk("b", 200, 50)]


def test_a_step_takes_from_its_plan_to_its_output() -> None:
    timer = StepTimer()
    timer.planned(A, 10.0)
    assert timer.output(10.5) == (A, 0.5)
    timer.handled(10.6)
    # an engine that idled meanwhile
    timer.planned(B, 20.0)
    assert timer.output(20.25) == (B, 0.25)


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_it_ends() -> None:
    timer = StepTimer()
    timer.planned(A, 10.0)
    timer.planned(B, 10.1)
    assert timer.output(11.0) == (A, 1.0)
    timer.handled(11.0)
    assert timer.output(13.0) == (B, 2.0)


def test_a_step_s_output_is_told_once() -> None:
    timer = StepTimer()
    timer.planned(A, 10.0)
    timer.planned(B, 10.0)
    assert timer.output(11.0) is not None
    assert timer.output(11.1) is None
    timer.handled(11.2)
    assert timer.output(12.0) == (B, 1.0)


def test_an_empty_step_tells_nothing_but_takes_its_place() -> None:
    timer = StepTimer()
    timer.planned([], 10.0)
    timer.planned(A, 10.1)
    assert timer.output(10.2) is None
    assert not timer.computes
    timer.handled(10.2)
    assert timer.output(10.7) == (A, pytest.approx(0.5))
    assert timer.computes


def test_a_lost_count_of_steps_is_begun_anew() -> None:
    timer = StepTimer()
    for number in range(MAX_IN_FLIGHT + 1):
        timer.planned(A, float(number))
    assert timer.output(MAX_IN_FLIGHT + 0.5) == (A, 0.5)
    timer.handled(100.0)
    assert timer.output(101.0) is None
    timer.handled(101.0)


def plan(**requests: tuple[int, int, bool]) -> Any:
    """vLLM's plan of a step: (tokens, depth, whether the request is new) by name."""
    old = {key: depth for key, (_, depth, new) in requests.items() if not new}
    return SimpleNamespace(
        num_scheduled_tokens={key: tokens for key, (tokens, _, _) in requests.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=key, num_computed_tokens=depth)
            for key, (_, depth, new) in requests.items()
            if new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(old), num_computed_tokens=list(old.values())
        ),
    )


def test_new_and_running_requests_are_chunks_at_their_depths() -> None:
    assert chunks_of(plan(a=(100, 0, True), b=(50, 300, True), c=(1, 900, False))) == [
        Chunk("a", 100, 0),
        Chunk("b", 50, 300),
        Chunk("c", 1, 900),
    ]
    assert chunks_of(plan()) == []


class Engine:
    """Steps of made-up lengths."""

    def __init__(self) -> None:
        self.now = 100.0
        self.policy = PullPolicy("adaptive", min_pull_tokens=64, kv_bytes_per_token=1)
        self.meter = PrefillMeter(self.policy, lambda: self.now)

    def step(self, seconds: float, **requests: tuple[int, int, bool]) -> None:
        self.meter.planned(plan(**requests))
        self.now += seconds
        self.meter.handled()

    def warm_up(self) -> None:
        for tokens in (1000, 1000, 2000):
            self.step(tokens / 1000, r=(tokens, 0, True))


def test_a_request_is_told_its_part_of_the_steps_that_computed_it() -> None:
    engine = Engine()
    engine.warm_up()
    engine.meter.follow("a")
    engine.step(1.5, a=(1000, 0, True), b=(500, 0, True))
    engine.step(0.25, a=(250, 1000, False))
    engine.step(5.0, b=(5000, 500, False))

    spent = engine.meter.leave("a")

    assert spent.seconds == pytest.approx(1.0 + 0.25, rel=0.05)
    assert spent.predicted_s == pytest.approx(1.25, rel=0.1)
    assert engine.meter.leave("a").seconds == 0


def test_without_earlier_steps_nothing_was_expected() -> None:
    engine = Engine()
    engine.meter.follow("a")
    engine.step(1.0, a=(500, 0, True), b=(500, 0, True))
    spent = engine.meter.leave("a")
    assert spent.seconds == pytest.approx(0.5)
    assert spent.predicted_s is None


def bounds(engine: Engine, started: float) -> Sequence[float]:
    engine.meter.output()
    return engine.meter.read_bounds(started)


def test_a_read_s_end_is_known_exactly_on_an_engine_that_only_waits() -> None:
    engine = Engine()
    started = engine.now
    for _ in range(5):
        engine.step(0.01)
    engine.meter.planned(plan())
    engine.now += 0.01
    assert bounds(engine, started) == pytest.approx((0.06, 0.06))


def test_a_read_may_have_ended_at_any_time_of_a_step_that_computes() -> None:
    engine = Engine()
    started = engine.now
    engine.step(0.5, r=(500, 0, True))
    engine.meter.planned(plan(r=(500, 500, False)))
    engine.now += 2.0
    assert bounds(engine, started) == pytest.approx((0.5, 2.5))
    # and at once, if the read began with that step
    assert bounds(engine, engine.now - 2.0) == pytest.approx((0.0, 2.0))
