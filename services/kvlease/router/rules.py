"""What the router decides: whose turn it is, of which conversation, and on which engines.

Pure: no I/O, no clock. A choice comes with its reason in words, for traces and for
``Router.Plan``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvlease.v1 import lease_pb2, registry_pb2

_INTEGER = TypeAdapter(int)

DEFAULT_TENANT = "default"

MAX_CONVERSATION_ID_BYTES = 512
"""As in ``kvlease.v1.Conversation``."""

CONVERSATION_HEADERS = ("X-Conversation-ID", "X-Session-ID")


class InvalidRequest(Exception):
    """The client must change its request; the message says what. ``param`` names the
    field or header."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


def check_num_answers(value: object) -> None:
    """Raises :class:`InvalidRequest` for an ``n`` that vLLM refuses (it reads "2" as 2):
    such a request is no turn of its conversation."""
    try:
        number = 1 if value is None else _INTEGER.validate_python(value)
    except ValidationError:
        number = 0
    if number < 1:
        raise InvalidRequest(f"n is {value!r:.40}: give a whole number of at least 1.", "n")


class UnknownKey(Exception):
    """API keys are configured, and the request carries none of them."""


def tenant_of(authorization: str, keys: Mapping[str, str] | None) -> str:
    """The tenant whose API key an ``Authorization`` header carries. ``keys`` None: there
    are no API keys, and every request is the default tenant's.

    Raises :class:`UnknownKey`.
    """
    if keys is None:
        return DEFAULT_TENANT
    scheme, _, key = authorization.strip().partition(" ")
    tenant = keys.get(key.strip()) if scheme.lower() == "bearer" else None
    if not tenant:
        raise UnknownKey
    return tenant


def conversation_id_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Which conversation a turn says it is of; empty: none.

    In falling order of precedence: ``conversation_id`` in the body, the headers
    ``X-Conversation-ID`` and ``X-Session-ID``, ``prompt_cache_key`` in the body (which
    OpenAI's clients know). Raises :class:`InvalidRequest`.
    """
    places = [("conversation_id", body.get("conversation_id"))]
    places += [(name, headers.get(name)) for name in CONVERSATION_HEADERS]
    places += [("prompt_cache_key", body.get("prompt_cache_key"))]
    for name, value in places:
        if value not in (None, ""):
            return checked_conversation_id(value, name)
    return ""


def checked_conversation_id(value: object, param: str) -> str:
    """``value`` if it can name a conversation. Raises :class:`InvalidRequest`."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string", param)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} must be valid Unicode text", param) from None
    if size > MAX_CONVERSATION_ID_BYTES:
        raise InvalidRequest(
            f"{param} is {size} bytes long: use at most {MAX_CONVERSATION_ID_BYTES}", param
        )
    return value


def retention_of(text: str) -> float | None:
    """Seconds from an ``x-kvlease-retain`` header; None where it is absent. Raises
    :class:`InvalidRequest`."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidRequest(
            f"x-kvlease-retain: {text!r} is not a positive number of seconds", "x-kvlease-retain"
        )
    return seconds


def switch_of(text: str, name: str, words: tuple[str, str]) -> bool:
    """A header with two words, (off, on), case aside. Raises :class:`InvalidRequest`."""
    off, on = words
    word = text.strip().lower()
    if word not in words:
        raise InvalidRequest(f"{name}: {text!r} must be {on!r} or {off!r}", name)
    return word == on


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(value: object) -> str:
    """A client's request id if it is harmless in logs, headers and engines; else empty."""
    return value if isinstance(value, str) and _REQUEST_ID.fullmatch(value) else ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as this router sees it: ``in_flight`` requests of its own; ``suspect``
    if it failed a moment ago; ``departed`` if its session has ended, a moment ago."""

    engine: registry_pb2.Engine
    in_flight: int = 0
    suspect: bool = False
    departed: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and why it, in words. Without an engine, why none."""

    engine: registry_pb2.Engine | None
    reason: str


def choose_prefill(
    candidates: Sequence[Candidate], affinity: str, excluded: Collection[str] = ()
) -> Choice:
    """The prefill engine with the fewest requests of this router. Among equals the one
    that ``affinity`` (the conversation) always falls on, for its own prefix cache."""
    return _least_loaded("prefill", candidates, affinity, excluded)


def choose_decode(
    candidates: Sequence[Candidate],
    lease: lease_pb2.Lease | None,
    affinity: str,
    excluded: Collection[str] = (),
) -> Choice:
    """The engine that holds the conversation's lease, unless it is gone, restarted,
    draining, suspect or excluded; else as :func:`choose_prefill`. ``excluded`` holds
    incarnations."""
    if lease is None:
        return _least_loaded("decode", candidates, affinity, excluded)
    holder = lease.holder_engine_id
    for candidate in candidates:
        engine = candidate.engine
        if engine.engine_id == holder and engine.incarnation == lease.holder_incarnation:
            obstacle = _obstacle(candidate, excluded)
            if not obstacle:
                return Choice(engine, f"{holder} holds the conversation's blocks")
            break
    else:
        obstacle = "is gone"
    other = _least_loaded("decode", candidates, affinity, excluded)
    why = f"{holder} holds the conversation's blocks but {obstacle}; {other.reason}"
    return Choice(other.engine, why)


def _obstacle(candidate: Candidate, excluded: Collection[str]) -> str:
    """Why a holder is not asked again; empty: it is."""
    if candidate.departed:
        return "its session has ended"
    if candidate.engine.state == registry_pb2.ENGINE_STATE_DRAINING:
        return "is draining"
    if candidate.engine.incarnation in excluded:
        return "has just failed this turn"
    if candidate.suspect:
        return "failed a moment ago"
    return ""


def _least_loaded(
    role: str, candidates: Sequence[Candidate], affinity: str, excluded: Collection[str]
) -> Choice:
    fit = [
        candidate
        for candidate in candidates
        if candidate.engine.state != registry_pb2.ENGINE_STATE_DRAINING
        and candidate.engine.incarnation not in excluded
    ]
    if not fit:
        return Choice(None, _why_none(role, candidates, excluded))
    # Engines that may be dead come last: they are tried when there is nothing better.
    best = min(
        fit,
        key=lambda c: (c.departed, c.suspect, c.in_flight, _rank(affinity, c.engine.engine_id)),
    )
    return Choice(best.engine, _why(role, best, fit))


def _why(role: str, best: Candidate, fit: Sequence[Candidate]) -> str:
    name = best.engine.engine_id
    if best.departed:
        return f"{name} is the last {role} engine known; its session has ended"
    if len(fit) == 1:
        return f"{name} is the only {role} engine"
    if best.suspect:
        return f"all {role} engines failed a moment ago; {name} has {best.in_flight} in flight"
    return f"{name} has the fewest requests in flight ({best.in_flight}) of {len(fit)} engines"


def _why_none(role: str, candidates: Sequence[Candidate], excluded: Collection[str]) -> str:
    if not candidates:
        return f"no {role} engine of this model is registered"
    draining = ", ".join(
        candidate.engine.engine_id
        for candidate in candidates
        if candidate.engine.state == registry_pb2.ENGINE_STATE_DRAINING
    )
    if any(candidate.engine.incarnation in excluded for candidate in candidates):
        others = f" (draining: {draining})" if draining else ""
        return f"no other {role} engine of this model is left to try{others}"
    return f"all {role} engines of this model are draining ({draining})"


def _rank(affinity: str, engine_id: str) -> bytes:
    """Rendezvous hashing: an order of engines that is another for each affinity, and
    changes only where an engine comes or goes."""
    return hashlib.blake2b(f"{affinity}\0{engine_id}".encode(), digest_size=8).digest()
