"""etcd's v3 API as kvlease uses it: generated stubs, keys, and requests.

The stubs are those of the package etcd3aio. Its client is not used: it repeats a
compare-and-swap whose answer was lost and then reports a conflict with itself, it hangs
when a watch is compacted away, and it cannot resolve host names.

The messages have no type stubs: they are ``Any`` here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlease.store.base import Put, SessionLost, Versioned, Write, check_key

# etcd3aio puts its stubs' folder in front of sys.path, where its `google` and `etcd`
# would stay the first found by everything that is imported later.
_path = list(sys.path)
import etcd3aio._protobuf as _stubs  # noqa: E402

sys.path[:] = _path

pb: Any = _stubs
"""All message classes and stubs."""

WatchProgressRequest: Any = pb.rpc_pb2.WatchProgressRequest

Message = Any

Fields = dict[str, Any]
"""A message as its constructor takes it: protobuf makes nested messages of dicts in a fifth
of the time that it takes to make, and copy, messages."""

_MOD: int = pb.Compare.CompareTarget.MOD
_EQUAL: int = pb.Compare.CompareResult.EQUAL

_FENCES = "/.fences/"
"""Keys of the store's own; no listing or watch shows them."""


def prefix_end(prefix: bytes) -> bytes:
    """The ``range_end`` of all keys that start with ``prefix`` (etcd's documentation,
    "etcd API: Key-Value API"; one zero byte stands for "to the end")."""
    for i in reversed(range(len(prefix))):
        if prefix[i] < 0xFF:
            return prefix[:i] + bytes([prefix[i] + 1])
    return b"\0"


def session_id_of(lease_id: int) -> str:
    """As etcdctl prints it."""
    return f"{lease_id:016x}"


def lease_id_of(session_id: str) -> int:
    """Raises :class:`SessionLost` for what can be no session's id."""
    try:
        lease_id = int(session_id, 16)
    except ValueError:
        lease_id = 0
    if not 0 < lease_id < 2**63:
        raise SessionLost(f"session {session_id!r} never existed")
    return lease_id


@dataclass(frozen=True)
class Keyspace:
    """The part of etcd's keys that is this cluster's; ``root`` is put before each."""

    root: str

    @classmethod
    def of(cls, etcd_prefix: str) -> Keyspace:
        # Services' keys start with a slash.
        return cls(etcd_prefix.rstrip("/"))

    def encode(self, key: str) -> bytes:
        """A key, or a prefix of keys, as it is in etcd."""
        check_key(key)
        return (self.root + key).encode()

    def fence(self, name: str) -> bytes:
        return self.encode(_FENCES + name)

    def key(self, raw: bytes) -> str | None:
        """A key without the root; None for one that is not the services'."""
        try:
            key = raw.decode().removeprefix(self.root)
        except UnicodeDecodeError:
            return None
        return None if key.startswith(_FENCES) else key

    def versioned(self, kv: Message) -> Versioned | None:
        """A ``mvccpb.KeyValue``; None for one that is not the services'."""
        key = self.key(kv.key)
        if key is None:
            return None
        session_id = session_id_of(kv.lease) if kv.lease else None
        return Versioned(key, kv.value, kv.mod_revision, session_id)

    def versioned_all(self, kvs: Iterable[Message]) -> Sequence[Versioned]:
        return [item for kv in kvs if (item := self.versioned(kv)) is not None]

    def range(self, key: str, *, revision: int = 0) -> Message:
        """Reads one key."""
        return pb.RangeRequest(key=self.encode(key), revision=revision)

    def range_op(self, key: str, *, revision: int = 0) -> Fields:
        """A ``RequestOp`` that reads a key."""
        return {"request_range": {"key": self.encode(key), "revision": revision}}

    def page(self, prefix: str, start: bytes, limit: int, revision: int) -> Message:
        """Reads up to ``limit`` keys under ``prefix``, the first of them at ``start`` or
        after it."""
        first = self.encode(prefix)
        return pb.RangeRequest(
            key=max(first, start),
            range_end=prefix_end(first),
            limit=limit,
            revision=revision,
        )

    def write_op(self, write: Write) -> Fields:
        """The ``RequestOp`` of a write."""
        key = self.encode(write.key)
        if isinstance(write, Put):
            lease_id = lease_id_of(write.session_id) if write.session_id is not None else 0
            return {"request_put": {"key": key, "value": write.value, "lease": lease_id}}
        return {"request_delete_range": {"key": key}}


def at_revision(key: bytes, revision: int) -> Fields:
    """A ``Compare`` with a key's revision; 0: it does not exist."""
    return {"key": key, "target": _MOD, "result": _EQUAL, "mod_revision": revision}


def ranges_by_key(
    keyspace: Keyspace, keys: Sequence[str], responses: Sequence[Message]
) -> Mapping[str, Versioned | None]:
    """The answers to one ``range_op`` for each of ``keys``, in that order."""
    found: dict[str, Versioned | None] = {}
    for key, response in zip(keys, responses, strict=True):
        kvs = response.response_range.kvs
        found[key] = keyspace.versioned(kvs[0]) if kvs else None
    return found
