"""A trace as a waterfall."""

from __future__ import annotations

from kvlease.cli.waterfall import BAR_WIDTH, Bar, render


def test_spans_stand_under_their_parents_in_the_order_of_their_start() -> None:
    text = render(
        [
            Bar("decode", "d", "t", 1.0, 2.0),
            Bar("turn", "t", "", 0.0, 2.0, notes=("hit",)),
            Bar("prefill", "p", "t", 0.0, 1.0),
            Bar("lease.claim", "c", "p", 0.1, 0.2),
        ]
    )
    lines = text.splitlines()
    assert lines[0].startswith("turn")
    assert lines[1].startswith("├─ prefill")
    assert lines[2].startswith("│  └─ lease.claim")
    assert lines[3].startswith("└─ decode")
    assert lines[0].endswith("2000.0 ms  hit")


def test_bars_are_in_proportion() -> None:
    text = render([Bar("turn", "t", "", 0.0, 4.0), Bar("decode", "d", "t", 2.0, 4.0)])
    whole, half = (line.count("█") for line in text.splitlines())
    assert (whole, half) == (BAR_WIDTH, BAR_WIDTH // 2)


def test_the_shortest_span_can_be_seen() -> None:
    text = render([Bar("turn", "t", "", 0.0, 60.0), Bar("route", "r", "t", 60.0, 60.0)])
    assert text.splitlines()[1].count("█") == 1


def test_a_span_whose_parent_is_elsewhere_is_a_root() -> None:
    assert render([Bar("turn", "t", "client", 0.0, 1.0)]).startswith("turn")


def test_a_long_note_is_said_once() -> None:
    why = "the decode engine answered with status 500, twice"
    bars = [
        Bar("turn", "t", "", 0.0, 4.0, notes=(f"failed: {why}",)),
        Bar("route", "r", "t", 0.0, 1.0, notes=("hit",)),
        Bar("prefill", "p", "t", 1.0, 2.0, notes=("hit", why)),
        Bar("decode", "d", "t", 2.0, 3.0, notes=(f"failed: no token: {why}", "decode-0")),
    ]
    rows = [line.partition(" ms  ")[2] for line in render(bars).splitlines()]
    assert rows == [f"failed: {why}", "hit", "hit, as above", f"failed: no token: {why}, decode-0"]


def test_a_long_note_that_was_told_before_is_not_said_at_all() -> None:
    why = "the decode engine answered with status 500, twice"
    bars = [Bar("turn", "t", "", 0.0, 4.0, notes=(f"failed: {why}",))]
    assert render(bars, told=f"the turn failed: {why}").endswith(" ms  failed: as above")


def test_nothing_is_nothing() -> None:
    assert render([]) == ""
