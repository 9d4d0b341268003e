"""`kvlease trace`: turns of real services, from the local receiver; and from Jaeger."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from click.testing import CliRunner, Result
from router_stack import Stack, running
from sim_engine import Status
from traces_server import serving_traces

from kvlease.cli import trace as command
from kvlease.cli.main import cli
from kvlease.telemetry import ENDPOINT_ENV

AGENT = "a" * 32
"""A client's own trace, with turns of two conversations."""


@dataclass
class Made:
    """Where traces are, and the ids of some of them."""

    url: str
    directory: Path
    first: str
    second: str
    broken: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    directory = tmp_path_factory.mktemp("stack")
    with serving_traces() as addresses, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINT_ENV, f"http://{addresses['traces_otlp']}")
        url = f"http://{addresses['traces']}"
        (directory / "endpoints.json").write_text(json.dumps({"traces": url}))
        # The services tell the last of their spans when they stop.
        yield Made(url, directory, *asyncio.run(run_turns()))


async def run_turns() -> tuple[str, str, str]:
    async with running() as stack:
        prefill = await stack.add("prefill", "prefill-0")
        decode = await stack.add("decode", "decode-0")
        for role in ("prefill", "decode"):
            await stack.add(role, f"{role}-other", model="other")  # type: ignore[arg-type]
        first = await ask(stack, "books-42")
        assert prefill.report is not None
        missed = prefill.report
        prefill.report = {
            **missed,
            "outcome": "hit",
            "reused_tokens": 64,
            "detail": "",
            "lease_traceparent": f"00-{first}-{'b' * 16}-01",
        }
        second = await ask(stack, "books-42")
        prefill.report = missed
        await ask(stack, "twice")
        await ask(stack, "twice", model="other")
        for conversation in ("agent-1", "agent-2"):
            await ask(stack, conversation, traceparent=f"00-{AGENT}-{'c' * 16}-01")
        decode.fault = Status(500)
        broken = await ask(stack, "evil\x1b[31m\n")
    return first, second, broken


async def ask(stack: Stack, conversation: str, model: str = "sim", **headers: str) -> str:
    body = {"model": model, "messages": [], "conversation_id": conversation}
    url = f"{stack.url}/v1/chat/completions"
    async with stack.client.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.headers["x-kvlease-trace-id"]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SETTLED_S", 0.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["trace", *arguments])


def shown(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code != 0
    return result.output or str(result.exception)


# --- From the local stack ------------------------------------------------------------------


def test_a_conversation_s_last_turn_is_a_waterfall(made: Made) -> None:
    text = shown("books-42", "--dir", str(made.directory))

    head, _, waterfall = text.partition("\n\n")
    lines = head.splitlines()
    assert lines[0] == "turn 2 of books-42: hit"
    assert lines[1].startswith("100 prompt tokens: 64 reused, 36 computed; first token after ")
    assert lines[1].endswith(" ms; status 200")
    assert lines[2].startswith("prefill-0 to decode-0; tenant default, model sim; ")
    assert lines[2].endswith(f"; trace {made.second}")
    assert lines[3] == f"read what the turn of trace {made.first} left"
    rows = waterfall.splitlines()
    assert [row.split("  ")[0].rstrip() for row in rows] == [
        "turn",
        "├─ ttft",
        "├─ route",
        "│",
        "├─ prefill",
        "└─ decode",
    ]
    assert "└─ lease_service.start_turn" in rows[3]
    assert all("█" in row and " ms" in row for row in rows)
    assert rows[4].endswith("prefill-0, hit")


def test_a_trace_id_shows_that_trace_and_turn_another_turn(made: Made) -> None:
    by_id = shown(made.first, "--dir", str(made.directory))

    assert by_id.startswith("turn 1 of books-42: miss_no_lease (the conversation has no lease)")
    assert shown(made.first.upper(), "--jaeger", made.url) == by_id
    assert shown("books-42", "--turn", "1", "--jaeger", made.url + "/") == by_id


def test_last_is_the_latest_turn_and_a_failed_one_says_so(made: Made) -> None:
    text = shown("last", "--dir", str(made.directory))

    assert f"trace {made.broken}" in text
    assert "status 500; failed: the decode engine answered with status 500" in text
    assert "failed: no first token: the decode engine answered with status 500" in text
    # and what a client calls its conversation does not steer the terminal
    assert "\x1b" not in text
    assert r"of evil\x1b[31m\n: miss_no_lease" in text


def test_a_conversation_in_a_client_s_trace_shows_its_own_turn_only(made: Made) -> None:
    whole = shown(AGENT, "--dir", str(made.directory))
    assert [line.split(":")[0] for line in whole.splitlines() if line.startswith("turn ")][:2] == [
        "turn 1 of agent-1",
        "turn 1 of agent-2",
    ]

    one = shown("agent-1", "--dir", str(made.directory))

    assert "agent-2" not in one
    assert one.count("─ decode") == 1


def test_several_conversations_of_one_name_are_told_apart(made: Made) -> None:
    assert (
        "there are 2 conversations twice: tenant default, model other; tenant default, model sim. "
        "Name one with --tenant and --model"
    ) in refused("twice", "--dir", str(made.directory))
    assert "model other" in shown("twice", "--model", "other", "--dir", str(made.directory))


def test_json_is_jaegers(made: Made) -> None:
    value = json.loads(shown("books-42", "--json", "--dir", str(made.directory)))

    assert value["traceID"] == made.second
    names = {span["operationName"] for span in value["spans"]}
    assert names == {"turn", "ttft", "route", "lease_service.start_turn", "prefill", "decode"}
    services = {process["serviceName"] for process in value["processes"].values()}
    assert services == {"kvlease-router", "kvlease-lease-service"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "there is no turn of a conversation nobody at"),
        (["books-42", "--turn", "9"], "there is no turn 9 of books-42 at"),
        (["books-42", "--tenant", "acme"], "there is no turn of a conversation books-42 at"),
        (["f" * 32], f"there is no trace and no conversation {'f' * 32} at"),
        (["last", "--model", "none"], "there is no such turn at"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(
    made: Made, arguments: list[str], message: str
) -> None:
    assert message in refused(*arguments, "--dir", str(made.directory))


def test_a_stack_without_traces_and_a_place_named_twice_are_refused(tmp_path: Path) -> None:
    assert "no stack runs in" in refused("last", "--dir", str(tmp_path))
    (tmp_path / "endpoints.json").write_text(json.dumps({"traces": None}))
    assert "keeps no traces: start it with --traces" in refused("last", "--dir", str(tmp_path))
    both = refused("last", "--dir", str(tmp_path), "--jaeger", "http://j:1")
    assert "name two places" in both


# --- From Jaeger ---------------------------------------------------------------------------

NOT_FOUND = {
    "data": None,
    "total": 0,
    "limit": 0,
    "offset": 0,
    "errors": [{"code": 404, "msg": "trace not found"}],
}
"""Jaeger's ``structuredResponse`` with its ``ErrTraceNotFound``."""


def jaeger_turn(end_s: float, *more: dict[str, Any]) -> dict[str, Any]:
    """An answer of Jaeger 1's ``/api/traces`` with a turn, field by field as in its
    ``model/json`` (a trace of 1.5 s whose parent is a client's span elsewhere)."""
    trace_id, start_us = "83a9efd15c1c98a977e0711cc93ee28b", int((end_s - 1.5) * 1e6)
    turn = {
        "traceID": trace_id,
        "spanID": "e127af99e3b3e074",
        "flags": 1,
        "operationName": "turn",
        "references": [
            {"refType": "CHILD_OF", "traceID": trace_id, "spanID": "909541b92cf05311"},
            {"refType": "FOLLOWS_FROM", "traceID": "1" * 32, "spanID": "2" * 16},
        ],
        "startTime": start_us,
        "duration": 1_500_000,
        "tags": [
            {"key": "otel.library.name", "type": "string", "value": "kvlease"},
            {"key": "kvlease.conversation", "type": "string", "value": "books-42"},
            {"key": "kvlease.tenant", "type": "string", "value": "acme"},
            {"key": "gen_ai.request.model", "type": "string", "value": "qwen"},
            {"key": "kvlease.turn", "type": "int64", "value": 3},
            {"key": "kvlease.outcome", "type": "string", "value": "miss_prefix"},
            {"key": "kvlease.ttft_s", "type": "float64", "value": 1.25},
            {"key": "span.kind", "type": "string", "value": "server"},
            {"key": "internal.span.format", "type": "string", "value": "otlp"},
        ],
        "logs": [],
        "processID": "p1",
        "warnings": None,
    }
    for span in more:
        span |= {"traceID": trace_id, "startTime": start_us, "logs": [], "warnings": None}
    return {
        "data": [
            {
                "traceID": trace_id,
                "spans": [turn, *more],
                "processes": {
                    "p1": {"serviceName": "kvlease-router", "tags": []},
                    "p2": {"serviceName": "kvlease-prefill", "tags": []},
                },
                "warnings": None,
            }
        ],
        "total": 0,
        "limit": 0,
        "offset": 0,
        "errors": None,
    }


CLAIM: dict[str, Any] = {
    "spanID": "3" * 16,
    "operationName": "lease.claim",
    "references": [
        {
            "refType": "CHILD_OF",
            "traceID": "83a9efd15c1c98a977e0711cc93ee28b",
            "spanID": "e127af99e3b3e074",
        }
    ],
    "duration": 50_000,
    "tags": [
        {"key": "error", "type": "bool", "value": True},
        {"key": "otel.status_code", "type": "string", "value": "ERROR"},
        {"key": "otel.status_description", "type": "string", "value": "no answer in time"},
        {"key": "kvlease.outcome", "type": "string", "value": "miss_timeout"},
    ],
    "processID": "p2",
}


@dataclass
class StandIn:
    """Answers as it is told, each answer once, the last for ever; keeps what it was asked."""

    answers: list[tuple[int, bytes]]
    url: str = ""

    def __post_init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, str]]] = []

    def next(self, path: str) -> tuple[int, bytes]:
        parts = urlsplit(path)
        self.asked.append((parts.path, dict(parse_qsl(parts.query))))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def standing_in(*answers: tuple[int, dict[str, Any] | str]) -> Iterator[StandIn]:
    encoded = [
        (status, body.encode() if isinstance(body, str) else json.dumps(body).encode())
        for status, body in answers
    ]
    stand_in = StandIn(encoded)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = stand_in.next(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_jaeger_is_asked_as_its_search_wants_it_and_understood() -> None:
    with standing_in((200, jaeger_turn(1706678909.0, {**CLAIM}))) as jaeger:
        text = shown("books-42", "--turn", "3", "--jaeger", jaeger.url)

    ((path, query),) = jaeger.asked
    assert path == "/api/traces"
    assert query.pop("limit").isdigit()
    assert json.loads(query.pop("tags")) == {
        "kvlease.conversation": "books-42",
        "kvlease.turn": "3",
    }
    assert query == {"service": "kvlease-router", "operation": "turn"}
    assert text.splitlines()[:4] == [
        "turn 3 of books-42: miss_prefix",
        "first token after 1,250.0 ms",
        "tenant acme, model qwen; 2024-01-31 05:28:27 UTC; trace 83a9efd15c1c98a977e0711cc93ee28b",
        f"read what the turn of trace {'1' * 32} left",
    ]
    claim = text.splitlines()[-1]
    assert claim.startswith("└─ lease.claim")
    assert claim.endswith("50.0 ms  failed: no answer in time, miss_timeout")


def test_what_is_unknown_of_a_turn_is_left_out() -> None:
    answer = jaeger_turn(1706678909.0)
    answer["data"][0]["spans"][0]["tags"] = [
        {"key": "http.response.status_code", "type": "int64", "value": 400}
    ]
    with standing_in((200, answer)) as jaeger:
        text = shown("last", "--jaeger", jaeger.url)

    assert text.splitlines()[:2] == [
        "a turn: status 400",
        "2024-01-31 05:28:27 UTC; trace 83a9efd15c1c98a977e0711cc93ee28b",
    ]


def test_a_long_failure_of_several_spans_is_said_once() -> None:
    why = "no decode engine of the model qwen takes turns at present"
    failed = [
        {"key": "error", "type": "bool", "value": True},
        {"key": "otel.status_description", "type": "string", "value": why},
    ]
    answer = jaeger_turn(1706678909.0, {**CLAIM, "tags": failed})
    answer["data"][0]["spans"][0]["tags"] += failed
    with standing_in((200, answer)) as jaeger:
        text = shown("books-42", "--jaeger", jaeger.url)

    assert text.count(why) == 1
    assert text.count("failed: as above") == 2


def test_a_trace_without_its_turn_says_so() -> None:
    answer = jaeger_turn(1706678909.0, {**CLAIM})
    del answer["data"][0]["spans"][0]
    with standing_in((200, answer)) as jaeger:
        text = shown("83a9efd15c1c98a977e0711cc93ee28b", "--jaeger", jaeger.url)

    first, blank, bar = text.splitlines()
    assert first == "the turn's own span is missing: its router died, or the turn still runs"
    assert blank == ""
    assert bar.startswith("lease.claim")


def test_what_is_asked_for_does_not_steer_the_terminal(made: Made) -> None:
    message = refused("no\x1b[31m\nbody", "--dir", str(made.directory))
    assert r"no\x1b[31m\nbody" in message


def test_an_id_that_is_no_trace_is_looked_for_among_conversations() -> None:
    name = "b" * 32
    with standing_in((404, NOT_FOUND), (200, {**NOT_FOUND, "data": [], "errors": None})) as jaeger:
        message = refused(name, "--jaeger", jaeger.url)

    assert [path for path, _ in jaeger.asked] == [f"/api/traces/{name}", "/api/traces"]
    assert f"there is no trace and no conversation {name}" in message


def test_a_turn_that_has_just_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SETTLED_S", 0.5)
    end_s = time.time()
    answers = (200, jaeger_turn(end_s)), (200, jaeger_turn(end_s, {**CLAIM}))
    with standing_in(*answers) as jaeger:
        text = shown("last", "--jaeger", jaeger.url)

    assert len(jaeger.asked) == 2
    assert "lease.claim" in text


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, "<html>a page</html>", "is not Jaeger's query service (its answer is not Jaeger's"),
        (200, "[]", "is not Jaeger's query service"),
        (502, "bad gateway", "is not Jaeger's query service (it answers with status 502)"),
        (
            400,
            {**NOT_FOUND, "errors": [{"code": 400, "msg": "the storage is full"}]},
            "refuses: the storage is full",
        ),
    ],
)
def test_what_is_not_jaeger_is_told_in_a_sentence(
    status: int, body: dict[str, Any] | str, message: str
) -> None:
    with standing_in((status, body)) as jaeger:
        assert message in refused("last", "--jaeger", jaeger.url)


def test_nobody_there_is_told_in_a_sentence() -> None:
    message = refused("last", "--jaeger", "http://127.0.0.1:1")
    assert "no Jaeger answers at http://127.0.0.1:1" in message
    assert "--dir" in message
