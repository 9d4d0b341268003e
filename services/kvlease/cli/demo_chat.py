"""One streamed turn, as a client sees it: time to first token, answer, logprobs, and what
the router's headers say of it."""

from __future__ import annotations

import http.client
import json
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

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


def ask(
    base_url: str,
    model: str,
    messages: Sequence[Message],
    *,
    conversation: str,
    reuse: bool,
    max_tokens: int,
) -> Answer:
    """Sends one turn and reads its answer to the end. Raises :class:`TurnFailed`."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "allowed_token_ids": _PRINTABLE,
        "logprobs": True,
        "top_logprobs": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", "X-Conversation-ID": conversation}
    if not reuse:
        headers["x-kvlease-reuse"] = "off"
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
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


def _read(response: http.client.HTTPResponse, started: float) -> Answer:
    tokens: list[Token] = []
    ttft_s = 0.0
    prompt_tokens = 0
    for event in _events(response):
        if event.get("usage"):
            prompt_tokens = event["usage"]["prompt_tokens"]
        for choice in event.get("choices", ()):
            for item in (choice.get("logprobs") or {}).get("content") or ():
                ttft_s = ttft_s or time.perf_counter() - started
                top = {entry["token"]: entry["logprob"] for entry in item["top_logprobs"]}
                tokens.append(Token(item["token"], {**top, item["token"]: item["logprob"]}))
    if not tokens:
        raise TurnFailed("the answer was empty")
    return Answer(
        outcome=response.headers.get("x-kvlease-outcome", ""),
        reused_tokens=int(response.headers.get("x-kvlease-reused-tokens", "0")),
        prompt_tokens=prompt_tokens,
        ttft_s=ttft_s,
        tokens=tokens,
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
