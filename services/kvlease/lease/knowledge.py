"""What a replica knows of conversations' records, how it learns the truth, and how it
writes: always with the revisions that it decided by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvlease.lease import keys, metrics, rules
from kvlease.lease.buckets import Buckets
from kvlease.lease.rules import State
from kvlease.mirror import Entry, Mirror
from kvlease.registry import keys as registry_keys
from kvlease.store.base import Conflict, Delete, Put, Store, Versioned, Write
from kvlease.v1 import registry_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import ConversationInfo, Lease
from kvlease.v1.registry_pb2 import Engine

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


def mirror_of_leases(store: Store) -> Mirror[LeaseView]:
    """All leases; the topics are the sessions that a record concerns."""
    return Mirror(store, keys.LEASES, LeaseView.parse, lambda view: view.sessions)


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation's records as this replica knows them.

    ``certain``: they are what the store held a moment ago, not what a watch or an earlier
    write told. ``holders``: decode engines just read, by id; None: not registered.
    """

    lease: Versioned | None
    info: Versioned | None
    state: State
    certain: bool
    holders: Mapping[str, Engine | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Which of the two records a rule decides by, and so must not have changed."""

    lease: bool
    info: bool

    def __or__(self, other: Part) -> Part:
        return Part(self.lease or other.lease, self.info or other.info)


class Knowledge:
    """Reads from mirror, memory and store; writes to the store."""

    def __init__(
        self, store: Store, leases: Mirror[LeaseView], engines: Mirror[Engine], buckets: Buckets
    ) -> None:
        self._store = store
        self._leases = leases
        self._engines = engines
        self._buckets = buckets
        self._infos: OrderedDict[str, tuple[Versioned, ConversationInfo]] = OrderedDict()

    def guess(self, conversation: Conversation) -> Known:
        """What is known without asking. A record that is not known counts as absent: if
        it is not, the write says so."""
        seen = self._leases.latest(keys.lease(conversation))
        item, info = self._infos.get(keys.conversation(conversation), (None, None))
        lease = seen.record.lease if seen else None
        return Known(seen.item if seen else None, item, State(lease, info), certain=False)

    async def read(self, conversation: Conversation, *, with_holder: bool = False) -> Known:
        """Both records, from one moment; ``with_holder``: and the lease's holder."""
        lease_key, info_key = keys.lease(conversation), keys.conversation(conversation)
        items = await self._store.get(lease_key, info_key)
        known = _known(items[lease_key], items[info_key], certain=True)
        lease = known.state.lease
        if lease is None or not with_holder:
            return known
        name = lease.holder_engine_id
        holders = {name: await self.engine(name, lease.holder_incarnation)}
        return Known(known.lease, known.info, known.state, True, holders)

    def holder(self, known: Known, lease: Lease | None) -> Engine | None:
        """The lease's holder, as just read or as the watch has told."""
        if lease is None:
            return None
        name = lease.holder_engine_id
        return known.holders[name] if name in known.holders else self._seen_engine(name)

    async def engine(self, engine_id: str, incarnation: str) -> Engine | None:
        """The decode engine as it is registered now; as this replica has seen it, if that
        is the incarnation asked for."""
        seen = self._seen_engine(engine_id)
        if seen is not None and seen.incarnation == incarnation:
            return seen
        key = registry_keys.engine(registry_pb2.ENGINE_ROLE_DECODE, engine_id)
        item = (await self._store.get(key))[key]
        return None if item is None else Engine.FromString(item.value)

    def _seen_engine(self, engine_id: str) -> Engine | None:
        key = registry_keys.engine(registry_pb2.ENGINE_ROLE_DECODE, engine_id)
        seen = self._engines.get(key)
        return seen.record if seen else None

    async def write(
        self, conversation: Conversation, known: Known, after: State, part: Part
    ) -> Known | None:
        """Makes ``known`` into ``after`` if nothing of ``part`` has changed: None; else
        tells what there is.

        Raises :class:`~kvlease.store.base.SessionLost`: the lease's session has ended, or
        the one that conversations' records were given (:meth:`forget_session`).
        """
        lease_key, info_key = keys.lease(conversation), keys.conversation(conversation)
        expect: dict[str, int] = {}
        if part.lease:
            expect[lease_key] = known.lease.revision if known.lease else 0
        if part.info:
            expect[info_key] = known.info.revision if known.info else 0
        lease_write = _lease_write(lease_key, known, after)
        info_write = None
        if after.info is not None and after.info is not known.state.info:
            value = after.info.SerializeToString()
            info_write = Put(info_key, value, await self._buckets.take())
        writes: list[Write] = [write for write in (lease_write, info_write) if write is not None]
        result = await self._store.commit(expect, writes)
        if isinstance(result, Conflict):
            metrics.COMMIT_CONFLICTS.inc()
            # Without both records this is half of the truth.
            certain = part.lease and part.info
            return _known(result.current.get(lease_key), result.current.get(info_key), certain)
        if info_write is not None and after.info is not None:
            self._remember(_stored(info_write, result.revision), after.info)
        if lease_write is not None:
            entry = None
            if isinstance(lease_write, Put) and after.lease is not None:
                entry = Entry(_stored(lease_write, result.revision), LeaseView(after.lease))
            self._leases.note_written(lease_key, result.revision, entry)
        return None

    def forget_session(self) -> None:
        """The next conversation record gets a new session."""
        self._buckets.discard()

    def _remember(self, item: Versioned, info: ConversationInfo) -> None:
        self._infos[item.key] = (item, info)
        self._infos.move_to_end(item.key)
        if len(self._infos) > MAX_REMEMBERED:
            self._infos.popitem(last=False)


def _lease_write(key: str, known: Known, after: State) -> Write | None:
    if after.lease is known.state.lease:
        return None
    if after.lease is None:
        return Delete(key)
    return Put(key, after.lease.SerializeToString(), after.lease.holder_session_id)


def _stored(put: Put, revision: int) -> Versioned:
    return Versioned(put.key, put.value, revision, put.session_id)


def _info(item: Versioned | None) -> ConversationInfo | None:
    return None if item is None else ConversationInfo.FromString(item.value)


def _known(lease: Versioned | None, info: Versioned | None, certain: bool) -> Known:
    record = None if lease is None else Lease.FromString(lease.value)
    return Known(lease, info, State(record, _info(info)), certain)
