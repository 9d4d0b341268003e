"""What counts as the same answer, what the demo writes, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

from kvlease.cli import demo_report as report
from kvlease.cli.chat import Answer, Token

PROBABLE = {"a": -0.5, "b": -1.5, "c": -3.0}


def answer(*tokens: Token, outcome: str = "hit", ttft_s: float = 1.0, reused: int = 0) -> Answer:
    return Answer(outcome, reused, 6100, ttft_s, tokens or (Token("a", PROBABLE),))


def turn(
    number: int, *, outcome: str = "hit", on_s: float = 0.5, off_s: float = 5.0
) -> report.Turn:
    return report.Turn(
        number,
        on=[answer(outcome=outcome, ttft_s=on_s + i, reused=5800 - i) for i in (0, 1, 0)],
        off=[answer(outcome="off", ttft_s=off_s)] * 3,
    )


def test_rounding_is_no_difference() -> None:
    moved = Token("a", {"a": -0.5002, "b": -1.5001, "c": -2.9996})
    assert report.difference(answer(), answer(moved)) == ""


def test_another_logprob_of_the_first_token_is_a_difference_even_with_the_same_text() -> None:
    moved = Token("a", {"a": -0.5, "b": -1.502, "c": -3.0})
    assert "logprob of 'b' differs by 0.0020" in report.difference(answer(), answer(moved))


def test_another_candidate_for_the_first_token_is_a_difference() -> None:
    moved = Token("a", {"a": -0.5, "d": -1.0, "c": -3.0})
    assert "'b' is a candidate" in report.difference(answer(), answer(moved))


def test_the_last_of_equally_likely_candidates_may_change() -> None:
    moved = Token("a", {"a": -0.5, "b": -1.5, "d": -3.0003})
    assert report.difference(answer(), answer(moved)) == ""


def test_another_token_is_a_difference() -> None:
    first = Token("a", PROBABLE)
    computed = answer(first, Token("x", {"x": -0.5, "y": -0.6}))
    reused = answer(first, Token("y", {"y": -0.5, "x": -0.6}))
    assert "token 2 is 'y' where recomputation says 'x'" in report.difference(computed, reused)


def test_a_tie_may_fall_either_way_and_what_follows_is_not_compared() -> None:
    first = Token("a", PROBABLE)
    computed = answer(first, Token("x", {"x": -0.7, "y": -0.701}), Token("p", {"p": -0.1}))
    reused = answer(first, Token("y", {"y": -0.7, "x": -0.701}), Token("q", {"q": -0.1}))
    assert report.difference(computed, reused) == ""


def test_a_shorter_answer_is_a_difference() -> None:
    first = Token("a", PROBABLE)
    assert "1 tokens where recomputation has 2" in report.difference(
        answer(first, first), answer(first)
    )


def test_results_have_the_promised_form(tmp_path: Path) -> None:
    turns = [turn(1, outcome="miss_no_lease"), turn(2)]
    files = report.write(turns, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == {
        "turns": [
            {
                "turn": number,
                "prompt_tokens": 6100,
                "reused_tokens": 5799,
                "outcome": outcome,
                "ttft_off_s": 5.0,
                "ttft_on_s": 0.5,
            }
            for number, outcome in ((1, "miss_no_lease"), (2, "hit"))
        ],
        "ratio_last": 10.0,
        "answers_equal": True,
    }
    assert len(json.loads((tmp_path / "samples.json").read_text())) == 12
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert all(file.exists() for file in files)


def test_the_first_turn_may_miss_and_no_other() -> None:
    turns = [turn(1, outcome="miss_no_lease"), turn(2), turn(3, outcome="miss_prefix")]
    assert report.misses(turns) == ["turn 3 was not a hit: miss_prefix"]


def test_one_miss_among_the_repeats_counts() -> None:
    both = report.Turn(2, on=[answer(), answer(outcome="miss_timeout")], off=[answer()] * 2)
    assert report.misses([turn(1), both]) == ["turn 2 was not a hit: miss_timeout"]
