"""What work costs, learned from what it took: a small least-squares fit that forgets.

Pure: no clock, no I/O. Not thread-safe, except that :attr:`CostModel.coefficients` is
replaced whole and may be read from any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

RECENT = 0.2
"""Weight of a new sample in the average of its bucket: about the last nine count."""

_FULL_BUCKET = 5
"""Samples that give a bucket its full weight."""

_AGE = 0.95
"""A bucket's weight falls by this with each sample that goes to another one ..."""

_LEAST = 0.02
"""... and never below this: what was once seen of long prompts is better than nothing."""

_OUTLIER = 4.0
"""A sample counts as no further than this factor from its bucket's average. A process that
was stopped for a second moves the average little; a lasting change moves it within a few
samples."""

_PRIOR = 0.02
"""How much of a sample the belief weighs that secondary terms are zero. With one sample
all cost goes to the first term; terms that make a difference are seen at once."""


@dataclass(slots=True)
class _Bucket:
    """Averages over the samples of one kind of work."""

    gram: list[float]
    moments: list[float]
    rate: float = 0.0
    count: int = 0
    last: int = 0
    """The number of its latest sample, among all of the model's."""


@dataclass(slots=True)
class CostModel:
    """Fits ``seconds = sum(coefficient * amount)`` with coefficients of 0 or more.

    ``units``: of each amount, how much may cost about the same, by which they are compared;
    the first is the main one. Errors count relative to the size of the work (its main
    amount plus ``floor``, in units), so that long pieces of work do not drown short ones.

    Samples are averaged in buckets, by kind of work: a run of short prompts does not wash
    away what is known of long ones. A sample costs a time that does not grow with their
    number.
    """

    units: Sequence[float]
    floor: float
    coefficients: tuple[float, ...] | None = None
    """Seconds for one of each amount; None before the first sample."""
    samples: int = 0
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def add(self, amounts: Sequence[float], seconds: float, bucket: int) -> None:
        """Work of these ``amounts`` took so long. ``bucket``: its kind."""
        if seconds <= 0 or amounts[0] <= 0:
            return
        size = amounts[0] / self.units[0] + self.floor
        row = [amount / unit / size for amount, unit in zip(amounts, self.units, strict=True)]
        self.samples += 1
        found = self._buckets.get(bucket)
        if found is None:
            width = len(row)
            found = self._buckets[bucket] = _Bucket([0.0] * width**2, [0.0] * width)
        rate = seconds / size
        if found.count >= 3:
            rate = min(max(rate, found.rate / _OUTLIER), found.rate * _OUTLIER)
        found.count += 1
        found.last = self.samples
        share = max(1.0 / found.count, RECENT)
        found.rate += share * (rate - found.rate)
        for i, one in enumerate(row):
            found.moments[i] += share * (one * rate - found.moments[i])
            for j, other in enumerate(row):
                k = i * len(row) + j
                found.gram[k] += share * (one * other - found.gram[k])
        self.coefficients = self._fit()

    def predict(self, amounts: Sequence[float]) -> float | None:
        """Seconds for work of these amounts; None before the first sample. Any thread."""
        coefficients = self.coefficients
        if coefficients is None:
            return None
        return sum(c * amount for c, amount in zip(coefficients, amounts, strict=True))

    def _fit(self) -> tuple[float, ...]:
        width = len(self.units)
        gram, moments = [0.0] * width**2, [0.0] * width
        for bucket in self._buckets.values():
            weight = max(_LEAST, _AGE ** (self.samples - bucket.last))
            weight *= min(bucket.count, _FULL_BUCKET) / _FULL_BUCKET
            for k, value in enumerate(bucket.gram):
                gram[k] += weight * value
            for k, value in enumerate(bucket.moments):
                moments[k] += weight * value
        # In units, all columns are comparable with the main one.
        main = gram[0]
        for i in range(width):
            gram[i * width + i] += main * (_PRIOR if i else 1e-9)
        fitted = _non_negative(gram, moments)
        return tuple(c / unit for c, unit in zip(fitted, self.units, strict=True))


def _non_negative(gram: Sequence[float], moments: Sequence[float]) -> list[float]:
    """The least-squares solution with no negative part: the best of those in which some
    terms are left out. (With three terms there are seven; the first that is tried, with
    all terms, is usually it.)"""
    width = len(moments)
    best, best_gain = [0.0] * width, 0.0
    for count in range(width, 0, -1):
        for terms in itertools.combinations(range(width), count):
            solved = _solve(
                [[gram[i * width + j] for j in terms] for i in terms], [moments[i] for i in terms]
            )
            if solved is None or min(solved) < 0:
                continue
            gain = sum(value * moments[i] for value, i in zip(solved, terms, strict=True))
            if gain > best_gain:
                best = [0.0] * width
                for value, i in zip(solved, terms, strict=True):
                    best[i] = value
                best_gain = gain
            if count == width:
                return best
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss without pivots, for a symmetric positive definite matrix; None if it is so
    nearly singular that nothing can be told."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i]
        if pivot <= 0:
            return None
        for k in range(i + 1, size):
            factor = matrix[k][i] / pivot
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * right[j] for j in range(i + 1, size))
        right[i] = (right[i] - rest) / matrix[i][i]
    return right
