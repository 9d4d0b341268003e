"""`kvlease demo`, as `make demo` runs it, with one measurement of each turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 400


@pytest.mark.usefixtures("needs_engines")
def test_the_demo_shows_hits_with_equal_answers(tmp_path: Path) -> None:
    # when
    directory = tmp_path / "demo"
    run = subprocess.run(
        [sys.executable, "-m", "kvlease.cli", "demo", "--repeats", "1", "--dir", str(directory)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    # then
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((directory / "results.json").read_text())
    turns = results["turns"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 4, 5]
    assert [turn["outcome"] for turn in turns] == ["miss_no_lease"] + ["hit"] * 4
    assert results["answers_equal"] is True
    assert turns[-1]["prompt_tokens"] >= 6000
    assert turns[-1]["prompt_tokens"] - turns[-1]["reused_tokens"] <= 400
    # How many times faster is the benchmark's to say; that it is, the demo's.
    assert results["ratio_last"] > 2
    assert (directory / "ttft.png").stat().st_size > 10_000
    assert "prompt tokens" in run.stdout
    assert not (directory / "endpoints.json").exists(), "the demo left its stack running"
