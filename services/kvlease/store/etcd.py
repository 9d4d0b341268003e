"""The store on etcd: what several replicas, and several starts of them, share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from kvlease.config import Settings
from kvlease.store.base import (
    MAX_COMMIT_KEYS,
    Committed,
    Conflict,
    SessionLost,
    Versioned,
    WatchEvent,
    Write,
    check_commit,
)
from kvlease.store.etcd_api import lease_id_of, pb, ranges_by_key, session_id_of
from kvlease.store.etcd_channel import Members
from kvlease.store.etcd_commit import Commits
from kvlease.store.etcd_errors import EtcdError, Kind
from kvlease.store.etcd_list import list_keys
from kvlease.store.etcd_session import Renewals, grant
from kvlease.store.etcd_watch import Watch


class EtcdStore:
    """A :class:`~kvlease.store.base.Store` on etcd 3.4 or later.

    Every key has ``etcd_prefix`` in front in etcd; a session is an etcd lease, its id the
    one that etcdctl prints.
    """

    def __init__(self, settings: Settings) -> None:
        """Connects to nothing yet. Raises :class:`~kvlease.config.ConfigError`."""
        self._members = Members(settings)
        self._commits = Commits(self._members)
        self._renewals = Renewals(self._members)

    async def get(self, *keys: str) -> Mapping[str, Versioned | None]:
        found: dict[str, Versioned | None] = {}
        revision = 0
        for start in range(0, len(keys), MAX_COMMIT_KEYS):
            chunk = keys[start : start + MAX_COMMIT_KEYS]
            request = pb.TxnRequest(
                success=[self._members.keyspace.range_op(key, revision=revision) for key in chunk]
            )
            response = await self._members.call("Txn", request)
            revision = revision or response.header.revision
            found.update(ranges_by_key(self._members.keyspace, chunk, response.responses))
        return found

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Sequence[Versioned]:
        items, _ = await list_keys(self._members, prefix, after=after, limit=limit)
        return items

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        check_commit(expect, writes)
        return await self._commits.commit(expect, writes)

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return Watch(self._members, prefix).events()

    async def open_session(self, ttl_s: int) -> str:
        return session_id_of(await grant(self._members, ttl_s))

    async def keep_alive(self, session_id: str) -> float:
        ttl_s = await self._renewals.renew(lease_id_of(session_id))
        if ttl_s <= 0:
            raise SessionLost(f"session {session_id} has ended or never existed")
        return float(ttl_s)

    async def close_session(self, session_id: str) -> None:
        try:
            request = pb.LeaseRevokeRequest(ID=lease_id_of(session_id))
            await self._members.call("LeaseRevoke", request)
        except SessionLost:
            pass
        except EtcdError as error:
            if error.kind is not Kind.NO_SESSION:
                raise

    async def check(self) -> None:
        await self._members.call("Range", self._members.keyspace.range("/"))

    async def close(self) -> None:
        await self._members.close()
        await self._renewals.close()
        await self._commits.close()
