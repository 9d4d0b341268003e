"""`kvlease serve traces`: real OTLP in, Jaeger's JSON out, and on to another receiver."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from otlp_receiver import receiving
from traces_server import ANY, serving_traces

from kvlease import telemetry
from kvlease.cli import ready
from kvlease.config import ConfigError, Settings
from kvlease.telemetry import ENDPOINT_ENV, Telemetry
from kvlease.traces.app import serve_traces


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    with serving_traces(traces_kept=3) as served:
        yield served


def get(addresses: dict[str, str], path: str, **query: str) -> tuple[int, Any]:
    url = f"http://{addresses['traces']}{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def send(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str], *names: str) -> list[str]:
    """One trace with one span for each name; their trace ids."""
    monkeypatch.setenv(ENDPOINT_ENV, f"http://{addresses['traces_otlp']}")
    tracing = Telemetry("test", instance_id="i-1")
    trace_ids = []
    for name in names:
        with tracing.tracer.start_as_current_span(name, attributes={"name": name}) as span:
            trace_ids.append(telemetry.trace_id_of(span))
    tracing.shutdown()
    return trace_ids


def test_what_is_exported_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str]
) -> None:
    (trace_id,) = send(monkeypatch, addresses, "a")

    status, answer = get(addresses, f"/api/traces/{trace_id}")

    assert status == 200
    assert answer["errors"] is None
    (found,) = answer["data"]
    (span,) = found["spans"]
    assert (found["traceID"], span["operationName"], span["references"]) == (trace_id, "a", [])
    process = found["processes"][span["processID"]]
    assert process["serviceName"] == "test"
    tags = {tag["key"]: tag["value"] for tag in process["tags"]}
    assert tags["service.instance.id"] == "i-1"
    assert tags["service.namespace"] == "kvlease"


def test_the_latest_traces_are_kept_and_found(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str]
) -> None:
    trace_ids = send(monkeypatch, addresses, "a", "b", "a", "a")

    _, all_of_them = get(addresses, "/api/traces", service="test")
    assert [found["traceID"] for found in all_of_them["data"]] == trace_ids[:0:-1]
    _, some = get(addresses, "/api/traces", service="test", operation="a", limit="1")
    assert [found["traceID"] for found in some["data"]] == [trace_ids[3]]
    _, tagged = get(addresses, "/api/traces", service="test", tags='{"name": "b"}')
    assert [found["traceID"] for found in tagged["data"]] == [trace_ids[1]]
    assert get(addresses, "/api/services")[1]["data"] == ["test"]
    assert get(addresses, "/api/services/test/operations")[1]["data"] == ["a", "b"]


def test_what_is_not_there_or_not_understood_is_an_error_as_of_jaeger(
    addresses: dict[str, str],
) -> None:
    status, answer = get(addresses, f"/api/traces/{'f' * 32}")
    assert (status, answer["data"]) == (404, None)
    assert answer["errors"] == [{"code": 404, "msg": "trace not found"}]
    assert get(addresses, "/api/traces/nonsense")[0] == 400
    status, answer = get(addresses, "/api/traces")
    assert status == 400
    assert answer["errors"][0]["msg"] == "parameter 'service' is required"


def test_its_grpc_server_can_be_probed(addresses: dict[str, str]) -> None:
    assert ready.grpc_serving(addresses["traces_otlp"])


def test_all_spans_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver, serving_traces(traces_forward=receiver.endpoint) as addresses:
        (trace_id,) = send(monkeypatch, addresses, "a")

        span = receiver.wait_for(trace_id, "a")["a"]

        assert (span.service, span.attributes) == ("test", {"name": "a"})


def test_a_receiver_that_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_traces(traces_forward="http://127.0.0.1:1") as addresses:
        began = time.monotonic()
        (trace_id,) = send(monkeypatch, addresses, "a")
        assert get(addresses, f"/api/traces/{trace_id}")[0] == 200
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("setting", ["traces_listen", "traces_http_listen"])
async def test_an_address_that_is_taken_is_named_with_its_setting(
    addresses: dict[str, str], setting: str
) -> None:
    taken = {"traces_listen": ANY, "traces_http_listen": ANY, setting: addresses["traces"]}

    with pytest.raises(ConfigError, match=f"{setting}.*taken"):
        await serve_traces(Settings(**taken), asyncio.Event())
