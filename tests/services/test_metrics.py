"""Everything that Prometheus scrapes of a running deployment: real services and etcd, engines
simulated. (vLLM's own metrics are in tests/engines.)"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from control_plane import CALL_S, claim_request, grant_request, until
from etcd_server import etcd_binary
from metric_names import OPENMETRICS, fetch, scrape, table, used
from promtool import promtool
from sim_engine import COMPATIBILITY, SimEngine, Status

from kvlease import rpc
from kvlease.cli import ready
from kvlease.cli import stack as local
from kvlease.cli.parts import Options
from kvlease.v1 import lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease.v1.common_pb2 import Conversation

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
CONVERSATION = "a-conversation-that-nobody-counts"
REPORT = {
    "outcome": "hit",
    "reused_tokens": 64,
    "prompt_tokens": 100,
    "handoff_ttl_s": 60.0,
    "claim_s": 0.004,
    "predicted_pull_s": 0.03,
    "predicted_compute_s": 1.5,
    "pull_s": 0.02,
    "pull_bytes": 5000,
    "pull_source": "decode-0",
    "prefill_s": 0.4,
    "predicted_prefill_s": 0.5,
}
"""What the prefill engine says of each turn."""


@dataclass
class Deployment:
    """A local stack after some turns, of which all kinds of things have become."""

    stack: local.Stack
    trace_ids: list[str] = field(default_factory=list)

    @property
    def urls(self) -> list[str]:
        """Of the services."""
        return [url for name, url in self.stack.endpoints["metrics"].items() if name != "etcd"]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    etcd_binary()
    options = Options(
        tmp_path_factory.mktemp("stack"),
        engines="none",
        routers=2,
        lease_replicas=2,
        assignments=("session_ttl=200",),  # engines' sessions outlive their processes
    )
    with local.Stack(options) as stack:
        deployment = Deployment(stack)
        asyncio.run(_use(deployment))
        yield deployment


async def _use(deployment: Deployment) -> None:
    """Turns of all fates through both routers, and calls as engines make them."""
    endpoints = deployment.stack.endpoints
    prefill, decode = SimEngine("prefill", "prefill-0"), SimEngine("decode", "decode-0")
    async with (
        rpc.aio_channel(endpoints["registry_grpc"]) as registry,
        rpc.aio_channel(",".join(endpoints["lease_replicas_grpc"])) as lease,
    ):
        try:
            for engine in (prefill, decode):
                await engine.start()
                await engine.register(registry)
            await _tell_usage(registry, decode)
            prefill.report = REPORT
            for url in endpoints["routers_http"]:
                await until(functools.partial(ready.http_ok, f"{url}/ready"))
                prefill.faults.append(Status(500))
                for _ in range(2):
                    deployment.trace_ids.append(await asyncio.to_thread(_turn, url))
            await _lease_calls(lease, decode)
        finally:
            for engine in (prefill, decode):
                await engine.kill()


async def _tell_usage(registry: Any, engine: SimEngine) -> None:
    usage = registry_pb2.BlockUsage(
        total_blocks=100,
        free_blocks=70,
        retained_blocks=12,
        retained_leases=3,
        retention_budget_blocks=50,
        turns_over_budget=2,
    )
    request = registry_pb2.KeepAliveRequest(
        session_id=engine.session_id,
        role=registry_pb2.ENGINE_ROLE_DECODE,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        usage=usage,
    )
    await registry_pb2_grpc.RegistryStub(registry).KeepAlive(request, timeout=CALL_S)


async def _lease_calls(channel: Any, holder: SimEngine) -> None:
    stub = lease_pb2_grpc.LeaseServiceStub(channel)
    talk = Conversation(tenant="default", model="sim", conversation_id=CONVERSATION)
    record = holder.record()
    record.session_id = holder.session_id
    fields: dict[str, Any] = {"compatibility_hash": COMPATIBILITY}
    await stub.Grant(grant_request(record, talk, turn=9, **fields), timeout=CALL_S)
    await stub.Claim(claim_request(talk, **fields), timeout=CALL_S)
    with pytest.raises(Exception, match="turn"):
        await stub.Grant(grant_request(record, talk, turn=8, **fields), timeout=CALL_S)


def _turn(url: str) -> str:
    """The id of its trace."""
    body = {"model": "sim", "messages": [], "conversation_id": CONVERSATION}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()
        return str(response.headers["x-kvlease-trace-id"])


def test_every_service_has_an_address_for_metrics(deployment: Deployment) -> None:
    metrics = deployment.stack.endpoints["metrics"]
    assert list(metrics) == ["etcd", "registry", "lease-0", "lease-1", "router-0", "router-1"]
    for name, url in metrics.items():
        service = name.partition("-")[0]
        text, _ = fetch(url)
        assert name == "etcd" or f'kvlease_ready{{service="{service}"}} 1.0' in text


@pytest.mark.parametrize("accept", ["text/plain", OPENMETRICS])
def test_all_that_panels_and_rules_ask_for_is_there(deployment: Deployment, accept: str) -> None:
    scraped = scrape(deployment.urls, accept)
    ours = [use for use in used() if not use.metric.startswith("vllm:")]
    assert len(ours) > 50
    assert scraped.lack(ours) == []


def test_what_is_missing_would_be_found(deployment: Deployment) -> None:
    scraped = scrape(deployment.urls)
    del scraped.samples["kvlease_turns_total"]
    scraped.samples["kvlease_leases"].remove("model")
    problems = scraped.lack(used())
    assert "KvleaseHitRateCollapse: there is no kvlease_turns_total" in problems
    assert "panel 'Leases by state': kvlease_leases has no label model" in problems


def test_times_of_turns_name_their_traces(deployment: Deployment) -> None:
    exemplars = scrape(deployment.urls, OPENMETRICS).exemplars
    for name in ("turn_ttft", "pull", "turn_claim", "prefill"):
        found = exemplars[f"kvlease_{name}_seconds_bucket"]
        assert {labels["trace_id"] for labels in found} <= set(deployment.trace_ids)


def test_names_and_units_are_as_prometheus_wants_them(deployment: Deployment) -> None:
    for url in deployment.urls:
        # python_gc_* and process_* are the client library's.
        lines = [line for line in fetch(url)[0].splitlines() if "kvlease_" in line]
        ended = promtool("check", "metrics", stdin="\n".join(lines) + "\n")
        assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def test_no_conversation_is_a_label(deployment: Deployment) -> None:
    for url in deployment.urls:
        assert CONVERSATION not in fetch(url)[0]
        assert "tenant=" not in fetch(url)[0]


def test_a_scraper_that_does_not_read_holds_up_nobody(deployment: Deployment) -> None:
    stalled = []
    try:
        for url in deployment.urls:
            address = urlsplit(url)
            for sent in (b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
                client = socket.create_connection((address.hostname, address.port), timeout=5)
                client.sendall(sent)
                stalled.append(client)
        for url in deployment.urls:
            assert "kvlease_build_info" in fetch(url)[0]
        endpoints = deployment.stack.endpoints
        for target in (endpoints["registry_grpc"], *endpoints["lease_replicas_grpc"]):
            assert ready.grpc_serving(target)
    finally:
        for client in stalled:
            client.close()


def test_the_table_in_the_docs_is_complete_and_right(deployment: Deployment) -> None:
    scraped = scrape(deployment.urls)
    ours = [family for name, family in scraped.families.items() if name.startswith("kvlease_")]
    wanted = table(ours)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `kvlease_")]
    rows = [row for row in rows if not row.startswith("| `kvlease_connector_")]
    assert rows == wanted.splitlines(), f"the table should read:\n{wanted}"
