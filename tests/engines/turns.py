"""A client for engine tests: turns through the router, as an agent would send them."""

from __future__ import annotations

import itertools
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]

TIMEOUT_S = 120.0

_WORDS = ("lease", "block", "prefix", "engine", "decode", "turn", "claim", "grant", "router")

_ids = itertools.count(1)


def text(num_chars: int, seed: int) -> str:
    """Words of about so many characters; one character is one token of the small model."""
    words = random.Random(seed)
    parts: list[str] = []
    size = 0
    while size < num_chars:
        parts.append(words.choice(_WORDS))
        size += len(parts[-1]) + 1
    return " ".join(parts)[:num_chars]


def new_conversation(name: str = "test") -> str:
    """An id that no other test uses."""
    return f"{name}-{time.time_ns():x}-{next(_ids)}"


@dataclass(frozen=True)
class Turn:
    """One answered turn."""

    outcome: str
    reused_tokens: int
    number: int
    trace_id: str
    text: str
    prompt_ids: list[int]
    answer_ids: list[int]
    first_logprobs: list[float]
    """The first token's top log probabilities, highest first."""
    seconds: float
    body: dict[str, Any] = field(repr=False)


class Client:
    """Sends turns to one router."""

    def __init__(self, base_url: str, model: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model

    def chat(
        self,
        messages: Sequence[Message],
        conversation: str | None,
        *,
        max_tokens: int = 24,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Turn:
        """A turn, not streamed, greedy, with log probabilities and token ids."""
        request = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
            "return_token_ids": True,
            **({"conversation_id": conversation} if conversation else {}),
            **body,
        }
        started = time.monotonic()
        status, answer_headers, answer = self.post("/v1/chat/completions", request, headers)
        assert status == 200, f"{status}: {answer}"
        choice = answer["choices"][0]
        top = choice["logprobs"]["content"][0]["top_logprobs"]
        return Turn(
            outcome=answer_headers["x-kvlease-outcome"],
            reused_tokens=int(answer_headers["x-kvlease-reused-tokens"]),
            number=int(answer_headers["x-kvlease-turn"]),
            trace_id=answer_headers["x-kvlease-trace-id"],
            text=choice["message"]["content"],
            prompt_ids=answer["prompt_token_ids"],
            answer_ids=choice["token_ids"],
            first_logprobs=sorted((item["logprob"] for item in top), reverse=True),
            seconds=time.monotonic() - started,
            body=answer,
        )

    def recomputed(self, messages: Sequence[Message], **kwargs: Any) -> Turn:
        """The same turn without any reuse, in no conversation."""
        turn = self.chat(messages, None, headers={"x-kvlease-reuse": "off"}, **kwargs)
        assert turn.outcome == "off"
        return turn

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers (lower-case names) and JSON body, also of an error."""
        request = urllib.request.Request(
            self.base_url + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                data, status, got = response.read(), response.status, response.headers
        except urllib.error.HTTPError as error:
            with error:
                data, status, got = error.read(), error.code, error.headers
        return status, {k.lower(): v for k, v in got.items()}, json.loads(data or b"null")


def expected_reuse(leased: Sequence[int], prompt: Sequence[int], chunk_tokens: int) -> int:
    """How many tokens of a lease a prompt can reuse: all of them if it starts with them,
    else the full chunks before the first difference."""
    same = 0
    for ours, theirs in zip(leased, prompt, strict=False):
        if ours != theirs:
            break
        same += 1
    if same == len(leased):
        return same
    return same // chunk_tokens * chunk_tokens


def leased_ids(turn: Turn) -> list[int]:
    """The tokens whose KV a decode engine holds after a turn: all but the last."""
    return (turn.prompt_ids + turn.answer_ids)[:-1]


def assert_same_answer(reused: Turn, recomputed: Turn, tolerance: float = 1e-3) -> None:
    """Equal prompts, and equal top log probabilities of the first token."""
    assert reused.prompt_ids == recomputed.prompt_ids
    assert len(reused.first_logprobs) == len(recomputed.first_logprobs)
    for ours, theirs in zip(reused.first_logprobs, recomputed.first_logprobs, strict=True):
        assert abs(ours - theirs) <= tolerance, (reused.first_logprobs, recomputed.first_logprobs)
