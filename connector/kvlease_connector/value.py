"""What a lease is worth: the tokens it saves, times the chance that its turn still comes.

An engine that needs blocks gives up the leases that are worth least a block. What the
chance is estimated from, and why so, is in docs/retention.md; in short:

The pause between the end of a turn and the conversation's next one is taken to be
log-logistic: half of all pauses are shorter than the *median*, and the probability that
one lasts longer than ``t`` is ``S(t) = 1 / (1 + (t / median) ** shape)``. A part
``1 - returns`` of all pauses never ends. So, of a conversation whose pause has lasted for
``age``, the next turn comes within ``horizon`` more seconds with probability

    returns * (S(age) - S(age + horizon)) / (returns * S(age) + 1 - returns)

Pure: no I/O, no threads, no clock but the one passed in. Seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

PRIOR_MEDIAN_S = 60.0
PRIOR_SPREAD = math.pi / math.sqrt(3)
"""Standard deviation of ln(pause) that goes with ``shape`` 1."""
PRIOR_RETURNS = 0.8
"""Before there are observations: half of all pauses are shorter than a minute, their
lengths differ a lot (tools take seconds, people minutes), and of five turns four are
followed by another."""

PRIOR_WEIGHT = 4.0
"""So many observed pauses weigh as much as the prior."""
ENGINE_WEIGHT = 1.0
"""So many of its own pauses weigh as much, in a conversation's median, as all that the
engine has seen of others. (In its spread: :data:`PRIOR_WEIGHT`, as it takes more pauses
to know how much they differ.)"""

ENGINE_DECAY = 0.98
OWN_DECAY = 0.9
"""What an observation still counts once a later one is in: the engine remembers about
50 pauses, a conversation about 10."""

MIN_SHAPE, MAX_SHAPE = 0.5, 2.0
"""Pauses are never believed to be more regular than by a factor of 2.5 either way
(``shape`` 2). That also makes the chance fall with the age from the median on."""

MIN_PAUSE_S = 0.05
"""Shorter pauses count as this long; the estimate works with logarithms."""

MAX_CONVERSATIONS = 10_000
"""Conversations whose pauses are remembered; the one that was heard of least recently is
forgotten first."""


@dataclass(frozen=True, slots=True)
class Belief:
    """What is believed of a conversation's next pause."""

    median_s: float = PRIOR_MEDIAN_S
    shape: float = 1.0
    returns: float = PRIOR_RETURNS
    """The probability that the pause ends at all."""
    typical_s: float = PRIOR_MEDIAN_S
    """The median over all conversations of the engine."""

    def lasts(self, seconds: float) -> float:
        """The probability that a pause that does end lasts longer."""
        ratio: float = (max(0.0, seconds) / self.median_s) ** self.shape
        return 1.0 / (1.0 + ratio)

    def chance(self, age_s: float, left_s: float) -> float:
        """The probability that the next turn comes while the blocks are worth keeping for
        it: within the engine's typical pause, and before the retention is over in
        ``left_s``. (Blocks of a turn that comes in ten minutes serve several others by
        then.)"""
        horizon = min(self.typical_s, left_s)
        if horizon <= 0:
            return 0.0
        still = self.returns * self.lasts(age_s)
        later = self.returns * self.lasts(age_s + horizon)
        return (still - later) / (still + 1.0 - self.returns)


def keep_value(num_tokens: int, num_blocks: int, chance: float) -> float:
    """Tokens that keeping a block is expected to save."""
    return num_tokens * chance / max(1, num_blocks)


@dataclass(slots=True)
class _Average:
    """Mean and spread of values that count less the older they are."""

    decay: float
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * self.decay + 1.0
        off = value - self.mean
        self.mean += off / self.weight
        self.squares = self.squares * self.decay + off * (value - self.mean)

    def mean_with(self, prior: float, weight: float) -> float:
        return (self.weight * self.mean + weight * prior) / (self.weight + weight)

    def spread_with(self, prior: float, weight: float) -> float:
        return math.sqrt((self.squares + weight * prior**2) / (self.weight + weight))


@dataclass(slots=True)
class _Pause:
    began: float
    until: float
    """When its turn is not expected any more."""


@dataclass(slots=True)
class Pauses:
    """The pauses between turns that one engine sees. Not thread-safe.

    A pause begins when a turn ends here. It ends with the first sign of the conversation's
    next turn: a reader's ticket, or the request itself. One that has not ended when the
    blocks' retention is over counts as one that never ends.
    """

    _open: OrderedDict[Hashable, _Pause] = field(default_factory=OrderedDict)
    _own: OrderedDict[Hashable, _Average] = field(default_factory=OrderedDict)
    _all: _Average = field(default_factory=lambda: _Average(ENGINE_DECAY))
    _returned: _Average = field(default_factory=lambda: _Average(ENGINE_DECAY))

    def began(self, conversation: Hashable, now: float, retention_s: float) -> None:
        """A turn has ended."""
        self._open[conversation] = _Pause(now, now + retention_s)
        self._open.move_to_end(conversation)
        while len(self._open) > MAX_CONVERSATIONS:
            self._open.popitem(last=False)

    def ended(self, conversation: Hashable, now: float) -> None:
        """The next turn has come. Only the first sign of it counts."""
        pause = self._open.pop(conversation, None)
        if pause is None:
            return
        length = math.log(max(MIN_PAUSE_S, now - pause.began))
        self._all.add(length)
        self._returned.add(1.0)
        own = self._own.setdefault(conversation, _Average(OWN_DECAY))
        self._own.move_to_end(conversation)
        own.add(length)
        while len(self._own) > MAX_CONVERSATIONS:
            self._own.popitem(last=False)

    def forget(self, conversation: Hashable) -> None:
        """The client has said that no turn will come."""
        self._own.pop(conversation, None)
        self._open.pop(conversation, None)

    def age_s(self, conversation: Hashable, now: float) -> float | None:
        """How long the conversation's pause has lasted; None where there is none: its next
        turn is under way, or it is not known here."""
        pause = self._open.get(conversation)
        return None if pause is None else now - pause.began

    def give_up(self, now: float) -> None:
        """Counts pauses that are longer than their retention as never ending."""
        for conversation in [key for key, pause in self._open.items() if pause.until <= now]:
            del self._open[conversation]
            self._returned.add(0.0)

    def belief(self, conversation: Hashable) -> Belief:
        """What the conversation's own pauses and the engine's say; the prior without any."""
        mean = self._all.mean_with(math.log(PRIOR_MEDIAN_S), PRIOR_WEIGHT)
        spread = self._all.spread_with(PRIOR_SPREAD, PRIOR_WEIGHT)
        typical_s = math.exp(mean)
        own = self._own.get(conversation)
        if own is not None:
            mean = own.mean_with(mean, ENGINE_WEIGHT)
            spread = own.spread_with(spread, PRIOR_WEIGHT)
        shape = PRIOR_SPREAD / spread if spread > 0 else MAX_SHAPE
        return Belief(
            median_s=math.exp(mean),
            shape=min(MAX_SHAPE, max(MIN_SHAPE, shape)),
            returns=self._returned.mean_with(PRIOR_RETURNS, PRIOR_WEIGHT),
            typical_s=typical_s,
        )
