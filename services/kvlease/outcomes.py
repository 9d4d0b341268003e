"""What became of a turn, as the words that spans, metrics, headers and logs share."""

from __future__ import annotations

from kvlease.v1 import common_pb2
from kvlease.v1.common_pb2 import Outcome

_PREFIX = "OUTCOME_"


def word(outcome: Outcome.ValueType) -> str:
    """``OUTCOME_MISS_PREFIX`` → ``"miss_prefix"``."""
    return Outcome.Name(outcome).removeprefix(_PREFIX).lower()


def from_word(text: str) -> Outcome.ValueType:
    """``"miss_prefix"`` → ``OUTCOME_MISS_PREFIX``. An unknown word is a ValueError."""
    return Outcome.Value(_PREFIX + text.upper())


ALL_WORDS = tuple(
    word(value) for value in Outcome.values() if value != common_pb2.OUTCOME_UNSPECIFIED
)
