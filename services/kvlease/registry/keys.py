"""Where engines and routers are in the store."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from kvlease.v1 import registry_pb2
from kvlease.v1.registry_pb2 import EngineRole

ENGINES = "/engines/"
ROUTERS = "/routers/"

ROLE_WORDS = {
    registry_pb2.ENGINE_ROLE_PREFILL: "prefill",
    registry_pb2.ENGINE_ROLE_DECODE: "decode",
}


@lru_cache(maxsize=16_384)
def part(text: str) -> str:
    """One part of a key: percent-encoded, so that no text reaches beyond its part."""
    return quote(text, safe="")


def engines_of(role: EngineRole.ValueType) -> str:
    """The prefix of all engines of a role; of all engines where it is unspecified."""
    return f"{ENGINES}{ROLE_WORDS[role]}/" if role else ENGINES


def engine(role: EngineRole.ValueType, engine_id: str) -> str:
    """One engine's key. The role must be specified."""
    return engines_of(role) + part(engine_id)


def router(replica_id: str) -> str:
    """One router's key."""
    return ROUTERS + part(replica_id)
