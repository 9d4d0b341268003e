"""`kvlease talk` against a real router and simulated engines."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from router_stack import Stack, running_pair
from sim_engine import Slow, Status

from kvlease.ca import Authority
from kvlease.cli.main import cli
from kvlease.config import ConfigError


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_pair() as made:
        yield made


async def talk(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, ["talk", *arguments])


def printed(result: Result) -> Any:
    """The JSON, among what the services of this process log."""
    value, _ = json.JSONDecoder().raw_decode(result.stdout, result.stdout.index("{\n"))
    return value


def reports_a_hit(stack: Stack) -> None:
    stack.engines["prefill-0"].report = {"outcome": "hit", "reused_tokens": 640, "detail": "5 of 5"}


async def test_each_turn_has_a_line_and_hits_are_a_success(stack: Stack) -> None:
    reports_a_hit(stack)

    result = await talk("--url", stack.url, "--turns", "2")

    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("talk: turn ") == 2
    assert "hit" in result.stdout
    assert "640" in result.stdout


async def test_the_turns_are_one_growing_conversation(stack: Stack) -> None:
    reports_a_hit(stack)

    result = await talk("--url", stack.url, "--turns", "3", "--size", "500", "--json")

    told = printed(result)
    assert [turn["turn"] for turn in told["turns"]] == [1, 2, 3]
    assert all(len(turn["trace_id"]) == 32 for turn in told["turns"])
    assert told["model"] == "sim"
    seen = stack.engines["decode-0"].seen
    assert [len(request.body["messages"]) for request in seen] == [1, 3, 5]
    assert len(seen[0].body["messages"][0]["content"]) == 500
    (conversation,) = {request.told["conversation_id"] for request in seen}
    assert conversation == told["conversation_id"]


async def test_no_hit_is_a_failure_that_says_what_it_was_instead(stack: Stack) -> None:
    result = await talk("--url", stack.url, "--json")

    assert result.exit_code == 1
    assert printed(result)["turns"][2]["outcome"] == "miss_no_lease"
    assert "no turn was a hit, but miss_no_lease" in result.stderr
    assert "kvlease trace" in result.stderr


async def test_with_several_models_one_is_named(stack: Stack) -> None:
    reports_a_hit(stack)
    for role in ("prefill", "decode"):
        await stack.add(role, f"{role}-1", "other")  # type: ignore[arg-type]

    unnamed = await talk("--url", stack.url)
    unknown = await talk("--url", stack.url, "--model", "third")
    named = await talk("--url", stack.url, "--model", "sim")

    assert unnamed.exit_code == 1
    assert "--model; those served are: other, sim" in unnamed.stderr
    assert unknown.exit_code == 1
    assert "the router answered 404: The model" in unknown.stderr
    assert "{" not in unknown.stderr
    assert named.exit_code == 0, named.stderr


async def test_an_error_is_a_sentence(stack: Stack) -> None:
    stack.engines["decode-0"].faults.append(Status(400))

    result = await talk("--url", stack.url)

    assert result.exit_code == 1
    assert result.stderr == f"Error: {stack.url}: the router answered 400: simulated\n"


async def test_turns_before_a_failed_one_are_shown(stack: Stack) -> None:
    reports_a_hit(stack)
    stack.engines["decode-0"].faults += [Slow(), Status(400)]
    table = await talk("--url", stack.url)
    stack.engines["decode-0"].faults += [Slow(), Status(400)]
    as_json = await talk("--url", stack.url, "--json")

    assert (table.exit_code, as_json.exit_code) == (1, 1)
    assert "640" in table.stdout
    assert [turn["turn"] for turn in printed(as_json)["turns"]] == [1]
    said = f"turn 2 failed: {stack.url}: the router answered 400: simulated"
    assert said in table.stderr
    assert said in as_json.stderr


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """The URL of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


PAGE = "<html><head><title>503 Service Unavailable</title></head></html>"


@pytest.mark.parametrize("more", [[], ["--model", "m"]])
@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, "404: Not Found", "what answers there is not a router: it has no /v1/"),
        (503, PAGE, "what answers there sent status 503 and no error of a router: it may be a"),
        (400, '{"error": {"message": "too long\\u001b[2J"}}', r"answered 400: too long\x1b[2J"),
        (200, PAGE, "what answers there is not a router"),
    ],
)
async def test_an_answer_that_is_no_router_s_is_a_sentence(
    status: int, body: str, said: str, more: list[str]
) -> None:
    with answering(status, body) as url:
        result = await talk("--url", url, *more)
    if not (status == 200 and more):
        assert said in result.stderr
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "<" not in result.stderr
    assert "{" not in result.stderr


@pytest.mark.parametrize("more", [[], ["--model", "sim"]])
async def test_the_wrong_protocol_is_told_with_the_right_one(
    stack: Stack, more: list[str], tmp_path: Path
) -> None:
    pair = Authority(tmp_path).issue("router", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    secure = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    port = secure.sockets[0].getsockname()[1]
    async with secure:
        plain_to_tls = await talk("--url", f"http://127.0.0.1:{port}", *more)
        unknown_ca = await talk("--url", f"https://127.0.0.1:{port}", *more)
    tls_to_plain = await talk("--url", stack.url.replace("http://", "https://"), *more)
    grpc = await talk("--url", f"http://{stack.lease.addresses['lease']}", *more)

    assert "what answers there takes TLS: write https://" in plain_to_tls.stderr
    assert "name the CA that signed it with SSL_CERT_FILE" in unknown_ca.stderr
    assert "does not speak TLS: write http://" in tls_to_plain.stderr
    assert "what answers there does not speak HTTP (a gRPC port?)" in grpc.stderr
    assert "7480" in grpc.stderr
    for result in (plain_to_tls, unknown_ca, tls_to_plain, grpc):
        assert result.exit_code == 1
        assert result.stderr.strip().isprintable()


async def test_a_router_that_asks_for_keys_gets_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"secret": "acme"}')
    async with running_pair(api_keys_file=str(keys)) as stack:
        reports_a_hit(stack)

        without = await talk("--url", stack.url)
        with_key = await talk("--url", stack.url, "--api-key", "secret")

        assert without.exit_code == 1
        assert "401" in without.stderr
        assert with_key.exit_code == 0, with_key.stderr


async def test_nobody_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no stack in ./.kvlease
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("KVLEASE_ROUTER_LISTEN", address)

        result = await talk()

    assert result.exit_code == 1
    assert f"http://{address}: no router answers" in result.stderr
    assert "--url" in result.stderr


async def test_what_is_no_router_is_said(stack: Stack) -> None:
    # An engine answers turns too, without a word about reuse.
    engine = await talk("--url", stack.engines["decode-0"].http_address, "--model", "sim")
    no_url = await talk("--url", "ftp://x")
    both = await talk("--url", stack.url, "--dir", "x")

    assert engine.exit_code == 1
    assert "is this kvlease's router, or an engine?" in engine.stderr
    assert isinstance(no_url.exception, ConfigError)
    assert "'ftp://x' is no URL of a router" in str(no_url.exception)
    assert both.exit_code == 2


async def test_a_stack_s_directory_names_the_router(stack: Stack, tmp_path: Path) -> None:
    reports_a_hit(stack)
    (tmp_path / "endpoints.json").write_text(json.dumps({"router_http": stack.url}))

    result = await talk("--dir", str(tmp_path), "--turns", "2")

    assert result.exit_code == 0, result.stderr
