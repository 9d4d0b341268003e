"""How long an engine's steps take, from what a connector's scheduler side sees of them.

vLLM plans a step, has it computed, and then handles its output; with asynchronous
scheduling it plans the next one meanwhile (vllm/v1/engine/core.py). Steps are computed in
the order in which they were planned. So a step has taken the time from its planning, or
from the end of the one before it if that was later, to its output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlease_connector.pull_policy import Chunk

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MAX_IN_FLIGHT = 64
"""Far more steps than vLLM plans ahead. Beyond it the count of steps has been lost."""


@dataclass(slots=True)
class _Step:
    planned_at: float
    chunks: Sequence[Chunk]
    is_over: bool = False


class StepTimer:
    """Call :meth:`planned` and :meth:`handled` once for each step, in order, and
    :meth:`output` as often as wanted in between."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._end_of_last = 0.0
        self.handled_at = 0.0
        """When the output of the last step had been handled."""
        self.computes = False
        """Whether the step whose output is handled now computed anything."""

    def planned(self, chunks: Sequence[Chunk], now: float) -> None:
        """A step is about to run. ``chunks``: what it computes, may be nothing."""
        if len(self._steps) >= MAX_IN_FLIGHT:
            self._steps.clear()
        self._steps.append(_Step(now, chunks))

    def output(self, now: float) -> tuple[Sequence[Chunk], float] | None:
        """The output of the oldest step is there: what it computed, and in how many
        seconds. None if that was told before, or if it computed nothing."""
        if not self._steps or self._steps[0].is_over:
            return None
        step = self._steps[0]
        step.is_over = True
        self.computes = bool(step.chunks)
        started = max(step.planned_at, self._end_of_last)
        self._end_of_last = now
        return (step.chunks, now - started) if step.chunks else None

    def handled(self, now: float) -> None:
        """All of the oldest step's output has been handled."""
        if self._steps:
            self._steps.popleft()
        self.computes = False
        self.handled_at = now


def chunks_of(planned: SchedulerOutput) -> list[Chunk]:
    """What vLLM's plan of a step computes of each request."""
    counts = planned.num_scheduled_tokens
    if not counts:
        return []
    cached = planned.scheduled_cached_reqs
    depths = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    depths.update({new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs})
    return [Chunk(key, count, depths.get(key, 0)) for key, count in counts.items()]
