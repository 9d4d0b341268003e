"""What is in the logs of a running deployment at its most talkative, and what is not: every
secret and all text of clients and engines is marked here, and looked for in every line."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from control_plane import CALL_S, claim_request, grant_request, until
from etcd_server import Etcd, b64
from sim_engine import COMPATIBILITY, Cut, Fault, SimEngine, Slow, Status

from kvlease import rpc
from kvlease.cli import ready
from kvlease.cli import stack as local
from kvlease.cli.parts import Options
from kvlease.v1 import lease_pb2_grpc
from kvlease.v1.common_pb2 import Conversation

MARK = "zq7"
"""In all that must not be logged, and in nothing else."""

KEY, OTHER_KEY, PASSWORD = f"{MARK}-key", f"{MARK}-other-key", f"{MARK}-password"
PROMPT, ANSWER = f"{MARK}-prompt", f"{MARK}-answer"

TRACE_ID = "5a" * 16
TRACEPARENT = f"00-{TRACE_ID}-{'b7' * 8}-01"

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass
class Sent:
    """What clients have seen: status by trace id."""

    statuses: list[int] = field(default_factory=list)
    trace_ids: dict[str, int] = field(default_factory=dict)


@dataclass
class Client:
    """Sends requests to one router, and remembers the answers."""

    url: str
    sent: Sent

    def request(
        self, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str
    ) -> None:
        connection = self._send(method, path, body, headers)
        try:
            response = connection.getresponse()
            response.read()
        except http.client.HTTPException:
            return  # cut off on purpose
        finally:
            connection.close()
        self.sent.statuses.append(response.status)
        if trace_id := response.headers["x-kvlease-trace-id"]:
            self.sent.trace_ids[trace_id] = response.status

    def go_away(self, path: str, body: dict[str, Any]) -> None:
        """Leaves after the first bytes of the answer."""
        connection = self._send("POST", path, body, {})
        connection.getresponse().read(10)
        connection.close()

    def _send(
        self, method: str, path: str, body: bytes | dict[str, Any], headers: dict[str, str]
    ) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, data, {"authorization": f"Bearer {KEY}", **given})
        return connection


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "sim", "messages": messages, "conversation_id": "talk-1", **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "sim", "prompt": PROMPT, "conversation_id": "talk-1", **more}


@pytest.fixture
def locked_etcd(start_etcd: Callable[..., Etcd]) -> Etcd:
    """An etcd that wants a password."""
    server = start_etcd(flags=["--bcrypt-cost=4"])
    for name in ("root", "kvlease"):
        server.call("/v3/auth/user/add", {"name": name, "password": PASSWORD})
        server.call("/v3/auth/user/grant", {"user": name, "role": "root"})
    server.call("/v3/auth/enable", {})
    return server


@pytest.fixture
def stack(locked_etcd: Etcd, tmp_path: Path) -> Iterator[local.Stack]:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({KEY: "acme", OTHER_KEY: "other"}))
    settings = {
        "log_level": "debug",
        "log_format": "json",
        "etcd_user": "kvlease",
        "etcd_password": PASSWORD,
        "api_keys_file": keys,
    }
    assignments = tuple(f"{name}={value}" for name, value in settings.items())
    options = Options(
        tmp_path / "stack", engines="none", etcd=locked_etcd.endpoint, assignments=assignments
    )
    with local.Stack(options) as started:
        yield started


def lines(stack: local.Stack) -> list[dict[str, Any]]:
    """Everything that the services have printed; every line must be an event."""
    logs = [stack.log(part.name) for part in stack.plan.parts]
    return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


async def test_no_secret_and_no_text_is_logged_and_every_turn_is(stack: local.Stack) -> None:
    sent = Sent()
    client = Client(stack.endpoints["router_http"], sent)
    await _all_paths(stack, client)
    found = lines(stack)
    marked = [line for line in found if MARK in json.dumps(line)]
    assert not marked, "\n".join(map(json.dumps, marked))

    # the test has been where it wanted to be
    assert {200, 400, 401, 413, 500} <= set(sent.statuses)
    events = {line["event"] for line in found}
    assert {"engine registered", "engine failed a turn", "lease service does not answer"} <= events
    assert {"debug", "info", "warning"} <= {line["level"] for line in found}

    turns = {line["trace_id"]: line for line in found if line["event"] == "turn ended"}
    assert set(sent.trace_ids) <= set(turns)
    ok = [turns[trace_id] for trace_id, status in sent.trace_ids.items() if status == 200]
    assert {line["conversation_id"] for line in ok} == {"talk-1"}
    assert {line["end"] for line in turns.values()} == {
        "ok", "client_error", "failed", "disconnected"
    }  # fmt: skip
    refused = {line["error"] for line in turns.values() if line["end"] == "client_error"}
    for half in ("prefill", "decode"):  # what is wrong is said as far as it may be
        told = "answered with status 400"
        assert {
            f"the {half} engine {told}",
            f"the {half} engine {told}, BadRequestError, param max_tokens",
        } <= refused
    assert {"param n", "param conversation_id", "param x-kvlease-retain"} <= refused
    calls = [line for line in found if line["event"] in ("lease granted", "claim answered")]
    assert {line["conversation_id"] for line in calls} == {"talk-2"}
    # The last one had no trace: it has not got that of the call before, either.
    assert [line.get("trace_id") for line in calls] == [TRACE_ID, TRACE_ID, None]
    for line in (line for line in found if line["event"] == "engine failed a turn"):
        assert line["conversation_id"] == "talk-1"
        assert line["trace_id"] in turns


async def _all_paths(stack: local.Stack, client: Client) -> None:
    prefill, decode = SimEngine("prefill", "prefill-0"), SimEngine("decode", "decode-0")
    decode.text = [ANSWER] * 4
    async with rpc.aio_channel(stack.endpoints["registry_grpc"]) as registry:
        try:
            for engine in (prefill, decode):
                await engine.start()
                await engine.register(registry)
            await until(functools.partial(ready.http_ok, f"{client.url}/ready"))
            await _lease_calls(stack, decode)
            await _good_and_bad_requests(client)
            await _failing_engines(client, prefill, decode)
            await asyncio.to_thread(stack.kill, "lease-0")
            for headers in ({}, {"x_kvlease_end": "true"}):
                await _send(client, CHAT, chat(), **headers)
            await asyncio.to_thread(client.request, "DELETE", "/v1/conversations/talk-1")
            await asyncio.to_thread(stack.kill, "registry")
            await _send(client, CHAT, chat())
            for name in ("registry", "lease-0"):
                await asyncio.to_thread(stack.start_part, name)
        finally:
            for engine in (prefill, decode):
                await engine.kill()


async def _lease_calls(stack: local.Stack, holder: SimEngine) -> None:
    """As engines make them in a turn."""
    record = holder.record()
    record.session_id = holder.session_id
    talk = Conversation(tenant="acme", model="sim", conversation_id="talk-2")
    metadata = (("traceparent", TRACEPARENT),)
    async with rpc.aio_channel(stack.endpoints["lease_grpc"]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        grant = grant_request(record, talk, compatibility_hash=COMPATIBILITY)
        await stub.Grant(grant, timeout=CALL_S, metadata=metadata)
        claim = claim_request(talk, compatibility_hash=COMPATIBILITY)
        await stub.Claim(claim, timeout=CALL_S, metadata=metadata)
        await stub.Claim(claim_request(talk), timeout=CALL_S)


async def _send(client: Client, path: str, body: bytes | dict[str, Any], **headers: str) -> None:
    await asyncio.to_thread(client.request, "POST", path, body, **headers)


async def _good_and_bad_requests(client: Client) -> None:
    for stream in (False, True):
        await _send(client, CHAT, chat(stream=stream))
        await _send(client, COMPLETION, completion(stream=stream))
    for authorization in (f"Bearer {MARK}-wrong", f"Basic {MARK}", f"{MARK}", ""):
        await _send(client, CHAT, chat(), authorization=authorization)
        await asyncio.to_thread(
            client.request, "DELETE", "/v1/conversations/talk-1", authorization=authorization
        )
    for body in (
        b'{"model": "sim", "messages": "' + PROMPT.encode(),
        PROMPT.encode(),
        PROMPT.encode() + b"\xff",
        chat(n=PROMPT),
        chat(messages=PROMPT),
        chat(messages=[PROMPT]),
        chat(stop=[PROMPT] * 10, max_tokens=PROMPT),
        chat(stream=PROMPT),
        chat(conversation_id=[PROMPT]),
        chat(tools=[{"type": PROMPT}], kv_transfer_params={"remote_host": PROMPT}),
        completion(prompt=[PROMPT, PROMPT]),
        completion(prompt={PROMPT: PROMPT}, echo=PROMPT),
        b" " * (64 * 2**20) + PROMPT.encode(),
    ):
        await _send(client, CHAT, body)
        await _send(client, COMPLETION, body)
    for name in ("x_kvlease_retain", "x_kvlease_reuse", "x_kvlease_end", "content_encoding"):
        await _send(client, CHAT, chat(), **{name: f"{MARK}-header"})
    await _send(client, CHAT, chat(), traceparent=f"{MARK}-header", tracestate=f"{MARK}=1")


async def _failing_engines(client: Client, prefill: SimEngine, decode: SimEngine) -> None:
    said = {"error": {"message": f"bad: {PROMPT}", "type": PROMPT, "param": PROMPT, "code": PROMPT}}
    named = {"error": {"message": PROMPT, "type": "BadRequestError", "param": "max_tokens"}}
    faults: list[Fault] = [
        Status(400, said),
        Status(400, named),
        Status(500, said),
        Cut(before_head=True),
        Cut(chunks=2, inside=True),
    ]
    for engine in (prefill, decode):
        for fault in faults:
            for path, body in ((CHAT, chat(stream=True)), (COMPLETION, completion())):
                # Twice: a turn is tried again where it can be.
                engine.faults.extend([fault, fault])
                await _send(client, path, body)
                engine.faults.clear()
    decode.faults.append(Slow(chunk_s=0.5))
    await asyncio.to_thread(client.go_away, CHAT, chat(stream=True))


def test_a_password_that_is_wrong_is_not_shown(locked_etcd: Etcd) -> None:
    wrong = f"{MARK}-wrong-password"
    settings = {
        "etcd_endpoints": locked_etcd.endpoint,
        "etcd_user": "kvlease",
        "log_level": "debug",
        "lease_listen": "127.0.0.1:0",
    }
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "kvlease.cli", "serve", "lease"),
            *(f"--set={name}={value}" for name, value in settings.items()),
        ],
        env={"KVLEASE_ETCD_PASSWORD": wrong, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "etcd_password" in ended.stderr  # what to mend
    for text in (wrong, b64(wrong)):
        assert text not in ended.stdout + ended.stderr
