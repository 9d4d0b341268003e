"""Whether a part of a local stack does its work yet."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease import direct, rpc, tls
from kvlease.cli.parts import Part, Plan
from kvlease.tls import Tls
from kvlease.v1 import registry_pb2, registry_pb2_grpc

_PROBE_TIMEOUT_S = 2.0


def is_ready(part: Part, plan: Plan, incarnation: str) -> bool:
    """Whether ``part`` does its work; an engine: this incarnation of it, and the registry
    knows it."""
    secured = tls.of(plan.settings)
    match part.kind:
        case "etcd":
            return etcd_healthy(part.http)
        case "registry" | "lease":
            return grpc_serving(part.grpc, secured)
        case "traces":
            return http_ok(f"http://{part.http}/api/services")
        case "router":
            return http_ok(f"http://{part.http}/health")
        case "all":
            return (
                grpc_serving(plan.registry_grpc, secured)
                and grpc_serving(plan.lease_grpc[0], secured)
                and http_ok(f"http://{part.http}/health")
            )
        case "prefill" | "decode":
            return http_ok(f"http://{part.http}/health") and registered(
                plan.registry_grpc, part.kind, part.name, incarnation, secured
            )


def http_ok(url: str) -> bool:
    """Whether a GET of ``url`` is answered with 200."""
    return _get(url) is not None


def etcd_healthy(address: str) -> bool:
    """Whether the etcd at ``address`` has a leader and takes requests."""
    body = _get(f"http://{address}/health")
    try:
        # The value is the text "true" in all versions of etcd 3.
        return body is not None and json.loads(body)["health"] == "true"
    except (ValueError, KeyError, TypeError):
        return False


def accepts(address: str) -> bool:
    """Whether somebody listens at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def grpc_serving(address: str, secured: Tls | None = None) -> bool:
    """Whether the gRPC server at ``address`` reports SERVING for all it has."""
    with rpc.channel(address, secured) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def registered(
    registry: str, role: str, engine_id: str, incarnation: str, secured: Tls | None = None
) -> bool:
    """Whether this start of the engine has a session with the registry."""
    value = registry_pb2.EngineRole.Value(f"ENGINE_ROLE_{role.upper()}")
    with rpc.channel(registry, secured) as channel:
        try:
            found = registry_pb2_grpc.RegistryStub(channel).GetEngine(
                registry_pb2.GetEngineRequest(role=value, engine_id=engine_id),
                timeout=_PROBE_TIMEOUT_S,
            )
        except grpc.RpcError:
            return False
    return bool(found.incarnation == incarnation)


def _get(url: str) -> bytes | None:
    try:
        with direct.opener().open(url, timeout=_PROBE_TIMEOUT_S) as response:
            body = response.read()
            return bytes(body) if response.status == 200 else None
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return None
