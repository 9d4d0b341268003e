"""One streamed turn, as a client sees it: time to first token, answer, logprobs, and what
the router's headers say of it."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0

Message = dict[str, str]

# The small model writes any byte; a trained one writes text. Printable ASCII only, so that
# the answer is text and tokenizes the same when the client sends it back.
_PRINTABLE = list(range(0x20, 0x7F))
COMPARABLE = {"allowed_token_ids": _PRINTABLE, "logprobs": True, "top_logprobs": 5}
"""Fields for answers of the small model whose tokens can be compared."""

_WORDS = (
    "the a this each block token lease turn cache prompt engine router claim reads holds writes "
    "keeps frees computes history answer tool result file line test value error number list "
    "when after before because until where not only again first last next new old"
)


class TurnFailed(Exception):
    """The router or an engine answered with an error; the message quotes it."""


@dataclass(frozen=True)
class Token:
    """One generated token: its text, and the logprobs of the most likely ones here."""

    text: str
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    outcome: str
    reused_tokens: int
    prompt_tokens: int
    ttft_s: float
    tokens: Sequence[Token] = field(repr=False)
    """Empty where no logprobs were asked for."""
    text: str = field(default="", repr=False)
    trace_id: str = ""


def ask(
    base_url: str,
    model: str,
    messages: Sequence[Message],
    *,
    conversation: str,
    max_tokens: int,
    reuse: bool = True,
    api_key: str = "",
    fields: Mapping[str, Any] | None = None,
) -> Answer:
    """Sends one turn, with more ``fields`` in its body, and reads its answer to the end.
    Raises :class:`TurnFailed`."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(fields or {}),
    }
    headers = {"Content-Type": "application/json", "X-Conversation-ID": conversation}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    if not reuse:
        headers["x-kvlease-reuse"] = "off"
    connection = connect(base_url)
    try:
        connection.connect()
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise TurnFailed(f"the router answered {response.status}: {text}")
        return _read(response, started)
    except (OSError, http.client.HTTPException) as error:
        raise TurnFailed(f"the turn broke off: {error or type(error).__name__}") from None
    finally:
        connection.close()


def connect(base_url: str) -> http.client.HTTPConnection:
    """For one request to a router, over http or https, past any proxy."""
    url = urllib.parse.urlsplit(base_url)
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S)
    return http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)


def words(length: int, *, seed: int) -> str:
    """So many characters of words, always the same ones for a seed."""
    choose = random.Random(seed).choice
    vocabulary = _WORDS.split()
    text = ""
    while len(text) < length:
        text += choose(vocabulary) + " "
    return text[:length]


def _read(response: http.client.HTTPResponse, started: float) -> Answer:
    tokens: list[Token] = []
    text = ""
    ttft_s = 0.0
    prompt_tokens = 0
    for event in _events(response):
        if event.get("usage"):
            prompt_tokens = event["usage"]["prompt_tokens"]
        for choice in event.get("choices", ()):
            content = choice.get("delta", {}).get("content") or ""
            logprobs = (choice.get("logprobs") or {}).get("content") or ()
            if content or logprobs:
                ttft_s = ttft_s or time.perf_counter() - started
            text += content
            for item in logprobs:
                top = {entry["token"]: entry["logprob"] for entry in item["top_logprobs"]}
                tokens.append(Token(item["token"], {**top, item["token"]: item["logprob"]}))
    if not ttft_s:
        raise TurnFailed("the answer was empty")
    return Answer(
        outcome=response.headers.get("x-kvlease-outcome", ""),
        reused_tokens=int(response.headers.get("x-kvlease-reused-tokens", "0")),
        prompt_tokens=prompt_tokens,
        ttft_s=ttft_s,
        tokens=tokens,
        text=text,
        trace_id=response.headers.get("x-kvlease-trace-id", ""),
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise TurnFailed(f"an error came in the middle of the answer: {event['error']}")
        yield event
