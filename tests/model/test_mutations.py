"""The test of the test: whatever rule is broken, the model notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutations import MUTATIONS, Mutation
from scenarios import SCENARIOS
from sim_script import play

SEEDS = 10
"""Delays are by chance, and not each lets the fault show."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_model_notices_if(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, steps = SCENARIOS[mutation.scenario]
    mutation.break_it(monkeypatch)
    found = []
    for seed in range(SEEDS):
        try:
            play(replace(setup, seed=seed), steps)
        except AssertionError as error:
            found.append(str(error))
            break
    assert found, f"nothing was noticed in {SEEDS} runs of {mutation.scenario!r}"
    assert mutation.found in found[0]
