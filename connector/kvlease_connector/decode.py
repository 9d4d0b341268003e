"""The decode engine's part of a turn: keep the blocks of a finished turn and grant a
lease on them; revoke, and free, when the time has come.

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
from google.protobuf.duration_pb2 import Duration
from opentelemetry import trace

from kvlease import prefix, rpc, telemetry
from kvlease.config import Settings
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.background import Background
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.retention import HeldLease, Phase, over_budget
from kvlease_connector.session import Session
from kvlease_connector.table import Entry, LeaseTable

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

log = structlog.get_logger("kvlease.connector.decode")

CALL_TIMEOUT_S = 2.0
GRANT_TRIES_S = 5.0
"""A grant without a clear answer is tried again for so long, then revoked: until one of
the two is confirmed the store may show the lease."""

_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)

RETRY_S = 0.2
SWEEP_S = 0.2
"""How often deadlines are looked at. Between two looks an idle engine does nothing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished turn whose blocks can be leased."""

    conversation: common_pb2.Conversation
    turn: int
    token_ids: list[int]
    """Tokens whose KV has been computed."""
    seed: bytes
    transfer_params_json: str
    traceparent: str
    retention_s: float
    end: bool = False
    """The client has said that this was the conversation's last turn."""


@dataclass(slots=True)
class _Kept:
    """What belongs to an entry of the table besides the rules."""

    turn: Finished
    blocks: list[KVCacheBlock]


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
        self._engine = engine
        self._background = background
        self._tracer = tracer
        self._settings = settings
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._table = LeaseTable()
        self._kept: dict[str, _Kept] = {}
        self._holder: BlockHolder | None = None
        self._session: Session | None = None

    def bind(self, holder: BlockHolder, session: Session) -> None:
        """Before the first request."""
        self._holder, self._session = holder, session

    # --- scheduler thread -------------------------------------------------------------

    def finished(self, request_id: str, turn: Finished, num_blocks: Sequence[int]) -> None:
        """A turn has ended: keeps its blocks and asks for a lease, if there is a session
        to bind it to and room in the budget."""
        session, holder = self._session, self._holder
        if session is None or holder is None or turn.end:
            return
        if not session.is_fresh:
            log.info("not granted: no live session", **_ids(turn))
            return
        self.drain()
        if not self._make_budget(sum(num_blocks)):
            log.info("not granted: the retention budget is full", **_ids(turn))
            return
        now = self._clock()
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
        with self._lock:
            self._table.add(entry)
            self._kept[lease.lease_id] = _Kept(turn, blocks)
        self._background.submit(self._grant(entry, turn), "grant")

    def drain(self) -> None:
        """Frees the blocks of leases that nobody can be reading."""
        with self._lock:
            free = self._table.take_free(self._clock())
            kept = [self._kept.pop(entry.lease.lease_id) for entry in free]
        for entry, item in zip(free, kept, strict=True):
            assert self._holder is not None
            self._holder.release(item.blocks)
            if entry.lease.tickets or entry.lease.phase is not Phase.ENDED:
                # Readers that never closed their tickets leave a record behind: one more
                # revocation sweeps it.
                self._background.submit(self._revoke_once(entry), "sweep")

    def make_room(self, blocks_needed: int) -> bool:
        """Revokes the cheapest leases if fewer than ``blocks_needed`` blocks (and the free
        reserve) would be left. Returns whether blocks are on their way."""
        assert self._holder is not None
        reserve = int(self._holder.total_blocks * self._settings.min_free_fraction)
        short = min(blocks_needed + reserve, self._holder.total_blocks) - self._holder.free_blocks
        return short > 0 and self._revoke_cheapest(short)

    def _make_budget(self, new_blocks: int) -> bool:
        """Whether ``new_blocks`` more fit the budget, after revoking cheaper leases."""
        assert self._holder is not None
        total = self._holder.total_blocks
        fraction = self._settings.max_retained_fraction
        if over_budget(new_blocks, total, fraction):
            return False
        excess = over_budget(self.usage().retained_blocks + new_blocks, total, fraction)
        return not excess or self._revoke_cheapest(excess)

    def _revoke_cheapest(self, blocks_needed: int) -> bool:
        with self._lock:
            chosen, enough = self._table.take_victims(blocks_needed, self._clock())
        for entry in chosen:
            self._background.submit(self._revoke(entry), "revoke")
        return enough

    # --- any thread -------------------------------------------------------------------

    def usage(self) -> registry_pb2.BlockUsage:
        """The engine's blocks now. What the next drain frees counts as free."""
        if self._holder is None:
            return registry_pb2.BlockUsage()
        now = self._clock()
        with self._lock:
            free_ids: set[int] = set()
            held_ids: set[int] = set()
            leases = 0
            for lease_id, entry in self._table.entries.items():
                ids = map(id, self._kept[lease_id].blocks)
                if entry.lease.may_free(now):
                    free_ids.update(ids)
                else:
                    leases += 1
                    held_ids.update(ids)
        return registry_pb2.BlockUsage(
            total_blocks=self._holder.total_blocks,
            free_blocks=self._holder.free_blocks + len(free_ids - held_ids),
            retained_blocks=len(held_ids),
            retained_leases=leases,
        )

    # --- background loop --------------------------------------------------------------

    def session_lost(self, session_id: str, ended_by: float) -> None:
        """The session is over, and with it every lease: at ``ended_by`` at the latest."""
        with self._lock:
            self._table.session_lost(session_id, ended_by)

    async def _grant(self, entry: Entry, turn: Finished) -> None:
        lease = entry.lease
        with self._tracer.start_as_current_span(
            "lease.grant",
            context=telemetry.extract({"traceparent": turn.traceparent}),
            kind=trace.SpanKind.CLIENT,
            attributes={
                "kvlease.conversation": turn.conversation.conversation_id,
                "kvlease.turn": turn.turn,
                "kvlease.lease_id": lease.lease_id,
                "kvlease.tokens": lease.num_tokens,
                "kvlease.blocks": lease.num_blocks,
            },
        ) as span:
            refusal = await self._grant_until_answered(entry, turn, span)
            span.set_attribute("kvlease.granted", refusal == "")
            if refusal:
                span.set_attribute("kvlease.detail", refusal)
                log.info("not granted", reason=refusal, **_ids(turn))

    async def _grant_until_answered(self, entry: Entry, turn: Finished, span: trace.Span) -> str:
        """Empty: granted. Else why not; the lease has ended then, or is being revoked."""
        request = self._grant_request(entry, turn)
        deadline = self._clock() + GRANT_TRIES_S
        while True:
            try:
                answer = await self._stub.Grant(
                    request,
                    timeout=CALL_TIMEOUT_S,
                    metadata=tuple(telemetry.inject(span).items()),
                )
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    with self._lock:
                        self._table.refused(entry.lease.lease_id, self._clock())
                    return f"{rpc.reason_of(error)}: {error.details()}"
                if self._clock() < deadline and entry.lease.phase is Phase.GRANTING:
                    await asyncio.sleep(RETRY_S)
                    continue
                entry.lease.revoking = True
                self._background.submit(self._revoke(entry), "revoke after an unclear grant")
                return f"no clear answer: {error.details()}"
            retention_s = answer.retention.ToTimedelta().total_seconds()
            with self._lock:
                self._table.granted(entry.lease.lease_id, answer.lease, retention_s, self._clock())
            return ""

    def _grant_request(self, entry: Entry, turn: Finished) -> lease_pb2.GrantRequest:
        proof = prefix.prove(turn.token_ids, seed=turn.seed, chunk_tokens=self._chunk_tokens)
        retention = Duration()
        retention.FromMilliseconds(int(turn.retention_s * 1000))
        return lease_pb2.GrantRequest(
            conversation=turn.conversation,
            lease_id=entry.lease.lease_id,
            turn=turn.turn,
            engine_id=self._engine.engine_id,
            incarnation=self._engine.incarnation,
            session_id=entry.session_id,
            num_tokens=entry.lease.num_tokens,
            num_blocks=entry.lease.num_blocks,
            block_size=self._engine.block_size,
            compatibility_hash=self._engine.compatibility_hash,
            proof=lease_pb2.PrefixProof(
                chunk_tokens=proof.chunk_tokens,
                chunk_digests=proof.chunk_digests,
                tail_digest=proof.tail_digest,
            ),
            kv_transfer_params_json=turn.transfer_params_json,
            retention=retention,
            traceparent=turn.traceparent,
        )

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
                    again = self._table.show(record, now)
                elif update.kind == kinds.KIND_DELETE:
                    self._table.removed(record, now, after_gap=update.after_gap)
                elif update.kind == kinds.KIND_SYNCED and shown is not None:
                    self._table.synced(shown, started, now)
                    shown = None
            for entry in again:
                self._background.submit(self._revoke_once(entry), "revoke a late grant")

    async def sweep(self) -> None:
        """Revokes leases whose retention TTL is over, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            with self._lock:
                due = self._table.take_due(self._clock())
            for entry in due:
                self._background.submit(self._revoke(entry), "revoke")

    async def _revoke(self, entry: Entry) -> None:
        """Until it is confirmed, or nothing is left to revoke."""
        while entry.lease.phase is not Phase.ENDED:
            if self._clock() >= entry.lease.hard_deadline or await self._revoke_once(entry):
                return
            await asyncio.sleep(RETRY_S)

    async def _revoke_once(self, entry: Entry) -> bool:
        request = lease_pb2.RevokeRequest(
            conversation=entry.conversation,
            lease_id=entry.lease.lease_id,
            session_id=entry.session_id,
            reason=entry.reason,
        )
        try:
            answer = await self._stub.Revoke(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning(
                "revoke failed",
                error=error.details(),
                conversation=entry.conversation.conversation_id,
                lease_id=entry.lease.lease_id,
            )
            return False
        with self._lock:
            self._table.revoked(
                entry.lease.lease_id,
                [ticket.ticket_id for ticket in answer.open_tickets],
                self._clock(),
            )
        return True


def _ids(turn: Finished) -> dict[str, object]:
    return {"conversation": turn.conversation.conversation_id, "turn": turn.turn}
