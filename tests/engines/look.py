"""Looking into a running stack, and waiting for what should be seen there."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc

from kvlease.cli.stack import Stack
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

MODEL = "model"
"""The small model's name, as clients name it."""

PATIENCE_S = 20.0
CALL_TIMEOUT_S = 5.0


def wait(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Until the condition holds; looks often enough to catch what lasts milliseconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
        time.sleep(0.002)


def lease_of(stack: Stack, conversation: str) -> lease_pb2.Lease | None:
    """A conversation's lease; None if there is none, or nobody answers."""
    key = common_pb2.Conversation(tenant="default", model=MODEL, conversation_id=conversation)
    with grpc.insecure_channel(stack.plan.lease_grpc[0]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        try:
            lease: lease_pb2.Lease = stub.GetLease(
                lease_pb2.GetLeaseRequest(conversation=key), timeout=CALL_TIMEOUT_S
            )
        except grpc.RpcError:
            return None
        return lease


def holder_of(stack: Stack, conversation: str) -> str:
    """The engine that holds a conversation's lease, once it is granted."""
    wait(lambda: lease_of(stack, conversation) is not None, "the turn is granted")
    lease = lease_of(stack, conversation)
    assert lease is not None
    return lease.holder_engine_id


def has_open_ticket(stack: Stack, conversation: str) -> bool:
    """Whether somebody may be reading a conversation's blocks now."""
    lease = lease_of(stack, conversation)
    return lease is not None and bool(lease.tickets)


def was_claimed(stack: Stack, conversation: str) -> bool:
    """Whether a conversation's lease has been claimed since it was granted."""
    lease = lease_of(stack, conversation)
    return lease is not None and lease.claim_count > 0


def usage(stack: Stack) -> dict[str, registry_pb2.BlockUsage]:
    """Block usage of every registered engine."""
    with grpc.insecure_channel(stack.plan.registry_grpc) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        request = registry_pb2.ListEnginesRequest()
        engines = stub.ListEngines(request, timeout=CALL_TIMEOUT_S).engines
        return {engine.engine_id: engine.usage for engine in engines}


def unfinished_requests(http: str) -> float:
    """vLLM's own count of the requests that run or wait on an engine."""
    total = 0.0
    with urllib.request.urlopen(http + "/metrics", timeout=CALL_TIMEOUT_S) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")):
                total += float(line.rsplit(" ", 1)[1])
    return total


def used_blocks(stack: Stack, engine_id: str) -> float:
    """The part of an engine's KV blocks that is not free, by vLLM's own measure. It is one
    of the last step, so this makes one: a request that needs no other part of the stack."""
    base = f"http://{stack.plan.part(engine_id).http}"
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        base + "/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
        response.read()
    with urllib.request.urlopen(base + "/metrics", timeout=CALL_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    (used,) = (line for line in lines if line.startswith("vllm:kv_cache_usage_perc{"))
    return float(used.rsplit(" ", 1)[1])


def is_ready(stack: Stack) -> bool:
    """Whether the router would answer turns."""
    url = stack.endpoints["router_http"] + "/ready"
    try:
        with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
