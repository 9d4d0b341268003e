"""The alert rules on series that somebody made up: when they fire, and when they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from metric_names import COMPOSE, RULES
from promtool import promtool

LEASE_READY = 'kvlease_ready{service="lease",instance="a"}'
MINUTES = 200
"""Of a series: longer than the test."""

CHANGE = 120
"""The minute at which what is well ceases to be."""

LOOK = CHANGE + 20
"""The minute at which alerts are looked at: each has had time for its ranges and its ``for``."""


def steady(a_minute: float, minutes: int = MINUTES) -> str:
    """A counter that rises all the time."""
    return f"0+{a_minute}x{minutes}"


def turns(outcome: str) -> str:
    return f'kvlease_turns_total{{model="m",outcome="{outcome}",end="ok",instance="r"}}'


def retained(blocks: str, budget: int = 100) -> dict[str, str]:
    labels = '{role="decode",engine_id="decode-0",model="m",instance="g"}'
    return {
        f"kvlease_engine_retained_blocks{labels}": blocks,
        f"kvlease_engine_retention_budget_blocks{labels}": f"{budget}x{MINUTES}",
    }


def lost(replica: str, values: str) -> dict[str, str]:
    labels = f'{{role="decode",engine_id="decode-0",instance="{replica}"}}'
    return {f"kvlease_engine_sessions_lost_total{labels}": values}


READY = {LEASE_READY: f"1x{MINUTES}"}
GOOD = {**READY, turns("hit"): steady(60), turns("miss_no_lease"): steady(20)}
# Hits for two hours, then none, but turns that miss.
COLLAPSED = {
    **READY,
    turns("hit"): f"0+60x{CHANGE} {60 * CHANGE}x{MINUTES}",
    turns("miss_prefix"): f"0x{CHANGE} 0+60x{MINUTES}",
}
FAILING = "kvlease_start_turn_failures_total"
STORE_ERRORS = (
    'kvlease_store_request_errors_total{job="kvlease-lease",operation="commit",'
    'error="unavailable",instance="a"}'
)

CASES: list[tuple[str, dict[str, str], list[str]]] = [
    ("all is well", GOOD, []),
    ("nothing runs", {"up": f"0x{MINUTES}"}, ["KvleaseLeaseServiceUnreachable"]),
    (
        "no replica of the lease service is ready",
        {**GOOD, LEASE_READY: f"1x{CHANGE} 0x{MINUTES}"},
        ["KvleaseLeaseServiceUnreachable"],
    ),
    (
        "one of two replicas is not ready",
        {**GOOD, 'kvlease_ready{service="lease",instance="b"}': f"0x{MINUTES}"},
        [],
    ),
    (
        "routers get no answers",
        {**GOOD, FAILING: steady(30)},
        ["KvleaseLeaseServiceUnreachable"],
    ),
    ("a router gets no answer now and then", {**GOOD, FAILING: steady(1)}, []),
    (
        "prefill engines get no answers",
        {**GOOD, turns("miss_timeout"): steady(30)},
        ["KvleaseLeaseServiceUnreachable"],
    ),
    ("hits have turned into misses", COLLAPSED, ["KvleaseHitRateCollapse"]),
    (
        "there are fewer turns, and as many hits among them",
        {
            **READY,
            turns("hit"): f"0+60x{CHANGE} {60 * CHANGE}+6x{MINUTES}",
            turns("miss_busy"): steady(1),
        },
        [],
    ),
    (
        "there are hardly any turns",
        {**COLLAPSED, turns("miss_prefix"): f"0x{CHANGE} 0+1x{MINUTES}"},
        [],
    ),
    (
        "an engine loses its session every three minutes, as two replicas see it",
        {
            **GOOD,
            **lost("a", f"0x{CHANGE} 0+0.34x{MINUTES}"),
            **lost("b", f"0x{CHANGE} 0+0.34x{MINUTES}"),
        },
        ["KvleaseSessionFlapping"],
    ),
    (
        "an engine was restarted twice, as two replicas see it",
        {**GOOD, **lost("a", f"0x{CHANGE} 2x{MINUTES}"), **lost("b", f"0x{CHANGE} 2x{MINUTES}")},
        [],
    ),
    (
        "more is retained than the budget allows",
        {**GOOD, **retained(f"100x{CHANGE} 101x{MINUTES}")},
        ["KvleaseRetentionOverBudget"],
    ),
    ("the budget is used up", {**GOOD, **retained(f"100x{MINUTES}")}, []),
    (
        "a prefill engine retains prompts and has no budget",
        {**GOOD, 'kvlease_engine_retained_blocks{role="prefill",engine_id="p"}': f"9x{MINUTES}"},
        [],
    ),
    ("etcd does not answer", {**GOOD, STORE_ERRORS: steady(60)}, ["KvleaseStoreErrors"]),
    ("etcd did not answer once", {**GOOD, STORE_ERRORS: f"0x{CHANGE} 1x{MINUTES}"}, []),
]


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": [_firing(alert, alert in alerts) for alert in _alerts()],
            }
            for name, series, alerts in CASES
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(test))
    ended = promtool("test", "rules", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _firing(alert: str, fires: bool) -> dict[str, Any]:
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else []
    return {
        "expr": f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{alert}"}})',
        "eval_time": f"{LOOK}m",
        "exp_samples": expected,
    }


def _alerts() -> list[str]:
    return [rule["alert"] for rule in rules()]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_every_alert_fires_in_a_case_and_says_what_to_do() -> None:
    assert {name for case in CASES for name in case[2]} == {rule["alert"] for rule in rules()}
    for rule in rules():
        assert rule["for"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_promtool_finds_nothing_wrong() -> None:
    for check, file in (("rules", RULES), ("config", COMPOSE / "prometheus" / "prometheus.yml")):
        ended = promtool("check", check, file)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "SUCCESS" in ended.stdout
