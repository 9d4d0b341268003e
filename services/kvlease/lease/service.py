"""What each call of the lease service does, from request to response, without gRPC."""

from __future__ import annotations

import contextlib
import time

import grpc
import structlog

from kvlease import outcomes, pages, times
from kvlease.lease import claims, keys, metrics, rules, validate
from kvlease.lease.knowledge import LeaseView
from kvlease.lease.records import BOTH, INFO, LEASE, Records
from kvlease.lease.rules import Limits, State
from kvlease.mirror import Mirror
from kvlease.rpc import Refused
from kvlease.store.base import SessionLost
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import (
    ClaimResponse,
    CompleteResponse,
    ConversationInfo,
    EndConversationResponse,
    EndReason,
    GrantResponse,
    Lease,
    ListLeasesResponse,
    RevokeResponse,
    StartTurnResponse,
    Ticket,
)
from kvlease.v1.registry_pb2 import Engine

log = structlog.get_logger("kvlease.lease")


class LeaseOperations:
    """One method a call; each raises :class:`~kvlease.rpc.Refused` as the proto file says,
    and :class:`~kvlease.store.base.StoreUnavailable`."""

    def __init__(
        self,
        records: Records,
        leases: Mirror[LeaseView],
        limits: Limits,
        clock: times.Clock = times.wall_clock,
        lost_at: claims.LostAt = lambda *_: None,
    ) -> None:
        self._records = records
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._lost_at = lost_at

    async def start_turn(self, request: lease_pb2.StartTurnRequest) -> StartTurnResponse:
        """Counts the turn; tells who holds the conversation."""
        conversation = request.conversation
        validate.conversation(conversation)

        def decide(state: State, _: Engine | None) -> tuple[ConversationInfo, State]:
            info = rules.start_turn(state.info, conversation, self._clock())
            return info, State(state.lease, info)

        info = await self._records.change(conversation, decide, INFO)
        lease = await self._lease_of(info)
        return StartTurnResponse(turn=info.turn, lease=lease)

    async def _lease_of(self, info: ConversationInfo) -> Lease | None:
        """The conversation's lease, as this replica has seen it if that is the one which
        the conversation's record names, else read."""
        seen = self._leases.get(keys.lease(info.conversation))
        if seen is not None and seen.record.lease.lease_id == info.last_lease_id:
            return seen.record.public
        if seen is None and (not info.last_lease_id or info.last_end_reason):
            return None
        state = await self._records.read(info.conversation)
        return state.lease and rules.public(state.lease)

    async def grant(self, request: lease_pb2.GrantRequest) -> GrantResponse:
        """Stores a holder's promise."""
        try:
            return await self._grant(request)
        except Refused as refused:
            metrics.GRANTS_REFUSED.labels(refused.reason).inc()
            raise

    async def _grant(self, request: lease_pb2.GrantRequest) -> GrantResponse:
        validate.grant(request)
        await self._check_holder(request)
        superseded: Lease | None = None

        def decide(state: State, _: Engine | None) -> tuple[Lease, State]:
            nonlocal superseded
            superseded = None
            after, lease = rules.grant(state, request, self._limits, self._clock())
            if after.lease is not state.lease:
                superseded = state.lease
            return lease, after

        try:
            # Alone, so that its holder's watch shows it, and then whatever becomes of it.
            lease = await self._records.change(request.conversation, decide, BOTH, alone=True)
        except SessionLost:
            raise _session_lost(request) from None
        metrics.LEASES_GRANTED.inc()
        log.debug("lease granted", holder=request.engine_id, **_ids(lease))
        if superseded is not None and superseded.state == lease_pb2.LEASE_STATE_HELD:
            _count_end(lease_pb2.END_REASON_SUPERSEDED)
        # By whichever clock less is left: another replica's may have stored the lease.
        since = max(self._clock(), times.moment(lease.grant_time))
        left_s = max(0.0, times.moment(lease.expire_time) - since)
        return GrantResponse(lease=rules.public(lease), retention=times.duration(left_s))

    async def _check_holder(self, request: lease_pb2.GrantRequest) -> None:
        # A session belongs to one incarnation for ever. So it is enough to have seen the
        # two together once: whether the session still lives, the write itself finds out.
        engine = await self._records.engine(request.engine_id, request.incarnation)
        if engine is not None and engine.session_id != request.session_id:
            engine = await self._records.engine(request.engine_id, incarnation="")
        if (
            engine is None
            or engine.incarnation != request.incarnation
            or engine.session_id != request.session_id
        ):
            raise _session_lost(request)

    async def claim(self, request: lease_pb2.ClaimRequest) -> ClaimResponse:
        """Matches, decides, and opens a ticket."""
        started = time.perf_counter()
        validate.claim(request)

        def decide(state: State, holder: Engine | None) -> tuple[ClaimResponse, State]:
            answer, lease = claims.claim(
                state, holder, request, self._limits, self._clock(), self._lost_at
            )
            return answer, State(lease, state.info)

        try:
            answer = await self._records.change(
                request.conversation, decide, LEASE, with_holder=True
            )
        except SessionLost:
            answer = ClaimResponse(
                outcome=common_pb2.OUTCOME_MISS_ENGINE,
                detail="the lease's holder has just lost its session",
            )
        seconds = time.perf_counter() - started
        outcome = outcomes.word(answer.outcome)
        metrics.CLAIM_SECONDS.labels(outcome).observe(seconds)
        log.debug(
            "claim answered",
            conversation_id=request.conversation.conversation_id,
            outcome=outcome,
            reader=request.reader_engine_id,
            lease_id=answer.lease_id,
        )
        return answer

    async def complete(self, request: lease_pb2.CompleteRequest) -> CompleteResponse:
        """Closes a ticket."""
        validate.complete(request)

        def decide(state: State, _: Engine | None) -> tuple[None, State]:
            lease = rules.complete(state.lease, request.lease_id, request.ticket_id)
            return None, State(lease, state.info)

        with contextlib.suppress(SessionLost):  # then the ticket has gone with its lease
            await self._records.change(request.conversation, decide, LEASE)
        if request.result == lease_pb2.READ_RESULT_FAILED:
            log.warning(
                "read failed",
                conversation_id=request.conversation.conversation_id,
                lease_id=request.lease_id,
                ticket_id=request.ticket_id,
            )
        return CompleteResponse()

    async def renew(self, request: lease_pb2.RenewRequest) -> Lease:
        """Moves a lease's end."""
        validate.renew(request)
        retention_s = times.seconds(request.retention)

        def decide(state: State, _: Engine | None) -> tuple[Lease, State]:
            lease = rules.renew(state.lease, retention_s, self._limits, self._clock())
            return lease, State(lease, state.info)

        try:
            lease = await self._records.change(request.conversation, decide, LEASE)
        except SessionLost:
            raise rules.not_found("the lease's holder has just lost its session") from None
        return rules.public(lease)

    async def revoke(self, request: lease_pb2.RevokeRequest) -> RevokeResponse:
        """The holder ends its lease."""
        validate.revoke(request)
        ended = False

        def decide(state: State, _: Engine | None) -> tuple[list[Ticket], State]:
            nonlocal ended
            after, tickets = rules.revoke(state, request, self._limits, self._clock())
            ended = after.lease is not state.lease
            return tickets, after

        try:
            tickets = await self._records.change(request.conversation, decide, BOTH)
        except SessionLost:
            return RevokeResponse()  # everything under the session is gone
        if ended:
            _count_end(request.reason)
            log.debug(
                "lease revoked",
                conversation_id=request.conversation.conversation_id,
                lease_id=request.lease_id,
                reason=metrics.end_word(request.reason),
            )
        return RevokeResponse(open_tickets=tickets)

    async def end_conversation(
        self, request: lease_pb2.EndConversationRequest
    ) -> EndConversationResponse:
        """A client or router ends a conversation."""
        conversation = request.conversation
        validate.conversation(conversation)

        def decide(state: State, _: Engine | None) -> tuple[bool, State]:
            now = self._clock()
            after, ended = rules.end_conversation(state, conversation, self._limits, now)
            return ended, after

        ended = await self._records.change(conversation, decide, BOTH)
        if ended:
            _count_end(lease_pb2.END_REASON_CONVERSATION_ENDED)
        return EndConversationResponse(lease_ended=ended)

    async def sweep(self, conversation: Conversation) -> None:
        """Tidies up what is over and nobody has closed."""
        expired = False

        def decide(state: State, _: Engine | None) -> tuple[None, State]:
            nonlocal expired
            after = rules.overdue(state, self._limits, self._clock())
            expired = after.info is not state.info
            return None, after

        try:
            await self._records.change(conversation, decide, BOTH)
        except SessionLost:
            return
        if expired:
            _count_end(lease_pb2.END_REASON_EXPIRED)
            log.warning(
                "a lease was ended that its holder had not ended in time",
                conversation_id=conversation.conversation_id,
            )

    async def get_lease(self, request: lease_pb2.GetLeaseRequest) -> Lease:
        """One lease, whole."""
        validate.conversation(request.conversation)
        state = await self._records.read(request.conversation)
        if state.lease is None:
            raise rules.not_found(
                f"conversation {request.conversation.conversation_id!r} has no lease: "
                "`kvlease leases` lists those that exist"
            )
        return state.lease

    async def get_conversation(self, request: lease_pb2.GetConversationRequest) -> ConversationInfo:
        """What outlives the lease."""
        validate.conversation(request.conversation)
        state = await self._records.read(request.conversation)
        if state.info is None:
            raise Refused(
                grpc.StatusCode.NOT_FOUND,
                "CONVERSATION_NOT_FOUND",
                f"nothing is known of conversation {request.conversation.conversation_id!r}: no "
                "turn of it was started within conversation_ttl",
            )
        return state.info

    async def list_leases(self, request: lease_pb2.ListLeasesRequest) -> ListLeasesResponse:
        """Leases, in pages."""
        validate.list_filter(request)
        await self._leases.fence()
        prefix = keys.leases_of(request.tenant, request.model)
        holder = request.holder_engine_id
        found, token = pages.page(
            self._leases,
            request.page_size,
            request.page_token,
            lambda key, view: (
                key.startswith(prefix) and holder in ("", view.lease.holder_engine_id)
            ),
        )
        return ListLeasesResponse(leases=[view.public for view in found], next_page_token=token)


def _ids(lease: Lease) -> dict[str, object]:
    """What a log line needs, so that someone finds the lease."""
    conversation_id = lease.conversation.conversation_id
    return {"conversation_id": conversation_id, "lease_id": lease.lease_id, "turn": lease.turn}


def _count_end(reason: EndReason.ValueType) -> None:
    metrics.LEASES_ENDED.labels(metrics.end_word(reason)).inc()


def _session_lost(request: lease_pb2.GrantRequest) -> Refused:
    return Refused(
        grpc.StatusCode.FAILED_PRECONDITION,
        "SESSION_LOST",
        f"session {request.session_id} is not that of {request.engine_id!r} as it is registered: "
        "free the blocks, register again",
    )
