"""Changes of a conversation's records: read, decide by a rule, compare-and-swap.

A change first decides by what this replica has seen last, so that it usually costs one
round trip to the store. Nothing but the store's word is final, though: a write carries
the revisions that it was decided by, and a decision to write nothing is made again on
records just read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from kvlease import metrics, serving
from kvlease.lease import keys, rules
from kvlease.lease.buckets import Buckets
from kvlease.lease.rules import State
from kvlease.mirror import Mirror
from kvlease.registry import keys as registry_keys
from kvlease.rpc import Refused
from kvlease.store.base import (
    Conflict,
    Delete,
    Put,
    SessionLost,
    Store,
    StoreUnavailable,
    Versioned,
    Write,
)
from kvlease.v1 import registry_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import ConversationInfo, Lease
from kvlease.v1.registry_pb2 import Engine

Answer = TypeVar("Answer")

Decide = Callable[[State, Engine | None], tuple[Answer, State]]
"""A rule: from the records as they are, and the lease's holder as it is registered, to an
answer and the records as they shall be."""

MAX_TRIES = 16
"""One replica changes a conversation once at a time, so conflicts come only from other
replicas; with two, one in 65,000 changes would lose so often."""

MAX_REMEMBERED = 16_384
"""Conversations whose record's revision a replica remembers: about 10 MB."""


class LeaseView:
    """A stored lease, with what watches ask of it computed once."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    @cached_property
    def sessions(self) -> frozenset[str]:
        """See :func:`~kvlease.lease.rules.sessions_of`."""
        return rules.sessions_of(self.lease)

    @cached_property
    def public(self) -> Lease:
        """See :func:`~kvlease.lease.rules.public`."""
        return rules.public(self.lease)

    @classmethod
    def parse(cls, value: bytes) -> LeaseView:
        """A stored lease record."""
        return cls(Lease.FromString(value))


@dataclass(frozen=True, slots=True)
class _Known:
    """A conversation's records as this replica knows them. ``certain``: both are what the
    store held a moment ago, not what a watch or an earlier write told."""

    lease: Versioned | None
    info: Versioned | None
    state: State
    certain: bool


@dataclass(slots=True)
class _Turn:
    """Who waits for a conversation here, and what the one before made of its lease."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    revision: int = 0
    lease: Versioned | None = None


class Records:
    """The records of all conversations."""

    def __init__(
        self, store: Store, leases: Mirror[LeaseView], engines: Mirror[Engine], buckets: Buckets
    ) -> None:
        self._store = store
        self._leases = leases
        self._engines = engines
        self._buckets = buckets
        self._turns: dict[str, _Turn] = {}
        self._infos: OrderedDict[str, Versioned] = OrderedDict()

    async def change(
        self,
        conversation: Conversation,
        decide: Decide[Answer],
        *,
        with_info: bool,
        with_holder: bool = False,
    ) -> Answer:
        """Decides and writes, as one compare-and-swap.

        ``with_info``: the conversation's own record is decided by and written too. Without
        it, a rule is shown that record only when there is no lease. ``with_holder``: the
        rule needs to know for certain whether the holder is registered.

        Raises what the rule raises; :class:`~kvlease.store.base.SessionLost` if the
        lease's session has ended; :class:`~kvlease.store.base.StoreUnavailable`.
        """
        async with self._turn(keys.lease(conversation)) as turn:
            known = self._guess(conversation, turn, with_info)
            holder = self._seen_holder(known)
            lost = False
            for attempt in range(MAX_TRIES):
                await serving.back_off(attempt)
                try:
                    answer, after = decide(known.state, holder)
                except Refused:
                    if known.certain:
                        raise
                    known, holder = await self._read(conversation, with_holder)
                    continue
                if after.lease is known.state.lease and after.info is known.state.info:
                    if known.certain:
                        return answer
                    known, holder = await self._read(conversation, with_holder)
                    continue
                try:
                    conflict = await self._commit(conversation, known, after, turn, with_info)
                except SessionLost:
                    if lost:
                        raise
                    # The bucket's, or the lease's: a new bucket and another look tell.
                    lost = True
                    self._buckets.discard()
                    known, holder = await self._read(conversation, with_holder)
                    continue
                if conflict is None:
                    return answer
                known = conflict
                holder = self._seen_holder(known)
        raise StoreUnavailable("the conversation's records change all the time: try again")

    async def change_info(
        self,
        conversation: Conversation,
        decide: Callable[[ConversationInfo | None], ConversationInfo],
    ) -> ConversationInfo:
        """Like :meth:`change`, of the conversation's own record alone."""
        key = keys.conversation(conversation)
        async with self._turn(keys.lease(conversation)):
            item = self._infos.get(key)
            for attempt in range(MAX_TRIES):
                await serving.back_off(attempt)
                info = decide(_info(item))
                try:
                    put = Put(key, info.SerializeToString(), await self._buckets.take())
                    result = await self._store.commit({key: item.revision if item else 0}, [put])
                except SessionLost:
                    self._buckets.discard()
                    continue
                if isinstance(result, Conflict):
                    metrics.COMMIT_CONFLICTS.inc()
                    item = result.current[key]
                    continue
                self._remember(put, result.revision)
                return info
        raise StoreUnavailable("the conversation's record changes all the time: try again")

    async def read(self, conversation: Conversation) -> State:
        """Both records, from one moment."""
        known, _ = await self._read(conversation, with_holder=False)
        return known.state

    async def engine(self, engine_id: str, incarnation: str) -> Engine | None:
        """The decode engine as it is registered now; as this replica has seen it, if that
        is the incarnation asked for."""
        key = registry_keys.engine(registry_pb2.ENGINE_ROLE_DECODE, engine_id)
        seen = self._engines.get(key)
        if seen is not None and seen.record.incarnation == incarnation:
            return seen.record
        item = (await self._store.get(key))[key]
        return None if item is None else Engine.FromString(item.value)

    @contextlib.asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[_Turn]:
        """One change of a conversation at a time in this process: it would only conflict
        with itself."""
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield turn
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]

    def _guess(self, conversation: Conversation, turn: _Turn, with_info: bool) -> _Known:
        seen = self._leases.get(keys.lease(conversation))
        info = self._infos.get(keys.conversation(conversation)) if with_info else None
        if seen is None or turn.revision > seen.item.revision:
            return _known(turn.lease, info, certain=False)
        return _Known(seen.item, info, State(seen.record.lease, _info(info)), certain=False)

    async def _read(
        self, conversation: Conversation, with_holder: bool
    ) -> tuple[_Known, Engine | None]:
        lease_key, info_key = keys.lease(conversation), keys.conversation(conversation)
        items = await self._store.get(lease_key, info_key)
        known = _known(items[lease_key], items[info_key], certain=True)
        lease = known.state.lease
        if lease is None or not with_holder:
            return known, None
        return known, await self.engine(lease.holder_engine_id, lease.holder_incarnation)

    def _seen_holder(self, known: _Known) -> Engine | None:
        lease = known.state.lease
        if lease is None:
            return None
        key = registry_keys.engine(registry_pb2.ENGINE_ROLE_DECODE, lease.holder_engine_id)
        seen = self._engines.get(key)
        return seen.record if seen else None

    async def _commit(
        self, conversation: Conversation, known: _Known, after: State, turn: _Turn, with_info: bool
    ) -> _Known | None:
        """Writes what has changed. None if that worked, else the records as they are."""
        lease_key, info_key = keys.lease(conversation), keys.conversation(conversation)
        expect = {lease_key: known.lease.revision if known.lease else 0}
        if with_info:
            expect[info_key] = known.info.revision if known.info else 0
        writes: list[Write] = []
        lease_put = info_put = None
        if after.lease is None and known.lease is not None:
            writes.append(Delete(lease_key))
        elif after.lease is not None and after.lease is not known.state.lease:
            value = after.lease.SerializeToString()
            lease_put = Put(lease_key, value, after.lease.holder_session_id)
            writes.append(lease_put)
        lease_is_written = bool(writes)
        if after.info is not None and after.info is not known.state.info:
            value = after.info.SerializeToString()
            info_put = Put(info_key, value, await self._buckets.take())
            writes.append(info_put)
        result = await self._store.commit(expect, writes)
        if isinstance(result, Conflict):
            metrics.COMMIT_CONFLICTS.inc()
            # Without the conversation's own record this is half of the truth.
            return _known(result.current[lease_key], result.current.get(info_key), with_info)
        if lease_is_written:
            turn.revision = result.revision
            turn.lease = _stored(lease_put, result.revision) if lease_put else None
        if info_put is not None:
            self._remember(info_put, result.revision)
        return None

    def _remember(self, put: Put, revision: int) -> None:
        self._infos[put.key] = _stored(put, revision)
        self._infos.move_to_end(put.key)
        if len(self._infos) > MAX_REMEMBERED:
            self._infos.popitem(last=False)


def _stored(put: Put, revision: int) -> Versioned:
    return Versioned(put.key, put.value, revision, put.session_id)


def _info(item: Versioned | None) -> ConversationInfo | None:
    return None if item is None else ConversationInfo.FromString(item.value)


def _known(lease: Versioned | None, info: Versioned | None, certain: bool) -> _Known:
    record = None if lease is None else Lease.FromString(lease.value)
    return _Known(lease, info, State(record, _info(info)), certain)
