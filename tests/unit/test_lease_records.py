"""How changes of a conversation reach the store: batches, conflicts, lost sessions. On the
embedded store, through which a second replica writes as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from lease_builders import (
    CONVERSATION,
    LIMITS,
    NOW,
    claim_request,
    engine,
    grant_request,
    ids,
)

from kvlease.lease import claims, keys, rules
from kvlease.lease.buckets import USE_PUTS, USE_S, Buckets
from kvlease.lease.knowledge import Knowledge, LeaseView, mirror_of_leases
from kvlease.lease.records import BOTH, INFO, LEASE, Records
from kvlease.lease.rules import State
from kvlease.mirror import Change, Entry, Mirror, Subscription
from kvlease.registry import keys as registry_keys
from kvlease.rpc import Refused
from kvlease.store.base import (
    Committed,
    Conflict,
    Put,
    SessionLost,
    Synced,
    Versioned,
    WatchEvent,
    Write,
)
from kvlease.store.memory import MemoryStore
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.lease_pb2 import ClaimResponse, ConversationInfo, Lease
from kvlease.v1.registry_pb2 import Engine


class Counting(MemoryStore):
    """The embedded store, with what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[Sequence[Write]] = []
        self.reads = 0

    async def get(self, *names: str) -> Mapping[str, Versioned | None]:
        self.reads += 1
        return await super().get(*names)

    async def commit(
        self, expect: Mapping[str, int], writes: Sequence[Write]
    ) -> Committed | Conflict:
        self.commits.append(writes)
        return await super().commit(expect, writes)

    def reset(self) -> None:
        self.commits, self.reads = [], 0


class Behind:
    """A store whose watches have told nothing yet."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        await asyncio.Event().wait()
        yield Synced()


class Replica:
    """One lease service's records on a store."""

    def __init__(self, store: Any) -> None:
        self.leases = mirror_of_leases(store)
        engines: Mirror[Engine] = Mirror(store, registry_keys.ENGINES, Engine.FromString)
        self._mirrors = (self.leases, engines)
        self._tasks = [asyncio.create_task(mirror.run()) for mirror in self._mirrors]
        self.records = Records(Knowledge(store, self.leases, engines, Buckets(store, 60)))

    async def caught_up(self) -> None:
        for mirror in self._mirrors:
            await mirror.fence()

    async def grant(self, session_id: str, **fields: Any) -> Lease:
        request = grant_request(session_id=session_id, **fields)

        def decide(state: State, _: Engine | None) -> tuple[Lease, State]:
            after, lease = rules.grant(state, request, LIMITS, NOW)
            return lease, after

        return await self.records.change(CONVERSATION, decide, BOTH, alone=True)

    async def claim(self, ticket_id: str, **fields: Any) -> ClaimResponse:
        request = claim_request(ticket_id=ticket_id, **fields)

        def decide(state: State, holder: Engine | None) -> tuple[ClaimResponse, State]:
            answer, lease = claims.claim(state, holder, request, LIMITS, NOW)
            return answer, State(lease, state.info)

        return await self.records.change(CONVERSATION, decide, LEASE, with_holder=True)

    async def start_turn(self) -> int:
        def decide(state: State, _: Engine | None) -> tuple[int, State]:
            info = rules.start_turn(state.info, CONVERSATION, NOW)
            return info.turn, State(state.lease, info)

        return await self.records.change(CONVERSATION, decide, INFO)

    async def close(self) -> None:
        await self.records.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def store() -> AsyncIterator[Counting]:
    store = Counting()
    yield store
    await store.close()


@pytest.fixture
async def replicas(store: Counting) -> AsyncIterator[tuple[Replica, Replica]]:
    pair = (Replica(store), Replica(store))
    yield pair
    for replica in pair:
        await replica.close()


@pytest.fixture
async def session(store: Counting, replicas: tuple[Replica, Replica]) -> str:
    """The session of a decode engine that is registered."""
    session_id = await store.open_session(60)
    record = engine(session_id=session_id)
    key = registry_keys.engine(record.role, record.engine_id)
    await store.commit({}, [Put(key, record.SerializeToString(), session_id)])
    for replica in replicas:
        await replica.caught_up()
    store.reset()
    return session_id


async def stored_lease(store: MemoryStore) -> Lease | None:
    key = keys.lease(CONVERSATION)
    item = (await store.get(key))[key]
    return Lease.FromString(item.value) if item else None


async def test_a_first_turn_takes_one_write_a_call(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    assert await replica.start_turn() == 1
    await replica.grant(session)
    answer = await replica.claim("t1")
    assert answer.outcome == common_pb2.OUTCOME_HIT
    assert len(store.commits) == 3
    assert store.reads == 0


async def test_calls_that_come_together_are_written_together(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    await replica.grant(session)
    store.reset()
    few = LIMITS.max_readers
    answers = await asyncio.gather(*(replica.claim(f"t{number}") for number in range(few)))
    assert {answer.outcome for answer in answers} == {common_pb2.OUTCOME_HIT}
    assert len(store.commits) == 1
    lease = await stored_lease(store)
    assert lease is not None
    assert ids(lease.tickets) == [f"t{number}" for number in range(few)]


async def test_in_a_batch_each_call_sees_what_those_before_it_did(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    first, second, answer, turn = await asyncio.gather(
        replica.grant(session, lease_id="lease-1", turn=1),
        replica.grant(session, lease_id="lease-2", turn=2),
        replica.claim("t1"),
        replica.start_turn(),
    )
    assert (first.lease_id, second.lease_id) == ("lease-1", "lease-2")
    assert answer.lease_id == "lease-2"
    assert turn == 3
    assert len(store.commits) == 3  # each grant, and the rest


async def test_every_grant_is_seen_by_watches(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    # given grants, and claims between them, that all come at once
    replica, _ = replicas
    with replica.leases.subscribe() as changes:
        await asyncio.gather(
            replica.grant(session, lease_id="lease-1"),
            replica.claim("a"),
            replica.claim("b"),
            replica.grant(session, lease_id="lease-2", turn=2),
            replica.grant(session, lease_id="lease-3", turn=3),
        )
        await replica.caught_up()
        shown = [change.after.lease async for change in _until_quiet(changes) if change.after]
    # then each was stored by itself, and said what it replaced
    assert [lease.lease_id for lease in shown] == ["lease-1", "lease-1", "lease-2", "lease-3"]
    assert [lease.superseded_lease_id for lease in shown] == ["", "", "lease-1", "lease-2"]
    assert len(shown[1].tickets) == 2


async def _until_quiet(changes: Subscription[LeaseView]) -> AsyncIterator[Change[LeaseView]]:
    async for change in changes:
        yield change
        if changes._queue.empty():
            return


async def test_a_refusal_in_a_batch_concerns_nobody_else(
    replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    stale, good, answer = await asyncio.gather(
        _after(replica.grant(session, lease_id="lease-2", turn=5)),
        _after(replica.grant(session, lease_id="lease-3", turn=4)),
        replica.claim("t1"),
    )
    assert isinstance(stale, Lease)
    assert isinstance(good, Refused)
    assert good.reason == "STALE_TURN"
    assert answer.outcome == common_pb2.OUTCOME_HIT


async def test_a_conflict_is_decided_anew_by_what_came_first(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    one, other = replicas
    await one.grant(session, lease_id="lease-1", turn=1)
    await other.caught_up()
    store.reset()
    # Both know the same revision, and write by it.
    await asyncio.gather(
        one.grant(session, lease_id="lease-2", turn=2), other.claim("t1"), return_exceptions=True
    )
    lease = await stored_lease(store)
    assert lease is not None
    assert lease.lease_id == "lease-2"
    tickets = ids(lease.tickets) + [t for old in lease.retiring for t in ids(old.tickets)]
    assert tickets == ["t1"]  # on whichever of the two it was opened


async def test_no_is_never_said_by_what_a_watch_has_not_told_yet(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    one, _ = replicas
    behind = Replica(Behind(store))
    try:
        await one.grant(session)
        answer = await behind.claim("t1")
        assert answer.outcome == common_pb2.OUTCOME_HIT
    finally:
        await behind.close()


async def test_no_is_not_said_either_when_others_of_the_batch_could_write(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    """That they could proves that the lease is as it was known, but not that its holder,
    of which this replica has not heard, is not registered."""
    one, _ = replicas
    await one.grant(session, turn=1)
    behind = Replica(Behind(store))
    try:
        item = await _lease_item(store)
        behind.leases.note_written(
            item.key, item.revision, Entry(item, LeaseView.parse(item.value))
        )
        answer, turn = await asyncio.gather(behind.claim("t1"), behind.start_turn())
        assert (answer.outcome, turn) == (common_pb2.OUTCOME_HIT, 2)
    finally:
        await behind.close()


async def _lease_item(store: MemoryStore) -> Versioned:
    key = keys.lease(CONVERSATION)
    item = (await store.get(key))[key]
    assert item is not None
    return item


async def test_a_miss_is_confirmed_by_one_read(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    answer = await replica.claim("t1")
    assert answer.outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    assert (store.reads, len(store.commits)) == (1, 0)


async def test_a_lost_session_fails_only_its_own_call(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    dead = await store.open_session(60)
    await store.close_session(dead)
    granted, turn = await asyncio.gather(_after(replica.grant(dead)), replica.start_turn())
    assert isinstance(granted, SessionLost)
    assert turn == 1
    assert await stored_lease(store) is None


async def test_a_bucket_that_the_store_lost_is_replaced(
    store: Counting, replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    await replica.start_turn()
    key = keys.conversation(CONVERSATION)
    item = (await store.get(key))[key]
    assert item is not None
    assert item.session_id is not None
    await store.close_session(item.session_id)
    assert await replica.start_turn() == 1  # it forgot the conversation with it
    granted = await replica.grant(session)
    assert granted.lease_id == "lease-1"


async def test_a_caller_that_gives_up_stops_nobody_else(
    replicas: tuple[Replica, Replica], session: str
) -> None:
    replica, _ = replicas
    await replica.grant(session)
    patient = asyncio.create_task(replica.claim("patient"))
    hasty = asyncio.create_task(replica.claim("hasty"))
    await asyncio.sleep(0)
    hasty.cancel()
    assert (await patient).outcome == common_pb2.OUTCOME_HIT
    with pytest.raises(asyncio.CancelledError):
        await hasty
    assert (await replica.claim("later")).outcome == common_pb2.OUTCOME_HIT


async def test_a_fault_in_a_rule_reaches_its_caller(replicas: tuple[Replica, Replica]) -> None:
    replica, _ = replicas

    def broken(state: State, holder: Engine | None) -> tuple[None, State]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await replica.records.change(CONVERSATION, broken, BOTH)
    assert await replica.start_turn() == 1


async def test_closing_leaves_nobody_waiting(store: Counting) -> None:
    replica = Replica(store)
    waiting = asyncio.create_task(replica.start_turn())
    await asyncio.sleep(0)
    await replica.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_conversations_move_to_the_newest_session() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    buckets = Buckets(store, 60, clock=lambda: now)
    first = await buckets.take()
    assert await buckets.take() == first
    now = USE_S
    second = await buckets.take()
    assert second != first
    for _ in range(USE_PUTS - 1):
        assert await buckets.take() == second
    third = await buckets.take()
    assert third not in (first, second)
    buckets.discard()
    assert await buckets.take() != third
    await store.close()


async def test_what_is_remembered_lasts_for_the_conversation_ttl_after_the_last_turn() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    buckets = Buckets(store, 60, clock=lambda: now)

    async def remembers() -> bool:
        return (await store.get("/conversations/c"))["/conversations/c"] is not None

    await buckets.take()
    now = USE_S - 1.0  # the last moment at which this session takes records
    info = ConversationInfo(turn=1).SerializeToString()
    await store.commit({}, [Put("/conversations/c", info, await buckets.take())])
    now += 60
    assert await remembers()
    now += 2
    assert not await remembers()
    await store.close()


async def _after(call: Any) -> Any:
    try:
        return await call
    except (Refused, SessionLost) as error:
        return error


def test_a_lease_is_looked_at_once_however_many_watch_it() -> None:
    view = LeaseView(lease_pb2.Lease(lease_id="l", holder_session_id="s"))
    assert view.public is view.public
    assert view.sessions is view.sessions
