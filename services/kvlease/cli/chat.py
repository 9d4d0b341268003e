"""One streamed turn, as a client sees it: time to first token, answer, logprobs, and what
the router's headers say of it."""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlease.cli.text import clean
from kvlease.config import Settings

TIMEOUT_S = 120.0
_PROBE_S = 2.0
_ERROR_BYTES = 64 * 1024
_ROUTER_PORT = Settings.model_fields["router_listen"].default.rpartition(":")[2]

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


class NobodyThere(TurnFailed):
    """Nothing takes connections at the address."""


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
        started, response = send(
            base_url, connection, "POST", "/v1/chat/completions", json.dumps(body), headers
        )
        return _read(response, started)
    except (OSError, http.client.HTTPException) as error:
        raise TurnFailed(f"the turn broke off: {clean(_words_of(error))}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TurnFailed("what answers there is not a router: its answer is no turn") from None
    finally:
        connection.close()


def connect(base_url: str) -> http.client.HTTPConnection:
    """For one request to a router, over http or https, past any proxy."""
    url = urllib.parse.urlsplit(base_url)
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.netloc, timeout=TIMEOUT_S)
    return http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)


def send(
    base_url: str,
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: str | None,
    headers: Mapping[str, str],
) -> tuple[float, http.client.HTTPResponse]:
    """Sends a request to what should be a router: when that was (``perf_counter``), and the
    answer of status 200. Raises :class:`TurnFailed` for any other, and where no router
    answers, with what to change."""
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise TurnFailed(
            f"its certificate does not pass ({error.verify_message}): name the CA that signed it "
            "with SSL_CERT_FILE"
        ) from None
    except ssl.SSLError as error:
        if error.reason != "WRONG_VERSION_NUMBER":
            raise TurnFailed(f"TLS does not come about: {_words_of(error)}") from None
        raise TurnFailed(
            "what answers there does not speak TLS: write http://, if it is the router's address"
        ) from None
    except OSError as error:
        raise NobodyThere(f"no router answers ({_words_of(error)})") from None
    started = time.perf_counter()
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        status = response.status
        text = b"" if status == 200 else response.read(_ERROR_BYTES)
    except (OSError, http.client.HTTPException) as error:
        if not isinstance(connection, http.client.HTTPSConnection) and _takes_tls(base_url):
            raise TurnFailed("what answers there takes TLS: write https://") from None
        if isinstance(error, OSError):
            raise TurnFailed(f"the connection broke off: {_words_of(error)}") from None
        raise TurnFailed(
            "what answers there does not speak HTTP (a gRPC port?): name the address where the "
            f"router takes HTTP (its default port is {_ROUTER_PORT})"
        ) from None
    if status != 200:
        raise TurnFailed(refusal(status, text, path))
    return started, response


def refusal(status: int, body: bytes, path: str) -> str:
    """An answer of another status than 200, in a sentence: the message of an error as
    OpenAI's API has it. A page (a proxy's) is not quoted."""
    message = _message(body)
    if message:
        return f"the router answered {status}: {clean(message)}"
    if status in (404, 405):
        return f"what answers there is not a router: it has no {path}"
    return (
        f"what answers there sent status {status} and no error of a router: it may be a "
        "proxy in front of it; look into its log"
    )


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""


def _takes_tls(base_url: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    url = urllib.parse.urlsplit(base_url)
    try:
        with (
            socket.create_connection((url.hostname or "", url.port or 80), _PROBE_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return False


def _words_of(error: Exception) -> str:
    return str(error) or type(error).__name__


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
            why = clean(_message(data) or str(event["error"]))
            raise TurnFailed(f"an error came in the middle of the answer: {why}")
        yield event
