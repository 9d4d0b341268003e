"""Errors in the shape that OpenAI's clients know. Every message says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

_WORD = re.compile(r"[A-Za-z_]{1,40}")
_PARAM = re.compile(r"[a-z][a-z_]{0,39}")


@dataclass(slots=True)
class HttpError(Exception):
    """A request ends with this answer. ``code`` is a word for programs."""

    status: int
    message: str
    code: str
    kind: str = "invalid_request_error"
    param: str = ""

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """The response body."""
        return json.dumps(self._content()).encode()

    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + json.dumps(self._content()).encode() + b"\n\n"

    def _content(self) -> dict[str, object]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param or None,
                "code": self.code,
            }
        }

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        """The whole answer."""
        return web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers=dict(headers or {}),
        )


def unauthorized() -> HttpError:
    """No known API key."""
    return HttpError(
        401,
        "The API key is missing or unknown: send a configured one as 'Authorization: Bearer KEY'.",
        "invalid_api_key",
    )


def too_large(limit: int) -> HttpError:
    """The body is larger than ``limit`` bytes."""
    return HttpError(
        413,
        f"The request body is larger than {limit} bytes: send less, or have max_body_bytes raised.",
        "request_too_large",
    )


def not_json(content_type: str) -> HttpError:
    """The body is said to be something else."""
    return HttpError(
        415,
        f"The body is said to be {content_type}: send JSON, with Content-Type: application/json.",
        "unsupported_media_type",
    )


def unknown_model(model: str, known: list[str]) -> HttpError:
    """No engine serves ``model``."""
    there = ", ".join(known) or "none: no engine is registered"
    return HttpError(
        404,
        f"The model {model!r} is not served here. Known models: {there}.",
        "model_not_found",
        param="model",
    )


def no_lease(conversation_id: str) -> HttpError:
    """Nothing is kept for a conversation, so nothing can be kept for longer."""
    return HttpError(
        404,
        f"Nothing is kept for the conversation {conversation_id!r}: its next turn is computed, "
        "and can ask for a longer retention with x-kvlease-retain.",
        "lease_not_found",
        param="conversation_id",
    )


def unavailable(message: str, code: str) -> HttpError:
    """Nothing is wrong with the request; it can be sent again."""
    return HttpError(503, message, code, kind="service_unavailable")


def engine_lost(message: str) -> HttpError:
    """A decode engine went away in the middle of its answer."""
    return HttpError(502, message, "engine_lost", kind="server_error")


def refusal(status: int, body: bytes) -> str:
    """What an engine's answer with a client error says is wrong, for traces and logs: the
    status, and the ``type``, ``param`` and ``code`` of an error in OpenAI's shape (or in
    vLLM's older one), where they are plain words. Not its message: vLLM's quote the
    request, and so the prompt."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    said = [f"status {status}"]
    if isinstance(error, dict):
        kind, param, code = (error.get(name) for name in ("type", "param", "code"))
        if isinstance(kind, str) and _WORD.fullmatch(kind):
            said.append(kind)
        if isinstance(param, str) and _PARAM.fullmatch(param):
            said.append(f"param {param}")
        if isinstance(code, str) and _WORD.fullmatch(code):
            said.append(f"code {code}")
    return ", ".join(said)
