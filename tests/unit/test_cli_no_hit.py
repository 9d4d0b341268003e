"""What `kvlease talk` says of turns that were no hits."""

from __future__ import annotations

import pytest

from kvlease.cli.talk import Turn, no_hit


@pytest.mark.parametrize(
    ("outcome", "prompt_tokens", "short"),
    [
        ("miss_prefix", 400, True),
        ("miss_prefix", 4000, False),
        ("miss_short", 4000, True),
        ("miss_timeout", 400, False),
    ],
)
def test_a_conversation_that_may_be_too_short_is_told_what_to_do(
    outcome: str, prompt_tokens: int, short: bool
) -> None:
    turns = [
        Turn(1, prompt_tokens, 0, "miss_no_lease", 0.1, "a" * 32),
        Turn(2, prompt_tokens + 300, 0, outcome, 0.1, "b" * 32),
    ]
    said = no_hit(turns)
    assert f"no turn was a hit, but {outcome}" in said
    assert ("try a larger --size" in said) == short
