"""The decode engine's part of a turn: keep the blocks of a finished turn under a lease;
give them up when they are needed, and free them when the time has come.

The scheduler's thread calls :meth:`DecodeSide.finished` and :meth:`DecodeSide.drain`; the
background loop runs the calls to the lease service. Both work on the table of leases,
under one lock that is never held over a call.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog
from opentelemetry import trace

from kvlease.config import Settings
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.background import Background
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.budget import Candidate, Release, Retained, cheapest
from kvlease_connector.grants import Finished, Grants
from kvlease_connector.retention import HeldLease, Phase
from kvlease_connector.revocations import RETRY_S, SURE_S, Revocations
from kvlease_connector.session import Session
from kvlease_connector.table import Entry, LeaseTable
from kvlease_connector.value import Pauses, keep_value

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

log = structlog.get_logger("kvlease.connector.decode")

SWEEP_S = 0.2
"""How often deadlines are looked at. Between two looks an idle engine does nothing."""

PATIENCE_S = 0.1
"""How long a request waits although there should be room, before leases go one by one."""

CLAIMED = 0.1
"""What a lease counts once its turn has come: that turn's own lease will follow, and this
one serves only a retry, or a fork."""


@dataclass(slots=True)
class _Kept:
    """What belongs to an entry of the table besides the rules."""

    turn: Finished
    blocks: list[KVCacheBlock]
    num_claims: int = 0
    """Claims of the lease that have been seen."""


class DecodeSide:
    """Grants leases for one decode engine, and frees their blocks when nobody can be
    reading them."""

    def __init__(
        self,
        stub: lease_pb2_grpc.LeaseServiceAsyncStub,
        engine: registry_pb2.Engine,
        background: Background,
        tracer: trace.Tracer,
        settings: Settings,
        *,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = stub
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._table = LeaseTable()
        self._revocations = Revocations(stub, background, self._table, self._lock, clock)
        self._grants = Grants(
            stub,
            engine,
            background,
            tracer,
            self._table,
            self._lock,
            self._revocations,
            clock,
            chunk_tokens=chunk_tokens,
        )
        self._kept: dict[str, _Kept] = {}
        self._retained = Retained()
        self._turns_over_budget = 0
        self._pauses = Pauses()
        self._waiting = ""
        """The request that was about to be admitted last."""
        self._fits_since = 0.0
        """Since when there should have been room for it."""
        self._holder: BlockHolder | None = None
        self._session: Session | None = None

    def bind(self, holder: BlockHolder, session: Session) -> None:
        """Before the first request."""
        self._holder, self._session = holder, session

    # --- scheduler thread -------------------------------------------------------------

    def finished(self, request_id: str, turn: Finished, num_blocks: Sequence[int]) -> None:
        """A turn has ended: keeps its blocks and asks for a lease, if there is a session
        to bind it to and room in the budget."""
        now = self._clock()
        self._note_pause(turn, now)
        session, holder = self._session, self._holder
        if session is None or holder is None or turn.end:
            return
        if not session.is_fresh:
            log.info("not granted: no live session", **turn.ids)
            return
        self.drain()
        blocks = holder.hold(request_id, num_blocks)
        lease = HeldLease(
            lease_id=str(uuid.uuid4()),
            num_blocks=len(blocks),
            num_tokens=len(turn.token_ids),
            granted_at=now,
            retention_s=turn.retention_s,
            claim_grace_s=self._settings.claim_grace,
        )
        entry = Entry(turn.conversation, session.session_id or "", lease, asked_at=now)
        if not self._add(entry, _Kept(turn, blocks)):
            holder.release(blocks)
            self._turns_over_budget += 1
            log.info("not granted: the retention budget is full", **turn.ids)
            return
        self._grants.begin(entry, turn)

    def _note_pause(self, turn: Finished, now: float) -> None:
        key = _key(turn.conversation)
        with self._lock:
            self._pauses.ended(key, now - turn.seconds_since_arrival)
            if turn.end:
                self._pauses.forget(key)
            else:
                self._pauses.began(key, now, turn.retention_s)

    def drain(self) -> None:
        """Frees the blocks of leases that nobody can be reading."""
        with self._lock:
            free = self._table.take_free(self._clock())
            kept = [self._kept.pop(entry.lease.lease_id) for entry in free]
            for item in kept:
                self._retained.remove(item.blocks)
        for entry, item in zip(free, kept, strict=True):
            assert self._holder is not None
            self._holder.release(item.blocks)
            if entry.lease.tickets or entry.lease.phase is not Phase.ENDED:
                # Readers that never closed their tickets leave a record behind: one more
                # revocation sweeps it.
                self._revocations.begin_once(entry, "sweep")

    def make_room(self, num_blocks: int, num_cached: int = 0, request_id: str = "") -> bool:
        """A request is about to be admitted: sees to it that its ``num_blocks``, and the
        free reserve, fit. Returns whether blocks are on their way to it.

        ``num_cached`` of its blocks are in the prefix cache, and may be free too. So if
        the same request still waits on the next step, it is as if there were none; and if
        it waits on although there should be room (vLLM also puts blocks aside for others),
        leases go one by one.
        """
        assert self._holder is not None
        waits = bool(request_id) and self._waiting == request_id
        self._waiting = request_id
        needed = self._reserve + (num_blocks if waits else num_blocks - num_cached)
        short = min(needed, self._holder.total_blocks) - self._holder.free_blocks
        if short > 0 or not waits:
            self._fits_since = self._clock()
        elif self._clock() > self._fits_since + PATIENCE_S:
            short = 1
        return short > 0 and self._give_up(short) > 0

    def keep_reserve(self) -> None:
        """After a step: gives leases up if fewer blocks than the reserve are free."""
        assert self._holder is not None
        short = self._reserve - self._holder.free_blocks
        if short > 0:
            self._give_up(short)

    def room_is_coming(self) -> bool:
        """A running request gets no block, and would be preempted: whether blocks of
        leases come back for it, at once or as soon as a revocation is confirmed.

        True is bounded in time: each lease is granted and revoked once, and one revocation
        that is not confirmed within ``SURE_S`` ends the waiting for all.
        """
        assert self._holder is not None
        before = self._holder.free_blocks
        self.drain()
        if self._holder.free_blocks > before or self._give_up(max(1, self._reserve)) > 0:
            return True
        with self._lock:
            retained, stuck = len(self._retained), self._revocations.stuck()
            # A lease is revoked once its grant is answered: also a matter of milliseconds.
            answered_from = self._clock() - SURE_S
            granting = any(
                entry.lease.phase is Phase.GRANTING and entry.asked_at > answered_from
                for entry in self._table.entries.values()
            )
        if granting and not stuck:
            return True
        if retained:
            log.info(
                "a running request is preempted beside retained blocks",
                retained_blocks=retained,
                reason="revocations are not confirmed" if stuck else "readers, or shared blocks",
            )
        return False

    @property
    def _reserve(self) -> int:
        assert self._holder is not None
        return int(self._holder.total_blocks * self._settings.min_free_fraction)

    @property
    def _budget(self) -> int:
        assert self._holder is not None
        return int(self._holder.total_blocks * self._settings.max_retained_fraction)

    def _give_up(self, blocks_needed: int) -> int:
        """Revokes the cheapest leases so that ``blocks_needed`` blocks come back; how many
        will."""
        with self._lock:
            if self._revocations.stuck():
                return 0
            choice = cheapest(
                self._candidates(),
                needed=blocks_needed,
                going=[self._kept[name].blocks for name in self._revocations.going()],
                references=lambda block: block.ref_cnt,
            )
            chosen = self._table.give_up(choice.lease_ids)
        self._revoke(chosen)
        return choice.coming

    def _add(self, entry: Entry, kept: _Kept) -> bool:
        """Adds a lease that is about to be asked for, if it fits the budget beside leases
        that are worth more; the others are revoked. What its grant supersedes makes room,
        too. (So the budget is exceeded by one turn, for as long as a call takes.)"""
        assert self._holder is not None
        lease_id = entry.lease.lease_id
        chosen: list[Entry] = []
        with self._lock:
            superseded = [
                name
                for name, other in self._table.entries.items()
                if other.conversation == entry.conversation and not other.lease.tickets
            ]
            self._table.add(entry)
            self._kept[lease_id] = kept
            self._retained.add(kept.blocks)
            excess = len(self._retained) - self._budget
            if excess > 0:
                going = {*superseded, *self._revocations.going()}
                candidates = [*self._candidates(), self._candidate(entry)]
                choice = cheapest(
                    [item for item in candidates if item.lease_id not in going],
                    needed=excess,
                    going=[self._kept[name].blocks for name in going],
                    references=self._retained.leases_of,
                )
                if (
                    choice.coming < excess
                    or lease_id in choice.lease_ids
                    or (choice.lease_ids and self._revocations.stuck())
                ):
                    del self._table.entries[lease_id], self._kept[lease_id]
                    self._retained.remove(kept.blocks)
                    return False
                chosen = self._table.give_up(choice.lease_ids)
        self._revoke(chosen)
        return True

    def _revoke(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._revocations.begin(entry)
        if entries:
            log.info(
                "leases given up for their blocks",
                conversation_ids=[entry.conversation.conversation_id for entry in entries],
            )

    def _candidates(self) -> list[Candidate]:
        """Leases that can be given up. Under the lock."""
        return [self._candidate(entry) for entry in self._table.revocable()]

    def _candidate(self, entry: Entry) -> Candidate:
        """A lease with its value. Under the lock."""
        now, lease, key = self._clock(), entry.lease, _key(entry.conversation)
        age_s = self._pauses.age_s(key, now)
        belief = self._pauses.belief(key)
        if age_s is None:
            chance = CLAIMED * belief.chance(now - lease.granted_at, lease.expires_at - now)
        else:
            chance = belief.chance(age_s, lease.expires_at - now)
        return Candidate(
            lease.lease_id,
            self._kept[lease.lease_id].blocks,
            keep_value(lease.num_tokens, lease.num_blocks, chance),
        )

    # --- any thread -------------------------------------------------------------------

    def confirm(self, lease_id: str, ticket_id: str) -> float:
        """For how many seconds, at least, a lease's blocks are kept for a ticket from now
        on; 0: they are not."""
        with self._lock:
            return self._table.confirm(lease_id, ticket_id, self._clock())

    def usage(self) -> registry_pb2.BlockUsage:
        """The engine's blocks now. What the next drain frees counts as free."""
        if self._holder is None:
            return registry_pb2.BlockUsage()
        now = self._clock()
        with self._lock:
            over = [
                self._kept[name].blocks
                for name, entry in self._table.entries.items()
                if entry.lease.may_free(now)
            ]
            unretained, freed = Release(self._retained.leases_of), Release(lambda b: b.ref_cnt)
            for blocks in over:
                unretained.let_go(blocks)
                freed.let_go(blocks)
            return registry_pb2.BlockUsage(
                total_blocks=self._holder.total_blocks,
                free_blocks=self._holder.free_blocks + freed.coming,
                retained_blocks=len(self._retained) - unretained.coming,
                retained_leases=len(self._table.entries) - len(over),
                retention_budget_blocks=self._budget,
                turns_over_budget=self._turns_over_budget,
            )

    # --- background loop --------------------------------------------------------------

    def session_lost(self, session_id: str, ended_by: float) -> None:
        """The session is over, and with it every lease: at ``ended_by`` at the latest."""
        with self._lock:
            self._table.session_lost(session_id, ended_by)

    async def watch(self, session_id: str) -> None:
        """Follows the session's leases until cancelled, over any number of streams."""
        while True:
            try:
                await self._watch_once(session_id)
            except grpc.aio.AioRpcError as error:
                log.debug("the lease watch ended; starting again", error=error.details())
            await asyncio.sleep(RETRY_S)

    async def _watch_once(self, session_id: str) -> None:
        started = self._clock()
        shown: set[str] | None = set()
        kinds = lease_pb2.WatchLeasesResponse
        async for update in self._stub.WatchLeases(
            lease_pb2.WatchLeasesRequest(holder_session_id=session_id)
        ):
            now, record, again = self._clock(), update.lease, []
            with self._lock:
                if update.kind == kinds.KIND_UPSERT:
                    if shown is not None:
                        shown.add(record.lease_id)
                        shown.update(item.lease_id for item in record.retiring)
                    self._note_claims(record, now)
                    again = self._table.show(record, now)
                elif update.kind == kinds.KIND_DELETE:
                    self._table.removed(record, now, after_gap=update.after_gap)
                elif update.kind == kinds.KIND_SYNCED and shown is not None:
                    self._table.synced(shown, started, now)
                    shown = None
            for entry in again:
                self._revocations.begin_once(entry, "revoke a late grant")

    def _note_claims(self, record: lease_pb2.Lease, now: float) -> None:
        """A claim is the first sign of a conversation's next turn. Under the lock."""
        kept = self._kept.get(record.lease_id)
        if kept is not None and record.claim_count > kept.num_claims:
            kept.num_claims = record.claim_count
            self._pauses.ended(_key(record.conversation), now)

    async def sweep(self) -> None:
        """Revokes leases whose retention TTL is over, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._clock()
            with self._lock:
                due = self._table.take_due(now)
                self._pauses.give_up(now)
            for entry in due:
                self._revocations.begin(entry)


def _key(conversation: common_pb2.Conversation) -> tuple[str, str, str]:
    return conversation.tenant, conversation.model, conversation.conversation_id
