"""The rules that always hold (docs/promises.md), on whole deployments that are simulated:
real services, real engines' parts, and everything between them going wrong.

``KVLEASE_MODEL_EXAMPLES=20000 pytest tests/model/test_model.py`` looks further, each time
elsewhere.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from scenarios import SCENARIOS
from sim_script import Step, play, scripts, setups
from sim_world import Setup

EXAMPLES = int(os.environ.get("KVLEASE_MODEL_EXAMPLES") or 0)
FEW = 60
"""Of the examples that are the same on every run."""
SEEDS = 3


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_goes_well_when(name: str) -> None:
    setup, steps = SCENARIOS[name]
    for seed in range(SEEDS):
        play(replace(setup, seed=seed), steps)


@pytest.mark.timeout(0 if EXAMPLES else 180)
@settings(
    max_examples=EXAMPLES or FEW,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    # "Explain" traces every line, and takes longer than all the rest.
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(setup=setups(), steps=scripts())
def test_no_rule_is_broken_whatever_happens(setup: Setup, steps: list[Step]) -> None:
    play(setup, steps)


def test_the_same_script_goes_the_same_way() -> None:
    # given the scenario with the most chance in it
    setup, steps = SCENARIOS["answers are slow, and reads end as late as they may"]
    runs = [play(setup, steps).oracle.told for _ in range(2)]
    # then only the ids differ, which are random
    first, second = (re.sub(r"[0-9a-f]{4,}[0-9a-f-]*", "id", "\n".join(told)) for told in runs)
    assert first == second
