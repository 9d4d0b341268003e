"""A client's request, read once: everything the router needs to know about a turn."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlease.router import rules
from kvlease.router.rules import InvalidRequest
from kvlease.router.split import Endpoint, Split, split
from kvlease.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn as the client asks for it. ``conversation_id`` empty: it names none.
    ``model`` empty: it names none, which is fine where only one is served."""

    endpoint: Endpoint
    model: str
    tenant: str
    conversation_id: str
    request_id: str
    split: Split
    stream: bool = False
    reuse: bool = True
    retain_s: float | None = None
    end: bool = False

    @property
    def conversation(self) -> common_pb2.Conversation:
        """As the lease service names it."""
        return common_pb2.Conversation(
            tenant=self.tenant, model=self.model, conversation_id=self.conversation_id
        )

    @property
    def affinity(self) -> str:
        """What always falls on the same engine among equally loaded ones."""
        if self.conversation_id:
            return f"{self.tenant}/{self.model}/{self.conversation_id}"
        return self.request_id


def read_ask(endpoint: Endpoint, raw: bytes, headers: Mapping[str, str], tenant: str) -> Ask:
    """``headers`` finds names in any case. Raises :class:`rules.InvalidRequest`."""
    body = _parse(raw)
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise InvalidRequest("model must be a string", "model")
    rules.check_num_answers(body.get("n"))
    request_id = rules.request_id_of(headers.get("X-Request-Id")) or rules.request_id_of(
        body.get("request_id")
    )
    return Ask(
        endpoint=endpoint,
        model=model,
        tenant=tenant,
        conversation_id=rules.conversation_id_of(body, headers),
        request_id=request_id or uuid.uuid4().hex,
        split=split(endpoint, body),
        stream=bool(body.get("stream")),
        reuse=_switch(headers, "x-kvlease-reuse", ("off", "on"), default=True),
        retain_s=rules.retention_of(headers.get("x-kvlease-retain", "")),
        end=_switch(headers, "x-kvlease-end", ("false", "true"), default=False),
    )


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply: send flatter JSON.") from None
    except ValueError as error:  # not JSON, or not text
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return body


def _switch(
    headers: Mapping[str, str], name: str, words: tuple[str, str], *, default: bool
) -> bool:
    text = headers.get(name, "")
    return rules.switch_of(text, name, words) if text else default


def to_json(body: Mapping[str, Any]) -> bytes:
    """Compact JSON that reads as what was parsed. Text stays as it is where it can; a
    lone surrogate, which UTF-8 has no bytes for, is escaped as the client did it."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode()
