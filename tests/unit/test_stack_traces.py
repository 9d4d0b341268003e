"""Where the spans of a local stack go, and who vLLM's say they come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource

from kvlease.cli import launch, parts
from kvlease.cli.parts import Options, Plan

USERS = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://collector:4317",
}


def plan(directory: Path, env: dict[str, str], *, traces: bool) -> Plan:
    return parts.make(
        Options(
            directory=directory,
            store="memory",
            engines="none",
            traces=traces,
            env={"PATH": os.environ["PATH"], **env},
        )
    )


def otlp(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith("OTEL_EXPORTER")}


def test_services_send_their_spans_to_the_stack_s_receiver(tmp_path: Path) -> None:
    made = plan(tmp_path, {}, traces=True)

    receiver = made.part("traces")
    assert made.traces == f"http://{receiver.http}"
    assert otlp(made.part("services").env) == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.grpc}"
    }
    assert "KVLEASE_TRACES_FORWARD" not in receiver.env


def test_what_the_user_exports_to_is_the_receiver_s_business_alone(tmp_path: Path) -> None:
    made = plan(tmp_path, USERS, traces=True)

    receiver = made.part("traces")
    assert receiver.env["KVLEASE_TRACES_FORWARD"] == "https://collector:4317"
    assert otlp(receiver.env) == USERS
    assert otlp(made.part("services").env) == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{receiver.grpc}"
    }


def test_without_a_receiver_services_export_as_the_user_says(tmp_path: Path) -> None:
    made = plan(tmp_path, USERS, traces=False)

    assert made.traces is None
    assert [part.name for part in made.parts] == ["services"]
    assert otlp(made.part("services").env) == USERS


def test_vllm_says_who_it_is_and_what_the_user_says_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test,service.namespace=mine",
    }
    engine = launch.Engine(
        role="decode",
        model=str(tmp_path),
        engine_id="decode-7",
        incarnation="1234",
        port=1,
        side_channel_port=2,
    )

    built = launch.build(engine, env=env)

    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.setenv(name, built.env[name])
    said = Resource.create().attributes
    assert said["service.name"] == "vllm-decode"
    assert said["service.instance.id"] == "decode-7/1234"
    assert said["service.version"]
    assert said["service.namespace"] == "mine"
    assert said["deployment.environment"] == "test"
