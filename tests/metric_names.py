"""Which metrics the dashboard and the rules name, and which there are in a scrape."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client import Metric, parser
from prometheus_client.openmetrics import parser as openmetrics

COMPOSE = Path(__file__).parent.parent / "compose"
DASHBOARD = COMPOSE / "grafana" / "dashboards" / "kvlease.json"
RULES = COMPOSE / "prometheus" / "alerts.yml"

_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*"}
"""What Grafana puts into a query before Prometheus sees it."""

_OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape gets from its target."""


@dataclass(frozen=True)
class Use:
    """A metric as somebody asks for it, with the labels that are matched."""

    metric: str
    labels: frozenset[str]
    where: str


def used() -> list[Use]:
    """By all panels, variables and rules; without what rules record."""
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    return [use for use in (*_in_dashboard(), *_in_rules()) if use.metric not in recorded]


def _in_dashboard() -> Iterator[Use]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield from _in_query(target["expr"], f"panel {panel['title']!r}")
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert query, variable
            yield Use(query[1], frozenset({query[2]}), f"variable {variable['name']}")


def _in_rules() -> Iterator[Use]:
    for rule in _rules():
        yield from _in_query(rule["expr"], rule.get("alert") or rule["record"])


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _in_query(query: str, where: str) -> list[Use]:
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    found: list[Use] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            labels = {matcher.name for matcher in node.matchers.matchers} - _OF_PROMETHEUS
            found.append(Use(node.name, frozenset(labels), where))

    promql_parser.walk(promql_parser.parse(query), visit)
    assert found, f"{where} asks for no metric: {query}"
    return found


@dataclass
class Scraped:
    """What some targets show: families by name, samples' names with the labels they have."""

    families: dict[str, Metric] = field(default_factory=dict)
    samples: dict[str, set[str]] = field(default_factory=dict)
    exemplars: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """Of samples by name."""

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            if family.samples or family.name not in self.families:
                self.families[family.name] = family
            for sample in family.samples:
                self.samples.setdefault(sample.name, set()).update(sample.labels)
                if sample.exemplar is not None:
                    self.exemplars.setdefault(sample.name, []).append(sample.exemplar.labels)

    def lack(self, uses: Iterable[Use]) -> list[str]:
        """A sentence for each metric or label that is used but not there."""
        problems = []
        for use in uses:
            if use.metric not in self.samples:
                problems.append(f"{use.where}: there is no {use.metric}")
            elif missing := use.labels - self.samples[use.metric]:
                problems.append(f"{use.where}: {use.metric} has no label {', '.join(missing)}")
        return problems


TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def fetch(url: str, accept: str = TEXT) -> tuple[str, str]:
    """A scrape's body and content type."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode(), response.headers["Content-Type"]


def scrape(urls: Iterable[str], accept: str = TEXT) -> Scraped:
    """Reads targets with the parser of the format that was asked for, which must be the one
    that they answer in."""
    scraped = Scraped()
    for url in urls:
        body, content_type = fetch(url, accept)
        assert content_type.startswith(accept.partition(";")[0]), (url, content_type)
        parse = openmetrics if accept == OPENMETRICS else parser
        scraped.add(parse.text_string_to_metric_families(body))
    return scraped


def table(families: Iterable[Metric]) -> str:
    """Rows for docs/metrics.md, by name."""
    return "\n".join(_row(family) for family in sorted(families, key=lambda item: item.name))


def _row(family: Metric) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {shown} | {_unit(family.name)} | {family.documentation} |"


def _unit(name: str) -> str:
    for suffix, unit in (
        ("_block_seconds", "block-seconds"),
        ("_seconds", "seconds"),
        ("_bytes", "bytes"),
        ("_tokens", "tokens"),
        ("_blocks", "blocks"),
    ):
        if name.endswith(suffix):
            return unit
    return ""
