"""Commits on etcd whose answer is lost: each is applied once, and known to be."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest
from contract_helpers import Watcher, eventually, put, read
from etcd_server import Etcd
from tcp_proxy import TcpProxy

from kvlease.config import Settings
from kvlease.store import Store, open_store
from kvlease.store.base import (
    MAX_COMMIT_KEYS,
    Changed,
    Committed,
    Conflict,
    Delete,
    Put,
    SessionLost,
    StoreUnavailable,
    Synced,
    Versioned,
    Write,
)


@dataclass
class Lossy:
    """A store whose connection to etcd can fail, and another one on the same keys."""

    store: Store
    proxy: TcpProxy
    other: Store

    async def commit_and_lose_the_answer(
        self, expect: dict[str, int], writes: list[Write], *, meanwhile: Sequence[list[Write]] = ()
    ) -> Committed | Conflict:
        """Commits; once etcd has applied it, others write ``meanwhile``, then the
        connection breaks without an answer."""
        await self.store.check()
        before = await self.other.get(*(write.key for write in writes))
        self.proxy.drop_responses = True
        task = asyncio.create_task(self.store.commit(expect, writes))

        async def applied() -> bool:
            return await self.other.get(*before) != before

        await eventually(applied)
        for others in meanwhile:
            assert isinstance(await self.other.commit({}, others), Committed)
        self.proxy.drop_responses = False
        self.proxy.cut()
        return await task

    async def commit_and_lose_the_request(
        self, expect: dict[str, int], writes: list[Write], *, meanwhile: Sequence[list[Write]] = ()
    ) -> Committed | Conflict:
        """Commits, but the connection breaks before etcd has got the request."""
        await self.store.check()
        self.proxy.hold_requests = True
        task = asyncio.create_task(self.store.commit(expect, writes))

        async def sent() -> bool:
            return self.proxy.held_bytes > 0

        await eventually(sent)
        for others in meanwhile:
            assert isinstance(await self.other.commit({}, others), Committed)
        self.proxy.hold_requests = False
        self.proxy.cut()
        return await task


@pytest.fixture
async def lossy(
    shared_etcd: Etcd, start_proxy: Callable[[int], Awaitable[TcpProxy]]
) -> AsyncIterator[Lossy]:
    proxy = await start_proxy(shared_etcd.port)
    prefix = f"/test/{uuid.uuid4().hex}"
    store = open_store(Settings(etcd_endpoints=proxy.endpoint, etcd_prefix=prefix))
    other = open_store(Settings(etcd_endpoints=shared_etcd.endpoint, etcd_prefix=prefix))
    yield Lossy(store, proxy, other)
    await store.close()
    await other.close()


async def test_a_creation_whose_answer_was_lost_is_committed(lossy: Lossy) -> None:
    result = await lossy.commit_and_lose_the_answer({"/a": 0}, [Put("/a", b"1")])
    assert isinstance(result, Committed)
    assert await read(lossy.other, "/a") == Versioned("/a", b"1", result.revision)


async def test_an_update_whose_answer_was_lost_is_committed(lossy: Lossy) -> None:
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_answer({"/a": first}, [Put("/a", b"2")])
    assert isinstance(result, Committed)
    assert await read(lossy.other, "/a") == Versioned("/a", b"2", result.revision)


async def test_a_write_without_conditions_whose_answer_was_lost_is_committed(lossy: Lossy) -> None:
    result = await lossy.commit_and_lose_the_answer({}, [Put("/a", b"1"), Put("/b", b"1")])
    assert isinstance(result, Committed)
    assert await read(lossy.other, "/b") == Versioned("/b", b"1", result.revision)


async def test_a_deletion_whose_answer_was_lost_is_committed(lossy: Lossy) -> None:
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_answer({"/a": first}, [Delete("/a")])
    assert isinstance(result, Committed)
    assert await read(lossy.other, "/a") is None
    assert result.revision == first + 1


async def test_a_lost_answer_is_found_although_others_have_written_since(lossy: Lossy) -> None:
    # Given an update that was applied, then overwritten twice, before its answer was lost.
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_answer(
        {"/a": first}, [Put("/a", b"2")], meanwhile=[[Put("/a", b"3")], [Put("/a", b"4")]]
    )
    # Then it is no conflict, and the others' writes stand.
    assert result == Committed(first + 1)
    assert await read(lossy.other, "/a") == Versioned("/a", b"4", first + 3)


async def test_a_lost_creation_is_found_although_others_have_deleted_it(lossy: Lossy) -> None:
    start = await put(lossy.other, "/x", b"1")
    result = await lossy.commit_and_lose_the_answer(
        {"/a": 0}, [Put("/a", b"1")], meanwhile=[[Delete("/a")]]
    )
    assert result == Committed(start + 1)
    assert await read(lossy.other, "/a") is None


async def test_a_lost_deletion_is_found_although_the_key_was_made_anew(lossy: Lossy) -> None:
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_answer(
        {"/a": first}, [Delete("/a")], meanwhile=[[Put("/a", b"2")]]
    )
    assert result == Committed(first + 1)
    assert await read(lossy.other, "/a") == Versioned("/a", b"2", first + 2)


async def test_a_commit_whose_request_was_lost_is_made_up_for(lossy: Lossy) -> None:
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_request(
        {"/a": first, "/b": 0}, [Put("/a", b"2"), Put("/b", b"1")]
    )
    assert isinstance(result, Committed)
    assert await read(lossy.other, "/a") == Versioned("/a", b"2", result.revision)
    assert await read(lossy.other, "/b") == Versioned("/b", b"1", result.revision)


async def test_a_lost_request_that_others_have_overtaken_is_a_conflict(lossy: Lossy) -> None:
    first = await put(lossy.other, "/a", b"1")
    result = await lossy.commit_and_lose_the_request(
        {"/a": first}, [Put("/a", b"2")], meanwhile=[[Put("/a", b"3")]]
    )
    assert result == Conflict({"/a": Versioned("/a", b"3", first + 1)})


async def test_a_lost_creation_request_that_others_have_overtaken_is_a_conflict(
    lossy: Lossy,
) -> None:
    result = await lossy.commit_and_lose_the_request(
        {"/a": 0}, [Put("/a", b"1")], meanwhile=[[Put("/a", b"2")]]
    )
    assert isinstance(result, Conflict)
    current = result.current["/a"]
    assert current is not None
    assert current.value == b"2"


async def test_a_lost_request_whose_session_has_ended_since_writes_nothing(lossy: Lossy) -> None:
    session = await lossy.store.open_session(60)
    await lossy.store.check()
    lossy.proxy.hold_requests = True
    task = asyncio.create_task(lossy.store.commit({}, [Put("/a", b"1", session), Put("/b", b"1")]))

    async def sent() -> bool:
        return lossy.proxy.held_bytes > 0

    await eventually(sent)
    await lossy.other.close_session(session)
    lossy.proxy.hold_requests = False
    lossy.proxy.cut()
    with pytest.raises(SessionLost):
        await task
    assert list(await lossy.other.list("/")) == []


async def test_a_request_that_arrives_after_it_was_settled_changes_nothing(
    shared_etcd: Etcd, lossy: Lossy
) -> None:
    # Given a creation whose request is stuck in the network when its connection breaks,
    await lossy.store.check()
    lossy.proxy.hold_requests = True
    task = asyncio.create_task(lossy.store.commit({"/a": 0}, [Put("/a", b"1")]))

    async def sent() -> bool:
        return lossy.proxy.held_bytes > 0

    await eventually(sent)
    await asyncio.sleep(0.05)  # for the rest of the request
    stuck = lossy.proxy.cut_clients()
    lossy.proxy.hold_requests = False
    # which is then made up for, and whose key others delete.
    assert isinstance(await task, Committed)
    assert isinstance(await lossy.other.commit({}, [Delete("/a")]), Committed)
    # When the stuck request reaches etcd after all,
    before = shared_etcd.requests("Txn")
    lossy.proxy.release(stuck)

    async def arrived() -> bool:
        return await asyncio.to_thread(shared_etcd.requests, "Txn") > before

    await eventually(arrived)
    # then the key does not come back.
    assert await read(lossy.other, "/a") is None


async def test_an_answer_that_was_lost_as_etcd_was_killed_is_found_when_it_is_back(
    etcd: Etcd,
    start_proxy: Callable[[int], Awaitable[TcpProxy]],
    open_etcd_store: Callable[..., Store],
) -> None:
    proxy = await start_proxy(etcd.port)
    store = open_etcd_store(proxy.endpoint, etcd_timeout=10)
    await store.check()
    proxy.drop_responses = True
    task = asyncio.create_task(store.commit({"/a": 0}, [Put("/a", b"1")]))

    async def applied() -> bool:
        return etcd.get("/kvlease/v1/a") == b"1"

    await eventually(applied)
    etcd.kill()
    proxy.drop_responses = False
    await asyncio.to_thread(etcd.start)
    assert await task == Committed(2)


async def test_many_commits_in_flight_when_the_connection_breaks_are_all_settled(
    lossy: Lossy,
) -> None:
    await lossy.store.check()
    lossy.proxy.drop_responses = True
    tasks = [
        asyncio.create_task(lossy.store.commit({f"/{i}": 0}, [Put(f"/{i}", b"x")]))
        for i in range(50)
    ]

    async def applied() -> bool:
        return len(await lossy.other.list("/")) >= 25

    await eventually(applied)
    lossy.proxy.drop_responses = False
    lossy.proxy.cut()
    results = await asyncio.gather(*tasks)
    assert all(isinstance(result, Committed) for result in results)
    revisions = {item.key: item.revision for item in await lossy.other.list("/")}
    assert revisions == {
        f"/{i}": r.revision for i, r in enumerate(results) if isinstance(r, Committed)
    }


async def test_a_fence_that_another_commit_has_raised_is_no_conflict(
    shared_etcd: Etcd, lossy: Lossy
) -> None:
    # Given the fence under which the next commit is sent, raised while it is under way.
    fence: bytes = lossy.store._store._commits._fence  # type: ignore[attr-defined]
    shared_etcd.put(fence.decode(), b"")
    result = await lossy.store.commit({"/a": 0}, [Put("/a", b"1")])
    assert isinstance(result, Committed)
    # Then fences do not show among the keys either.
    assert [item.key for item in await lossy.other.list("/")] == ["/a"]


async def test_over_a_network_that_keeps_breaking_what_is_told_is_what_happened(
    lossy: Lossy,
) -> None:
    # Given eight tasks that increment one counter, and a connection that breaks at random.
    watcher = Watcher(lossy.other, "/")
    await watcher.synced()
    told: set[bytes] = set()
    unknown: set[bytes] = set()
    dice = random.Random(7)
    end = asyncio.get_running_loop().time() + 4

    async def increment(name: int) -> None:
        turn = 0
        while asyncio.get_running_loop().time() < end:
            turn += 1
            value = b"%d/%d" % (name, turn)
            try:
                item = await read(lossy.store, "/n")
                expect = {"/n": item.revision if item else 0}
                result = await lossy.store.commit(expect, [Put("/n", value)])
            except StoreUnavailable:
                unknown.add(value)
                continue
            if isinstance(result, Committed):
                told.add(value)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0.01, 0.08))
            lossy.proxy.drop_responses = True
            await asyncio.sleep(dice.uniform(0, 0.01))
            lossy.proxy.drop_responses = False
            lossy.proxy.cut()

    disturber = asyncio.create_task(disturb())
    async with asyncio.TaskGroup() as tasks:
        for name in range(8):
            tasks.create_task(increment(name))
    disturber.cancel()
    last = await read(lossy.other, "/n")
    assert last is not None
    await watcher.until(lambda events: Changed(last) in events)
    await watcher.stop()
    # Then exactly what was told to have been written was written.
    written = {event.item.value for event in watcher.events if isinstance(event, Changed)}
    assert Synced() in watcher.events
    assert told <= written <= told | unknown
    assert len(told) > 20


# Commits that go to etcd together


async def test_commits_that_are_made_at_once_share_transactions(
    shared_etcd: Etcd, lossy: Lossy
) -> None:
    await lossy.store.check()
    before = await asyncio.to_thread(shared_etcd.requests, "Txn")
    results = await asyncio.gather(
        *(lossy.store.commit({f"/{i}": 0}, [Put(f"/{i}", b"x")]) for i in range(50))
    )
    assert await asyncio.to_thread(shared_etcd.requests, "Txn") - before <= 10
    revisions = {item.key: item.revision for item in await lossy.other.list("/")}
    assert revisions == {
        f"/{i}": r.revision for i, r in enumerate(results) if isinstance(r, Committed)
    }


async def test_of_commits_made_at_once_each_has_its_own_result(lossy: Lossy) -> None:
    revision = await put(lossy.other, "/old", b"1")
    ended = await lossy.store.open_session(60)
    await lossy.store.close_session(ended)
    conflict, lost, written = await asyncio.gather(
        lossy.store.commit({"/old": 0}, [Put("/old", b"2")]),
        lossy.store.commit({}, [Put("/lost", b"1", ended)]),
        lossy.store.commit({"/old2": 0}, [Put("/old2", b"2")]),
        return_exceptions=True,
    )
    assert conflict == Conflict({"/old": Versioned("/old", b"1", revision)})
    assert isinstance(lost, SessionLost)
    assert isinstance(written, Committed)
    assert [item.key for item in await lossy.other.list("/")] == ["/old", "/old2"]


async def test_commits_of_one_key_made_at_once_exclude_each_other(lossy: Lossy) -> None:
    results = await asyncio.gather(
        *(lossy.store.commit({"/a": 0}, [Put("/a", b"%d" % i)]) for i in range(20))
    )
    assert sum(isinstance(result, Committed) for result in results) == 1


async def test_large_commits_made_at_once_are_all_written(lossy: Lossy) -> None:
    # Given commits that together have more bytes, and more keys, than etcd takes at once.
    results = await asyncio.gather(
        *(lossy.store.commit({}, [Put(f"/{i}", bytes([i]) * 900_000)]) for i in range(4)),
        *(
            lossy.store.commit({}, [Put(f"/{i}/{j}", b"x") for j in range(MAX_COMMIT_KEYS)])
            for i in range(4)
        ),
        *(lossy.store.commit({}, [Put(f"/s{i}", b"x")]) for i in range(200)),
    )
    assert all(isinstance(result, Committed) for result in results)
    assert len(await lossy.other.list("/")) == 4 + 4 * MAX_COMMIT_KEYS + 200
