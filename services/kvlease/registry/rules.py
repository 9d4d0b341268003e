"""What the registry accepts, and what it stores. No I/O, and no clock but one passed in."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import grpc

from kvlease import times
from kvlease.rpc import Refused, check_enum
from kvlease.v1 import registry_pb2
from kvlease.v1.registry_pb2 import Engine, EngineRole, Replica

MAX_ID_BYTES = 256
"""An id is part of a key and of every line that a person reads."""


def invalid(reason: str, message: str) -> Refused:
    """INVALID_ARGUMENT with a sentence that names the field and the fix."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, reason, message)


def check_engine(engine: Engine) -> None:
    """Raises INVALID_ENGINE unless everything that a reader or a router needs is there."""
    _check_texts(
        "INVALID_ENGINE",
        {
            "engine.engine_id": engine.engine_id,
            "engine.incarnation": engine.incarnation,
            "engine.model": engine.model,
            "engine.side_channel_host": engine.side_channel_host,
            "engine.compatibility_hash": engine.compatibility_hash,
        },
    )
    for name in engine.other_models:
        _check_texts("INVALID_ENGINE", {"engine.other_models": name})
    check_enum(EngineRole.DESCRIPTOR, engine.role, "engine.role", "INVALID_ENGINE", required=True)
    address = urlsplit(engine.http_address)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise invalid(
            "INVALID_ENGINE",
            f"engine.http_address is {engine.http_address!r}: give the base URL of the engine's "
            "OpenAI-compatible server, like http://10.0.0.7:8000",
        )
    if not 0 < engine.side_channel_port < 65536:
        raise invalid(
            "INVALID_ENGINE",
            f"engine.side_channel_port is {engine.side_channel_port}: give the TCP port of the "
            "NIXL side channel",
        )
    if engine.block_size == 0:
        raise invalid(
            "INVALID_ENGINE", "engine.block_size is 0: give the number of tokens in one KV block"
        )


def check_name(role: EngineRole.ValueType, engine_id: str) -> None:
    """Raises INVALID_ENGINE unless role and id can name an engine."""
    check_enum(EngineRole.DESCRIPTOR, role, "role", "INVALID_ENGINE", required=True)
    _check_texts("INVALID_ENGINE", {"engine_id": engine_id})


def check_keep_alive(request: registry_pb2.KeepAliveRequest) -> None:
    """Raises INVALID_ENGINE."""
    check_name(request.role, request.engine_id)
    _check_texts(
        "INVALID_ENGINE",
        {"session_id": request.session_id, "incarnation": request.incarnation},
    )


def check_filter(role: EngineRole.ValueType) -> None:
    """Raises INVALID_FILTER for a role that there is not."""
    check_enum(EngineRole.DESCRIPTOR, role, "role", "INVALID_FILTER")


def check_session_id(session_id: str) -> None:
    """Raises INVALID_SESSION."""
    _check_texts("INVALID_SESSION", {"session_id": session_id})


def check_replica(replica: Replica) -> None:
    """Raises INVALID_REPLICA."""
    _check_texts(
        "INVALID_REPLICA",
        {
            "replica.replica_id": replica.replica_id,
            "replica.http_address": replica.http_address,
            "replica.grpc_address": replica.grpc_address,
        },
    )


def _check_texts(reason: str, fields: Mapping[str, str]) -> None:
    for field, value in fields.items():
        if not value:
            raise invalid(reason, f"{field} is empty: it is required")
        if len(value.encode()) > MAX_ID_BYTES:
            raise invalid(
                reason, f"{field} has more than {MAX_ID_BYTES} bytes: choose a shorter one"
            )


def registered(
    engine: Engine, previous: Engine | None, *, session_id: str, session_ttl_s: float, now: float
) -> Engine:
    """The record of a new registration. One that drains goes on draining when the same
    incarnation registers again, after it lost its session."""
    stored = Engine()
    stored.CopyFrom(engine)
    same_start = previous is not None and previous.incarnation == engine.incarnation
    stored.state = (
        registry_pb2.ENGINE_STATE_DRAINING
        if same_start and previous is not None and is_draining(previous)
        else registry_pb2.ENGINE_STATE_SERVING
    )
    stored.session_id = session_id
    stored.session_ttl.CopyFrom(times.duration(session_ttl_s))
    stored.register_time.CopyFrom(times.timestamp(now))
    return stored


def is_draining(engine: Engine) -> bool:
    """Whether the engine takes no new turns."""
    return engine.state == registry_pb2.ENGINE_STATE_DRAINING


def owns_session(engine: Engine | None, request: registry_pb2.KeepAliveRequest) -> bool:
    """Whether the record belongs to the process that asks."""
    return (
        engine is not None
        and engine.session_id == request.session_id
        and engine.incarnation == request.incarnation
    )


def matches(engine: Engine, role: EngineRole.ValueType, model: str) -> bool:
    """Whether an engine passes a list's or watch's filters; absent ones let all pass."""
    return role in (registry_pb2.ENGINE_ROLE_UNSPECIFIED, engine.role) and model in (
        "",
        engine.model,
        *engine.other_models,
    )
