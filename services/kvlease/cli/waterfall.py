"""A trace as a waterfall for the terminal: what a turn spent its time on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BAR_WIDTH = 44

_LONG = 40
"""Characters of a note from which on it is said once only."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One span. Times are seconds on one clock."""

    name: str
    span_id: str
    parent_id: str
    start: float
    end: float
    notes: tuple[str, ...] = ()
    """What to say of it, behind its bar."""
    children: list[Bar] = field(default_factory=list, compare=False)


def render(bars: Iterable[Bar], width: int = BAR_WIDTH, told: str = "") -> str:
    """The tree of spans, one line each: name, bar, milliseconds, note. Children are
    ordered by their start; a span whose parent is not among them is a root. ``width``: of
    the longest bar. A long note whose text stands in an earlier line already, or in ``told``,
    is not said again."""
    roots = _tree(bars)
    if not roots:
        return ""
    first = min(bar.start for bar in roots)
    last = max(bar.end for bar in _walk(roots))
    rows = [row for root in roots for row in _rows(root, "", "")]
    label_width = max(len(label) for label, _ in rows)
    lines = []
    for label, bar in rows:
        note = ", ".join(_once(note, told) for note in bar.notes)
        told += "\n" + note
        lines.append(
            f"{label:<{label_width}}  {_bar(bar, first, last, width)} "
            f"{1000 * (bar.end - bar.start):8.1f} ms" + (f"  {note}" if note else "")
        )
    return "\n".join(lines)


def _once(note: str, told: str) -> str:
    what, separator, text = note.rpartition("failed: ")
    return f"{what}{separator}as above" if len(text) >= _LONG and text in told else note


def _tree(bars: Iterable[Bar]) -> list[Bar]:
    ordered = sorted(bars, key=lambda bar: (bar.start, -bar.end))
    by_id = {bar.span_id: bar for bar in ordered}
    roots: list[Bar] = []
    for bar in ordered:
        parent = by_id.get(bar.parent_id)
        (parent.children if parent else roots).append(bar)
    return roots


def _walk(bars: Sequence[Bar]) -> Iterable[Bar]:
    for bar in bars:
        yield bar
        yield from _walk(bar.children)


def _rows(bar: Bar, lead: str, under: str) -> list[tuple[str, Bar]]:
    rows = [(lead + bar.name, bar)]
    for child in bar.children:
        is_last = child is bar.children[-1]
        rows += _rows(
            child, under + ("└─ " if is_last else "├─ "), under + ("   " if is_last else "│  ")
        )
    return rows


def _bar(bar: Bar, first: float, last: float, width: int) -> str:
    scale = width / max(last - first, 1e-9)
    begin = min(width - 1, int((bar.start - first) * scale))
    length = max(1, min(width - begin, round((bar.end - bar.start) * scale)))
    return (" " * begin + "█" * length).ljust(width)
