"""Measures a prefill engine's steps and reads for its pull policy, and tells each
followed request what its prompt has cost. Scheduler's thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlease_connector.pull_policy import Chunk, PullPolicy
from kvlease_connector.step_timer import StepTimer, chunks_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class Spent:
    """A request's share of the steps that computed it."""

    seconds: float = 0.0
    predicted_s: float | None = 0.0
    """What was expected when the steps began; None if nothing could be."""


class PrefillMeter:
    """Sees every step of the engine; a request as long as it is followed."""

    def __init__(self, policy: PullPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._timer = StepTimer()
        self._followed: dict[str, Spent] = {}

    def follow(self, request_id: str) -> None:
        """Adds up what a request costs from now on."""
        self._followed[request_id] = Spent()

    def leave(self, request_id: str) -> Spent:
        """What it has cost; it is followed no longer."""
        return self._followed.pop(request_id, None) or Spent()

    def planned(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM has planned a step."""
        self._timer.planned(chunks_of(scheduler_output), self._clock())

    def output(self) -> None:
        """The output of the oldest step is there. Calling it again does nothing."""
        measured = self._timer.output(self._clock())
        if measured is not None:
            self._share(*measured)
            self._policy.prefill.add(*measured)

    def handled(self) -> None:
        """All of that output has been handled."""
        self.output()
        self._timer.handled(self._clock())

    def read_bounds(self, started: float) -> tuple[float, float]:
        """Least and most seconds that a read took which the current step's output says to
        be over. A step that computes nothing lasts no time; else the read may have ended
        anywhen in it."""
        at_most = self._clock() - started
        if not self._timer.computes:
            return at_most, at_most
        return max(0.0, self._timer.handled_at - started), at_most

    def _share(self, chunks: Sequence[Chunk], seconds: float) -> None:
        if not any(chunk.request_id in self._followed for chunk in chunks):
            return
        cost = self._policy.prefill
        predicted = cost.step_s(chunks)
        weights = [cost.tokens_s(chunk) or 0.0 for chunk in chunks]
        total = sum(weights)
        if total <= 0:
            weights, total = [1.0] * len(chunks), float(len(chunks))
        for chunk, weight in zip(chunks, weights, strict=True):
            spent = self._followed.get(chunk.request_id)
            if spent is None:
                continue
            spent.seconds += seconds * weight / total
            if predicted is None or spent.predicted_s is None:
                spent.predicted_s = None
            else:
                spent.predicted_s += predicted * weight / total
