"""The Grafana dashboard as a file; whether its metrics exist is in tests/services and
tests/engines."""

from __future__ import annotations

import itertools
import json
from typing import Any

import yaml
from metric_names import COMPOSE, DASHBOARD

PROVISIONING = COMPOSE / "grafana" / "provisioning"


def panels(*, rows: bool = False) -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if (panel["type"] == "row") == rows]


def test_every_panel_explains_itself() -> None:
    for panel in panels():
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert panel["type"] == "stat" or target["legendFormat"], panel["title"]


def test_every_query_goes_to_the_chosen_data_source() -> None:
    for panel in panels():
        for item in (panel, *panel["targets"]):
            assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_ids_differ_and_no_panel_is_on_top_of_another() -> None:
    everything = panels() + panels(rows=True)
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        covered = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not cells & covered, panel["title"]
        cells |= covered


def test_exemplars_lead_to_the_data_source_that_has_traces() -> None:
    file = PROVISIONING / "datasources" / "kvlease.yml"
    sources = {item["uid"]: item for item in yaml.safe_load(file.read_text())["datasources"]}
    (link,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert sources[link["datasourceUid"]]["type"] == "jaeger"
    with_exemplars = [p["title"] for p in panels() if any(t.get("exemplar") for t in p["targets"])]
    assert "TTFT by outcome, median" in with_exemplars


def test_compose_puts_files_where_they_are_looked_for() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    grafana, prometheus = services["grafana"], services["prometheus"]
    assert "./grafana/dashboards:/etc/grafana/dashboards:ro" in grafana["volumes"]
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in grafana["volumes"]
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "kvlease.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == "/etc/grafana/dashboards"
    assert "./prometheus:/etc/prometheus:ro" in prometheus["volumes"]
    assert "--enable-feature=exemplar-storage" in prometheus["command"]


def test_prometheus_scrapes_each_service_where_it_serves_metrics() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text())
    targets = {
        discovery["names"][0]: discovery["port"]
        for job in config["scrape_configs"]
        for discovery in job["dns_sd_configs"]
    }
    for name in ("registry", "lease", "router"):
        listen = services[name]["environment"]["KVLEASE_METRICS_LISTEN"]
        assert listen == f"0.0.0.0:{targets[name]}"
    for name in ("prefill", "decode"):
        # where its health check finds it
        assert str(targets[name]) in services[name]["healthcheck"]["test"]
