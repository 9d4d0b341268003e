"""What the demo makes of its measurements: rules, results.json, table, plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvlease.cli import tables
from kvlease.cli.chat import Answer

LOGPROB_TOLERANCE = 1e-3
"""float32 sums in another order differ by about 1e-5 here; wrong blocks by 0.1 and more."""


@dataclass(frozen=True)
class Turn:
    """One turn: the same prompt several times with reuse, and several times without."""

    number: int
    on: Sequence[Answer]
    off: Sequence[Answer]

    @property
    def prompt_tokens(self) -> int:
        return self.on[0].prompt_tokens

    @property
    def reused_tokens(self) -> int:
        """The fewest of all repeats."""
        return min(answer.reused_tokens for answer in self.on)

    @property
    def outcome(self) -> str:
        """That of all repeats with reuse; if they differ, the first that is not a hit."""
        return next((a.outcome for a in self.on if a.outcome != "hit"), "hit")

    @property
    def ttft_on_s(self) -> float:
        """Median."""
        return statistics.median(answer.ttft_s for answer in self.on)

    @property
    def ttft_off_s(self) -> float:
        """Median."""
        return statistics.median(answer.ttft_s for answer in self.off)

    @property
    def ratio(self) -> float:
        return self.ttft_off_s / self.ttft_on_s


def difference(computed: Answer, reused: Answer) -> str:
    """Why the two answers to one prompt are not the same answer; empty if they are.

    They are when the first token's most likely candidates have the same logprobs within
    the tolerance, and the texts are equal up to a token where the computed answer's two
    candidates were as likely as each other (rounding decides such a tie).
    """
    first, other = computed.tokens[0].top, reused.tokens[0].top
    common = first.keys() & other.keys()
    # Candidates that are equally likely may change places at the end of the list.
    floor = max(min(first.values()), min(other.values())) + LOGPROB_TOLERANCE
    for token in sorted(first.keys() | other.keys()):
        if token in common:
            distance = abs(first[token] - other[token])
            if distance > LOGPROB_TOLERANCE:
                return f"the first token's logprob of {token!r} differs by {distance:.4f}"
        elif first.get(token, other.get(token, 0.0)) > floor:
            return f"{token!r} is a candidate for the first token in one answer only"
    for position, (one, two) in enumerate(zip(computed.tokens, reused.tokens, strict=False)):
        if one.text == two.text:
            continue
        gap = one.top[one.text] - one.top.get(two.text, float("-inf"))
        if gap <= 2 * LOGPROB_TOLERANCE:
            return ""
        return f"token {position + 1} is {two.text!r} where recomputation says {one.text!r}"
    if len(computed.tokens) != len(reused.tokens):
        return f"{len(reused.tokens)} tokens where recomputation has {len(computed.tokens)}"
    return ""


def differences(turns: Sequence[Turn]) -> list[str]:
    """Every answer with reuse against the first recomputed one of its turn."""
    return [
        f"turn {turn.number}: {why}"
        for turn in turns
        for answer in (*turn.on, *turn.off[1:])
        if (why := difference(turn.off[0], answer))
    ]


def misses(turns: Sequence[Turn]) -> list[str]:
    """Turns after the first that were not hits."""
    return [
        f"turn {turn.number} was not a hit: {turn.outcome or 'no outcome'}"
        for turn in turns[1:]
        if turn.outcome != "hit"
    ]


def results(turns: Sequence[Turn]) -> dict[str, Any]:
    """The content of results.json."""
    return {
        "turns": [
            {
                "turn": turn.number,
                "prompt_tokens": turn.prompt_tokens,
                "reused_tokens": turn.reused_tokens,
                "outcome": turn.outcome,
                "ttft_off_s": round(turn.ttft_off_s, 4),
                "ttft_on_s": round(turn.ttft_on_s, 4),
            }
            for turn in turns
        ],
        "ratio_last": round(turns[-1].ratio, 2),
        "answers_equal": not differences(turns),
    }


def write(turns: Sequence[Turn], directory: Path) -> list[Path]:
    """Writes results.json, samples.json (every single measurement) and the plot."""
    samples = [
        {"turn": turn.number, "reuse": reuse, "repeat": repeat, "outcome": answer.outcome}
        | {"reused_tokens": answer.reused_tokens, "ttft_s": round(answer.ttft_s, 4)}
        for turn in turns
        for reuse, answers in ((False, turn.off), (True, turn.on))
        for repeat, answer in enumerate(answers, 1)
    ]
    written = []
    for name, value in (("results.json", results(turns)), ("samples.json", samples)):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
        written.append(directory / name)
    plot(turns, directory / "ttft.png")
    return [*written, directory / "ttft.png"]


def table(turns: Sequence[Turn]) -> Table:
    """For people."""
    repeats = len(turns[0].on)
    result = tables.new(
        *("turn", "prompt tokens", "reused tokens", "outcome", "TTFT off", "TTFT on", "ratio"),
        title=f"time to first token, without and with reuse (median of {repeats})",
        numbers=("turn", "prompt tokens", "reused tokens", "TTFT off", "TTFT on", "ratio"),
    )
    for turn in turns:
        result.add_row(
            str(turn.number),
            f"{turn.prompt_tokens:,}",
            f"{turn.reused_tokens:,}",
            turn.outcome,
            f"{turn.ttft_off_s:.2f} s",
            f"{turn.ttft_on_s:.2f} s",
            f"{turn.ratio:.1f}",
        )
    return result


def plot(turns: Sequence[Turn], path: Path) -> None:
    """TTFT against prompt tokens, a line with reuse and one without."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    tokens = [turn.prompt_tokens for turn in turns]
    for label, color, values in (
        ("without reuse", "#b3541e", [turn.ttft_off_s for turn in turns]),
        ("with reuse", "#1e6fb3", [turn.ttft_on_s for turn in turns]),
    ):
        axes.plot(tokens, values, marker="o", color=color, label=label)
    for turn in turns:
        _label(axes, f"turn {turn.number}", turn.prompt_tokens, turn.ttft_off_s, above=True)
        # What is left to compute explains the lower line.
        new = turn.prompt_tokens - turn.reused_tokens
        _label(axes, f"{new:,} new", turn.prompt_tokens, turn.ttft_on_s, above=False)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.13, y=0.1)
    axes.set_title(f"At turn {turns[-1].number}: {turns[-1].ratio:.1f} times faster with reuse")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _label(axes: Any, text: str, x: float, y: float, *, above: bool) -> None:
    axes.annotate(
        text,
        (x, y),
        textcoords="offset points",
        xytext=(-4, 7) if above else (-4, -14),
        ha="right",
        fontsize=8,
    )
