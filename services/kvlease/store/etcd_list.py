"""Listings: page by page, all pages at one revision."""

from __future__ import annotations

from collections.abc import Sequence

from kvlease.store.base import StoreUnavailable, Versioned
from kvlease.store.etcd_channel import Members
from kvlease.store.etcd_errors import EtcdError, Kind

PAGE_KEYS = 500
"""Keys in one request: 3 MB, where they are leases of 100 k tokens."""

_MAX_RESTARTS = 10


async def list_keys(
    members: Members, prefix: str, *, after: str = "", limit: int = 0
) -> tuple[Sequence[Versioned], int]:
    """Keys as :meth:`Store.list` gives them, and the revision at which they were so.

    Each page has the request deadline. Raises :class:`StoreUnavailable`.
    """
    for _ in range(_MAX_RESTARTS):
        try:
            return await _list_once(members, prefix, after, limit)
        except EtcdError as error:
            if error.kind is not Kind.COMPACTED:
                raise
    raise StoreUnavailable(
        f"etcd was compacted {_MAX_RESTARTS} times while keys under {prefix} were listed: "
        "let it keep its history for longer (--auto-compaction-retention)"
    )


async def _list_once(
    members: Members, prefix: str, after: str, limit: int
) -> tuple[Sequence[Versioned], int]:
    found: list[Versioned] = []
    keyspace, revision = members.keyspace, 0
    # The first key after a key is that key with a zero byte behind it.
    start = keyspace.encode(after) + b"\0" if after else b""
    while True:
        size = min(limit - len(found), PAGE_KEYS) if limit else PAGE_KEYS
        page = await members.call("Range", keyspace.page(prefix, start, size, revision))
        revision = revision or page.header.revision
        found += keyspace.versioned_all(page.kvs)
        if not page.more or (limit and len(found) >= limit):
            return found, revision
        start = page.kvs[-1].key + b"\0"
