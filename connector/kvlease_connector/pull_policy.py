"""Is a pull worth it? The rules, and the moving averages that they go by.

Pure: the time is passed in. See docs/pulling.md for the model in words.

The scheduler's thread measures and may decide; :meth:`PullPolicy.decide` may also be
called from another thread, because it only reads values that are replaced whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvlease_connector.cost_model import CostModel

Mode = Literal["adaptive", "threshold", "always", "never"]

MIN_STEP_TOKENS = 16
"""Steps of fewer tokens say nothing of prefill speed: they are an engine's fixed costs."""

EXPLORE_EVERY_S = 30.0
"""What was found to be too slow is tried again after this, at the earliest ..."""

EXPLORE_SHARE = 0.05
"""... and so seldom that tries cost no more than this part of the time."""

MAX_SOURCES = 256
"""Engines that are remembered; the one that was read from least recently goes first."""

_DEPTH_UNIT = 2000.0
"""Tokens of context whose attention costs about as much as the rest of the model does: a
few thousand for most models. Only a scale: the true value is fitted."""

_STEP_UNIT = 1 / 256
"""A step by itself may cost as much as so many tokens in it. Only a scale, too."""

_READ_UNIT = float(2**20)
_READ_OVERHEAD_UNIT = 1 / 4
"""A read by itself may cost as much as so many megabytes of it. Only a scale, too."""

_SMALL_STEP, _SMALL_READ = 64.0, 1.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computes of one request: ``num_tokens`` after ``depth`` others."""

    request_id: str
    num_tokens: int
    depth: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to pull, and what was expected. A prediction is None where nothing has been
    measured yet."""

    pull: bool
    predicted_pull_s: float | None = None
    predicted_compute_s: float | None = None
    detail: str = ""
    """Why not."""
    explores: bool = False
    """It is expected to be slower, and done to find out whether it still is."""

    def attributes(self) -> dict[str, float | bool]:
        """For a span."""
        known: dict[str, float | bool] = {}
        if self.predicted_pull_s is not None:
            known["kvlease.predicted_pull_s"] = self.predicted_pull_s
        if self.predicted_compute_s is not None:
            known["kvlease.predicted_compute_s"] = self.predicted_compute_s
        if self.explores:
            known["kvlease.explores"] = True
        return known


@dataclass(slots=True)
class _Source:
    """What is known of reads from one start of one engine."""

    incarnation: str
    cost: CostModel = field(
        default_factory=lambda: CostModel((_READ_UNIT, _READ_OVERHEAD_UNIT), floor=_SMALL_READ)
    )
    reads: int = 0
    explore_at: float = 0.0
    used_at: float = 0.0


class PrefillCost:
    """How long this engine computes: ``a`` for a token, ``b`` for each token before it
    (attention reads them all), and something for a step."""

    def __init__(self) -> None:
        self._model = CostModel((1.0, _DEPTH_UNIT, _STEP_UNIT), floor=_SMALL_STEP)
        self._steps = 0

    @property
    def samples(self) -> int:
        return self._model.samples

    def add(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step computed these."""
        tokens = sum(chunk.num_tokens for chunk in chunks)
        if tokens < MIN_STEP_TOKENS:
            return
        self._steps += 1
        if self._steps == 1:
            return  # an engine's first step warms it up
        attention = sum(map(_attention, chunks))
        self._model.add((tokens, attention, 1.0), seconds, _octave(attention / tokens, 256))

    def step_s(self, chunks: Sequence[Chunk]) -> float | None:
        """Expected seconds of a whole step."""
        tokens = sum(chunk.num_tokens for chunk in chunks)
        return self._model.predict((tokens, sum(map(_attention, chunks)), 1.0))

    def tokens_s(self, chunk: Chunk) -> float | None:
        """Expected seconds by which a step is longer because of this."""
        if chunk.num_tokens <= 0:
            return 0.0
        return self._model.predict((chunk.num_tokens, _attention(chunk), 0.0))


class PullPolicy:
    """One prefill engine's."""

    def __init__(self, mode: Mode, *, min_pull_tokens: int, kv_bytes_per_token: int) -> None:
        self.mode = mode
        self.min_tokens = 1 if mode == "always" else min_pull_tokens
        """Fewer reusable tokens are never pulled."""
        self.prefill = PrefillCost()
        self._bytes_per_token = kv_bytes_per_token
        self._sources: dict[str, _Source] = {}
        self._claims = CostModel((1.0,), floor=0.0)
        self._claim_at = 0.0

    # --- the decision -----------------------------------------------------------------

    def before_claim(self, num_local: int, num_prompt: int, now: float) -> Verdict:
        """Whether to ask for a lease at all: not if the answer takes longer than to compute
        the whole prompt, in which case no source is fast enough. Scheduler's thread."""
        compute_s = self.prefill.tokens_s(Chunk("", num_prompt - num_local, num_local))
        if self.mode != "adaptive" or compute_s is None:
            return Verdict(True, None, compute_s)
        claim_s = self._claims.predict((1.0,))
        if claim_s is None or claim_s < compute_s:
            return Verdict(True, None, compute_s)
        if now >= self._claim_at:
            self._claim_at = now + EXPLORE_EVERY_S
            return Verdict(True, None, compute_s, explores=True)
        detail = f"a claim alone would take {claim_s:.4f} s, computing all {compute_s:.4f} s"
        return Verdict(False, None, compute_s, detail)

    def decide(
        self, engine_id: str, incarnation: str, num_local: int, num_usable: int, now: float
    ) -> Verdict:
        """Whether to read ``num_usable`` proven tokens, of which the first ``num_local`` are
        here already, from one start of an engine. Any thread."""
        count = num_usable - num_local
        if count < self.min_tokens:
            return Verdict(False, detail=self._too_few(count, num_local))
        pull_s = self._pull_s(engine_id, incarnation, count)
        compute_s = self.prefill.tokens_s(Chunk("", count, num_local))
        if self.mode != "adaptive" or pull_s is None or compute_s is None or pull_s < compute_s:
            return Verdict(True, pull_s, compute_s)
        source = self._sources.get(engine_id)
        if source is None or now >= source.explore_at:
            return Verdict(True, pull_s, compute_s, explores=True)
        detail = (
            f"a pull of {count} tokens from {engine_id} would take {pull_s:.4f} s, "
            f"computing them {compute_s:.4f} s"
        )
        return Verdict(False, pull_s, compute_s, detail)

    def _too_few(self, count: int, num_local: int) -> str:
        return (
            f"{count} tokens beyond the {num_local} in the local cache, and fewer than "
            f"{self.min_tokens} are not pulled"
        )

    def _pull_s(self, engine_id: str, incarnation: str, num_tokens: int) -> float | None:
        source = self._sources.get(engine_id)
        if source is None or source.incarnation != incarnation:
            return None
        return source.cost.predict((self.bytes_of(num_tokens), 1.0))

    def bytes_of(self, num_tokens: int) -> int:
        """Bytes of KV cache of so many tokens."""
        return num_tokens * self._bytes_per_token

    # --- measurements, from the scheduler's thread --------------------------------------

    def claimed(self, seconds: float, now: float) -> None:
        """A claim was answered after so long, by a hit or a miss."""
        self._claims.add((1.0,), seconds, 0)
        self._claim_at = now + EXPLORE_EVERY_S

    def read_started(
        self, engine_id: str, incarnation: str, verdict: Verdict | None, now: float
    ) -> None:
        """A read begins. The source is not explored again at the same time."""
        source = self._source(engine_id, incarnation, now)
        source.used_at = now
        source.explore_at = now + EXPLORE_EVERY_S
        if verdict and verdict.predicted_pull_s is not None:
            source.explore_at = _next_try(verdict, verdict.predicted_pull_s, now)

    def read_ended(
        self,
        engine_id: str,
        incarnation: str,
        num_tokens: int,
        verdict: Verdict | None,
        *,
        at_least_s: float,
        at_most_s: float,
        now: float,
    ) -> None:
        """A read has brought its blocks, within ``at_least_s`` to ``at_most_s``: an engine
        looks between two steps only, and a step may compute other requests for seconds.
        Of what is between the two, the nearest to what was expected counts."""
        source = self._source(engine_id, incarnation, now)
        if verdict:
            source.explore_at = _next_try(verdict, at_most_s, now)
        source.reads += 1
        if source.reads == 1:
            return  # the first read waits for the two engines to shake hands
        size = self.bytes_of(num_tokens)
        expected = source.cost.predict((size, 1.0))
        if expected is None:
            if at_least_s < at_most_s / 2:
                return  # too vague to begin with
            expected = at_most_s
        seconds = min(max(expected, at_least_s), at_most_s)
        source.cost.add((size, 1.0), seconds, _octave(size, 2**20) // 2)

    def _source(self, engine_id: str, incarnation: str, now: float) -> _Source:
        """What is known of an engine. A new start of it is another engine."""
        source = self._sources.get(engine_id)
        if source is not None and source.incarnation == incarnation:
            return source
        if source is None and len(self._sources) >= MAX_SOURCES:
            del self._sources[min(self._sources, key=lambda key: self._sources[key].used_at)]
        source = self._sources[engine_id] = _Source(incarnation, used_at=now)
        return source


def _next_try(verdict: Verdict, pull_s: float, now: float) -> float:
    """When a source may be explored again after a pull that takes ``pull_s``: at once if
    the pull pays off."""
    if verdict.predicted_compute_s is None:
        return now + EXPLORE_EVERY_S
    excess = pull_s - verdict.predicted_compute_s
    return now + max(EXPLORE_EVERY_S, excess / EXPLORE_SHARE) if excess > 0 else now


def _attention(chunk: Chunk) -> float:
    """Pairs of a token and one before it."""
    return chunk.num_tokens * (chunk.depth + chunk.num_tokens / 2)


def _octave(amount: float, unit: int) -> int:
    """0 below ``unit``, then one more for each doubling."""
    return (int(amount) // unit).bit_length()
