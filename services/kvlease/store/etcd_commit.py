"""Commits: a compare-and-swap that is applied once, and known to be.

When the answer to a transaction is lost, reading back is not enough: what has not been
applied may be applied later, by a member that was slow. So every transaction also
requires that a certain key, the fence, does not exist. To settle what became of one the
store writes that fence: from then on the transaction is either applied or never will
be, and reading tells which. Without failures a fence costs one comparison with an absent
key.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import structlog

from kvlease.store.base import (
    Committed,
    Conflict,
    Put,
    SessionLost,
    StoreUnavailable,
    Versioned,
    Write,
)
from kvlease.store.etcd_api import Fields, Message, at_revision, pb, prefix_end, ranges_by_key
from kvlease.store.etcd_channel import Members, left_s
from kvlease.store.etcd_errors import EtcdError, Kind
from kvlease.store.etcd_group import Answer, Group
from kvlease.store.etcd_session import grant
from kvlease.store.etcd_settle import Attempt, Change

_log = structlog.get_logger(__name__)

_FENCE_TTL_S = 600
"""How long a fence stays: longer than any request can be under way (etcd gives a
proposal up after seconds)."""


class Commits:
    """Sends commits, and settles those whose answer was lost."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._group = Group(members)
        self._fence = self._new_fence()

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        """As :meth:`Store.commit`."""
        deadline = self._members.deadline()
        again = False
        while True:
            attempt = Attempt(expect, writes, self._fence, self._members.revision)
            try:
                answer = await self._send(attempt, deadline, alone=again)
            except EtcdError as error:
                if error.kind is Kind.NO_SESSION:
                    raise SessionLost(_ended(writes)) from None
                if error.kind is not Kind.UNKNOWN:
                    raise
                committed = await self._settle(attempt, deadline, error)
                if committed is not None:
                    return committed
                again = True  # it was not applied and never will be
                continue
            if answer.succeeded:
                return Committed(answer.revision)
            fence, *ranges = answer.responses
            # With the fence up the comparison says nothing about the keys: somebody else
            # is settling a commit. The next try has another fence.
            if not fence.response_range.kvs:
                return Conflict(ranges_by_key(self._members.keyspace, list(expect), ranges))
            self._leave(attempt.fence)
            again = True

    async def close(self) -> None:
        """Waits for what is under way; after the members' end."""
        await self._group.close()

    async def _send(self, attempt: Attempt, deadline: float, *, alone: bool) -> Answer:
        """``alone``: little may be left until the deadline, so nobody shares it."""
        transaction = self._transaction(attempt)
        if alone:
            return await self._group.send_alone(transaction, deadline)
        keys = frozenset((*attempt.expect, *attempt.keys))
        size = sum(len(write.value) for write in attempt.writes if isinstance(write, Put))
        return await self._group.send(transaction, keys, size, deadline)

    def _transaction(self, attempt: Attempt) -> Fields:
        keyspace, fence = self._members.keyspace, attempt.fence
        return {
            "compare": [
                at_revision(fence, 0),
                *(at_revision(keyspace.encode(key), r) for key, r in attempt.expect.items()),
            ],
            "success": [keyspace.write_op(write) for write in attempt.writes],
            "failure": [
                {"request_range": {"key": fence, "keys_only": True}},
                *(keyspace.range_op(key) for key in attempt.expect),
            ],
        }

    async def _settle(
        self, attempt: Attempt, deadline: float, cause: EtcdError
    ) -> Committed | None:
        """What became of an attempt; None: it was not applied and never will be. Raises
        :class:`StoreUnavailable` if that cannot be found out before the deadline."""
        try:
            revision, state = await self._raise_fence(attempt, deadline)
            if revision <= attempt.seen:
                raise StoreUnavailable("etcd has come back with older data")
            verdict = attempt.judge(state)
            if verdict is None:
                verdict = await self._replay(attempt, deadline)
        except StoreUnavailable as error:
            _log.warning("commit_not_settled", keys=attempt.keys, error=str(error))
            raise StoreUnavailable(f"{cause}; the write may have happened") from None
        _log.info("commit_settled", keys=attempt.keys, applied=bool(verdict), cause=str(cause))
        return Committed(verdict) if verdict else None

    async def _raise_fence(
        self, attempt: Attempt, deadline: float
    ) -> tuple[int, Mapping[str, Versioned | None]]:
        """Has the attempt fail from now on, if it was not applied. Returns the written
        keys, as they were at the revision at which that was so."""
        self._leave(attempt.fence)
        lease_id = await grant(self._members, _FENCE_TTL_S, patient=True, deadline=deadline)
        put = pb.PutRequest(key=attempt.fence, lease=lease_id)
        request = pb.TxnRequest(
            success=[
                {"request_put": put},
                *(self._members.keyspace.range_op(key) for key in attempt.keys),
            ]
        )
        response = await self._members.call("Txn", request, patient=True, deadline=deadline)
        _, *ranges = response.responses
        state = ranges_by_key(self._members.keyspace, attempt.keys, ranges)
        return response.header.revision, state

    async def _replay(self, attempt: Attempt, deadline: float) -> int:
        """Looks for the attempt among all changes up to its fence. Returns the revision
        at which it was applied; 0: it was not."""
        root = self._members.keyspace.encode("/")
        create = pb.WatchCreateRequest(
            key=root, range_end=prefix_end(root), start_revision=attempt.seen + 1
        )
        stream = await self._members.stream("Watch")
        try:
            await stream.send(pb.WatchRequest(create_request=create), left_s(deadline))
            at, changes = 0, list[Change]()
            while True:
                response = await stream.receive(left_s(deadline))
                if response is None:
                    raise stream.silent()
                if response.canceled:
                    raise StoreUnavailable("etcd has forgotten the changes since")
                for event in response.events:
                    if event.kv.mod_revision != at:
                        if attempt.made(changes):
                            return at
                        at, changes = event.kv.mod_revision, []
                    if event.kv.key == attempt.fence:
                        return 0
                    changes.append(self._change(event))
        finally:
            await stream.close()

    def _change(self, event: Message) -> Change:
        keyspace = self._members.keyspace
        if event.type == pb.kv_pb2.Event.DELETE:
            return keyspace.key(event.kv.key) or ""
        # A key that is not the services' is a change nobody looks for.
        return keyspace.versioned(event.kv) or ""

    def _leave(self, fence: bytes) -> None:
        """Has the next attempts use another fence than this one."""
        if self._fence == fence:
            self._fence = self._new_fence()

    def _new_fence(self) -> bytes:
        return self._members.keyspace.fence(secrets.token_hex(8))


def _ended(writes: Sequence[Write]) -> str:
    sessions = {w.session_id for w in writes if isinstance(w, Put) and w.session_id}
    return f"session {' or '.join(sorted(sessions))} has ended"
