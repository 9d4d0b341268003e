"""Clients leave at every moment of a turn: nothing stays behind, and engines still answer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from engines.look import MODEL, unfinished_requests, usage, wait
from engines.turns import Client, new_conversation, text

from kvlease.cli import processes
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack

RETENTION_TTL_S = 5
SETTINGS = (
    f"retention_ttl={RETENTION_TTL_S}",
    "session_ttl=3",
    "claim_grace=2",
    "handoff_ttl=5",
)
SLACK_S = 3.0
"""For a keep-alive to publish the usage, and a busy machine."""


@pytest.fixture(scope="module")
def short_stack(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[Stack]:  # type: ignore[no-untyped-def]
    """One engine of each role, whose blocks stay for five seconds."""
    stack = Stack(
        Options(directory=tmp_path_factory.mktemp("short"), model=model, assignments=SETTINGS)
    )
    with stack:
        yield stack


class LeavingClient:
    """Sends a turn and leaves."""

    def __init__(self, stack: Stack, prompt_chars: int, max_tokens: int) -> None:
        url = urlsplit(stack.endpoints["router_http"])
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text(prompt_chars, seed=prompt_chars)}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "conversation_id": new_conversation("leaving"),
        }
        self._connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"content-type": "application/json"},
        )

    def read_some(self) -> bytes:
        response = self._connection.getresponse()
        assert response.status == 200
        return response.read1(4096)

    def leave(self) -> None:
        self._connection.close()


def before_prefill(stack: Stack) -> None:
    LeavingClient(stack, 3000, 10).leave()


def during_prefill(stack: Stack) -> None:
    client = LeavingClient(stack, 8000, 10)
    wait(lambda: unfinished(stack) > 0, "the prompt is being computed")
    client.leave()


def between_prefill_and_decode(stack: Stack) -> None:
    # A stopped decode engine takes nothing: the prompt waits at the prefill engine.
    stack.send("decode-0", signal.SIGSTOP)
    client = LeavingClient(stack, 1500, 10)
    wait(lambda: usage(stack)["prefill-0"].retained_leases > 0, "the prompt is computed")
    client.leave()
    stack.send("decode-0", signal.SIGCONT)


def during_decode(stack: Stack) -> None:
    client = LeavingClient(stack, 1000, 2000)
    assert client.read_some()
    client.leave()


@pytest.mark.parametrize(
    "leave", [before_prefill, during_prefill, between_prefill_and_decode, during_decode]
)
def test_a_client_that_leaves_leaves_nothing_behind(
    short_stack: Stack, leave: Callable[[Stack], None]
) -> None:
    # when a client leaves in the middle of its turn
    leave(short_stack)
    # then after the retention TTL no engine retains blocks, or runs anything
    time.sleep(RETENTION_TTL_S)
    wait(
        lambda: all(engine.retained_blocks == 0 for engine in usage(short_stack).values()),
        "no blocks are retained",
        SLACK_S,
    )
    wait(lambda: unfinished(short_stack) == 0, "nothing runs")
    # and the engines still answer, with reuse
    client = Client(short_stack.endpoints["router_http"], MODEL)
    wait(lambda: len(usage(short_stack)) == 2, "both engines are registered")
    conversation = new_conversation("after")
    prompt = [{"role": "user", "content": text(900, seed=3)}]
    first = client.chat(prompt, conversation)
    again = [
        *prompt,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    assert client.chat(again, conversation).outcome in {"hit", "miss_short"}


def test_a_lease_is_over_after_its_retention_ttl(short_stack: Stack) -> None:
    client = Client(short_stack.endpoints["router_http"], MODEL)
    conversation = new_conversation("expires")
    prompt = [{"role": "user", "content": text(900, seed=4)}]
    client.chat(prompt, conversation)
    time.sleep(RETENTION_TTL_S)
    wait(lambda: usage(short_stack)["decode-0"].retained_blocks == 0, "freed", SLACK_S)
    assert client.chat(prompt, conversation).outcome == "miss_expired"


def test_an_engine_whose_api_server_dies_leaves_and_ends(short_stack: Stack) -> None:
    # given only the API server of an engine killed, as the kernel does when memory is short
    identity = short_stack.identity("decode-0")
    os.kill(short_stack.pid("decode-0"), signal.SIGKILL)
    # then the engine leaves the registry, and its other processes end
    wait(lambda: "decode-0" not in usage(short_stack), "decode-0 has left")
    wait(lambda: not processes.members(identity), "its processes have ended", 30.0)
    # and it can be started again where it was
    short_stack.ended()
    short_stack.start_part("decode-0")


def unfinished(stack: Stack) -> float:
    """Requests that run or wait, over all engines."""
    engines = [*stack.endpoints["prefill"], *stack.endpoints["decode"]]
    return sum(unfinished_requests(engine["http"]) for engine in engines)
