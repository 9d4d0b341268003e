"""What became of conversations' last turns: kept for people, decided by nobody.

A record of its own for each conversation, beside the lease and the turn counter: writing
it never makes a grant or a claim decide again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import unquote

import grpc

from kvlease import pages, serving, times
from kvlease.lease import keys, validate
from kvlease.lease.buckets import Buckets
from kvlease.lease.knowledge import LeaseView
from kvlease.mirror import Entry, Mirror
from kvlease.rpc import Refused
from kvlease.store.base import Committed, Put, SessionLost, Store, StoreUnavailable, Versioned
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import (
    ConversationHistory,
    ConversationSummary,
    ListConversationsRequest,
    ListConversationsResponse,
    RecordTurnsRequest,
    TurnRecord,
)

MAX_TURNS = 16
"""Turns that a conversation remembers: about 4 kB."""

MAX_ENTRIES = 64
"""Turns in one call: each may be of another conversation, and a commit takes 100 keys."""

MAX_TEXT = 500
"""Characters of a sentence that are kept."""

MAX_TRIES = 16
"""Only another router's turn of the same conversation, at the same moment, is in the way."""

IDLE_S = 60.0
"""Nobody has asked for a list for so long: the copy that lists are made from is dropped."""


def appended(turns: Iterable[TurnRecord], more: Iterable[TurnRecord]) -> list[TurnRecord]:
    """The last :data:`MAX_TURNS` of both, by start_time, each once."""
    known = {_identity(turn): turn for turn in (*turns, *map(_shortened, more))}
    ordered = sorted(known.values(), key=lambda turn: (times.moment(turn.start_time), turn.turn))
    return ordered[-MAX_TURNS:]


def _identity(turn: TurnRecord) -> tuple[int, int, str]:
    """Neither number nor trace is enough: turns of one trace, and turns without number."""
    return turn.turn, turn.start_time.ToNanoseconds(), turn.trace_id


def _shortened(turn: TurnRecord) -> TurnRecord:
    copied = TurnRecord()
    copied.CopyFrom(turn)
    copied.detail = turn.detail[:MAX_TEXT]
    copied.error = turn.error[:MAX_TEXT]
    return copied


class History:
    """Reads and writes the records. ``buckets`` give them their end."""

    def __init__(
        self,
        store: Store,
        leases: Mirror[LeaseView],
        buckets: Buckets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._leases = leases
        self._buckets = buckets
        self._clock = clock
        self._mirror: Mirror[bytes] = self._new_mirror()
        self._wanted = asyncio.Event()
        self._asked_at = 0.0

    def _new_mirror(self) -> Mirror[bytes]:
        return Mirror(self._store, keys.HISTORIES, bytes)

    async def run(self) -> None:
        """Keeps the copy that lists are made from while somebody asks for them, until
        cancelled. So a service that nobody looks at pays nothing for it."""
        while True:
            await self._wanted.wait()
            async with asyncio.TaskGroup() as group:
                following = group.create_task(self._mirror.run())
                await self._idle()
                self._wanted.clear()
                self._mirror = self._new_mirror()
                following.cancel()

    async def _idle(self) -> None:
        """Until nobody has asked for :data:`IDLE_S`, which is longer than anybody waits."""
        while True:
            left_s = self._asked_at + IDLE_S - self._clock()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def turns(self, conversation: Conversation) -> list[TurnRecord]:
        """A conversation's last turns, oldest first."""
        key = keys.history(conversation)
        return _turns((await self._store.get(key))[key])

    async def record(self, request: RecordTurnsRequest) -> None:
        """Adds turns to their conversations' records: one commit for all of them.

        Raises :class:`~kvlease.rpc.Refused` as the proto file says, and
        :class:`~kvlease.store.base.StoreUnavailable`.
        """
        added = _by_key(request)
        if not added:
            return
        known = await self._store.get(*added)
        for attempt in range(MAX_TRIES):
            await serving.back_off(attempt)
            try:
                result = await self._commit(known, added)
            except SessionLost:
                self._buckets.discard()
                continue
            if result is None:
                return
            known = {**known, **result}
        raise StoreUnavailable("conversations' histories change all the time: try again")

    async def _commit(
        self, known: Mapping[str, Versioned | None], added: Mapping[str, Sequence[TurnRecord]]
    ) -> Mapping[str, Versioned | None] | None:
        """None: done; else what is there instead of what was known."""
        expect: dict[str, int] = {}
        puts: list[Put] = []
        for key, more in added.items():
            item = known[key]
            value = ConversationHistory(turns=appended(_turns(item), more)).SerializeToString()
            if item is None or item.value != value:
                expect[key] = item.revision if item else 0
                puts.append(Put(key, value, await self._buckets.take()))
        if not puts:
            return None
        result = await self._store.commit(expect, puts)
        return None if isinstance(result, Committed) else result.current

    async def list(self, request: ListConversationsRequest) -> ListConversationsResponse:
        """The conversations whose turns were recorded last. Raises
        :class:`~kvlease.rpc.Refused` and :class:`~kvlease.store.base.StoreUnavailable`."""
        limit = pages.limit(request.page_size)
        self._asked_at = self._clock()
        self._wanted.set()
        if not self._mirror.is_synced:
            await self._mirror.fence()
        entries = self._mirror.entries()
        if request.tenant:
            start = keys.histories_of(request.tenant)
            entries = [entry for entry in entries if entry.item.key.startswith(start)]
        if request.id_contains:
            wanted = request.id_contains.casefold()
            entries = [entry for entry in entries if wanted in _conversation_id(entry).casefold()]
        latest = heapq.nlargest(limit, entries, key=lambda entry: entry.item.revision)
        return ListConversationsResponse(
            conversations=map(self._summary, latest), total_size=len(entries)
        )

    def _summary(self, entry: Entry[bytes]) -> ConversationSummary:
        conversation = keys.conversation_of(entry.item.key)
        seen = self._leases.get(keys.lease(conversation))
        return ConversationSummary(
            conversation=conversation,
            turns=ConversationHistory.FromString(entry.record).turns,
            lease=seen.record.public if seen else None,
        )


def _conversation_id(entry: Entry[bytes]) -> str:
    return unquote(entry.item.key.rpartition("/")[2])


def _turns(item: Versioned | None) -> list[TurnRecord]:
    return [] if item is None else list(ConversationHistory.FromString(item.value).turns)


def _by_key(request: RecordTurnsRequest) -> dict[str, list[TurnRecord]]:
    if len(request.entries) > MAX_ENTRIES:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_TURNS",
            f"{len(request.entries)} turns in one call: send at most {MAX_ENTRIES}",
        )
    added: dict[str, list[TurnRecord]] = {}
    for entry in request.entries:
        validate.conversation(entry.conversation)
        validate.turn(entry.turn)
        added.setdefault(keys.history(entry.conversation), []).append(entry.turn)
    return added
