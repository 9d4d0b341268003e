"""Metrics and logs of a deployment with real engines."""

from __future__ import annotations

import re

import pytest
from engines.conftest import EngineStack
from engines.look import lease_of, wait
from engines.turns import Client, new_conversation, text
from metric_names import Scraped, scrape, used

MARK = "ZQ7 "
"""In the prompt, and nowhere else."""


@pytest.fixture
def talked(stack: EngineStack, client: Client) -> str:
    """A conversation of four turns, of which all but the first were hits."""
    conversation = new_conversation("metrics")
    messages = [{"role": "user", "content": MARK + text(600, seed=21)}]
    for number in range(1, 5):
        turn = client.chat(messages, conversation)
        # The first read has nothing to be predicted by, and the others have.
        assert turn.outcome == ("hit" if number > 1 else "miss_no_lease")
        wait(lambda number=number: _granted(stack, conversation) == number, "the turn is granted")
        messages += [
            {"role": "assistant", "content": turn.text},
            {"role": "user", "content": MARK + text(100, seed=21 + number)},
        ]
    return conversation


def _granted(stack: EngineStack, conversation: str) -> int:
    """The turn whose blocks are kept."""
    lease = lease_of(stack, conversation)
    return lease.turn if lease else 0


def everything(stack: EngineStack) -> Scraped:
    """A scrape of all that runs, as compose's Prometheus does it."""
    metrics = stack.endpoints["metrics"]
    return scrape(url for name, url in metrics.items() if name in stack.running and name != "etcd")


def test_panels_rules_and_variables_find_what_they_ask_for(stack: EngineStack, talked: str) -> None:
    # What only failures and starts bring about is in tests/services/test_metrics.py.
    rare = {
        "kvlease_grants_refused_total",
        "kvlease_engine_errors_total",
        "kvlease_engine_registrations_total",
    }
    assert everything(stack).lack(use for use in used() if use.metric not in rare) == []


def test_what_an_engine_keeps_is_shown_while_it_is_idle(stack: EngineStack, talked: str) -> None:
    def shown(what: str) -> float:
        family = everything(stack).families[f"kvlease_engine_{what}"]
        (value,) = (s.value for s in family.samples if s.labels["engine_id"] == "decode-0")
        return value

    wait(lambda: shown("retained_blocks") >= 5, "the lease's blocks are shown as retained")
    total = shown("blocks")
    assert shown("retention_budget_blocks") == int(total * 0.5)
    assert shown("retained_blocks") + shown("free_blocks") <= total
    before = shown("retained_block_seconds")
    wait(lambda: shown("retained_block_seconds") > before, "what retention costs adds up")


def test_the_connectors_lines_are_in_vllms_log_and_no_prompt_is(
    stack: EngineStack, talked: str
) -> None:
    for engine in ("prefill-0", "decode-0"):
        log = stack.log(engine).read_text()
        # vLLM's own form: level, time and the file that says so
        pattern = rf"INFO \d\d-\d\d [\d:]+ \[\S*session.py:\d+\] registered .*engine_id={engine}"
        assert re.search(pattern, log), log[-2000:]
    for part in stack.plan.parts:
        if part.name in stack.running:
            assert MARK not in stack.log(part.name).read_text(errors="replace")
