"""The rules of leases: what a grant, a renewal, an end and a ticket's end make of a
conversation's records. (Claims: :mod:`kvlease.lease.claims`.)

Pure: records come in and go out as protobuf messages, which are never changed in place;
``now`` is passed in, in seconds (:mod:`kvlease.times`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import grpc

from kvlease import times
from kvlease.config import Settings
from kvlease.rpc import Refused
from kvlease.v1 import lease_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import ConversationInfo, EndReason, Lease, RetiringLease, Ticket

MAX_RETIRING = 32
"""Superseded leases whose tickets a record carries. Each lasts for at most a ticket's
life, so more means that a conversation is granted more than once a second while
everybody reads: the grant is refused rather than a reader's blocks freed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that rules depend on; seconds."""

    retention_ttl_s: float
    max_retention_s: float
    claim_grace_s: float
    claim_margin_s: float
    max_readers: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that ``settings`` set."""
        return cls(
            retention_ttl_s=settings.retention_ttl,
            max_retention_s=settings.max_retention,
            claim_grace_s=settings.claim_grace,
            claim_margin_s=settings.claim_margin,
            max_readers=settings.max_readers,
        )


@dataclass(frozen=True, slots=True)
class State:
    """A conversation's two records; None: absent. A rule's result holds the very same
    object where a record does not change."""

    lease: Lease | None = None
    info: ConversationInfo | None = None


# Tickets and what becomes of records when they are over


def open_tickets(tickets: Iterable[Ticket], now: float) -> list[Ticket]:
    """Those whose deadline has not passed."""
    return [ticket for ticket in tickets if times.moment(ticket.deadline) > now]


def swept(lease: Lease, now: float) -> Lease | None:
    """The record without tickets that are over, and without retiring leases that have
    none left; None if nothing is left of it. The same object if nothing changes."""
    return _keeping(lease, lambda _, ticket: times.moment(ticket.deadline) > now)


def _keeping(lease: Lease, keep: Callable[[str, Ticket], bool]) -> Lease | None:
    """The record with those tickets for which ``keep(lease_id, ticket)``; None if it has
    ended and none is left. The same object if all are kept."""
    tickets = [ticket for ticket in lease.tickets if keep(lease.lease_id, ticket)]
    retiring = [
        (old, [ticket for ticket in old.tickets if keep(old.lease_id, ticket)])
        for old in lease.retiring
    ]
    reading = bool(tickets) or any(left for _, left in retiring)
    if lease.state == lease_pb2.LEASE_STATE_ENDING and not reading:
        return None
    dropped = len(tickets) < len(lease.tickets) or any(
        not left or len(left) < len(old.tickets) for old, left in retiring
    )
    if not dropped:
        return lease
    changed = _copy(lease)
    del changed.tickets[:]
    changed.tickets.extend(tickets)
    del changed.retiring[:]
    changed.retiring.extend(_retiring(old, left) for old, left in retiring if left)
    return changed


def next_due(lease: Lease, limits: Limits) -> float:
    """The first moment at which :func:`overdue` would change the record."""
    moments = [times.moment(ticket.deadline) for ticket in lease.tickets]
    moments += [times.moment(ticket.deadline) for old in lease.retiring for ticket in old.tickets]
    if lease.state == lease_pb2.LEASE_STATE_HELD:
        moments.append(times.moment(lease.expire_time) + limits.claim_grace_s)
    return min(moments, default=0.0)


def overdue(state: State, limits: Limits, now: float) -> State:
    """What nobody else has tidied up: tickets that are over, and a lease whose holder has
    not ended it by the last moment at which it may keep the blocks."""
    lease = state.lease
    if lease is None:
        return state
    expired = now >= times.moment(lease.expire_time) + limits.claim_grace_s
    if lease.state == lease_pb2.LEASE_STATE_HELD and expired:
        return _ended(state, lease, lease_pb2.END_REASON_EXPIRED, now)
    return replace(state, lease=swept(lease, now))


def complete(lease: Lease | None, lease_id: str, ticket_id: str, now: float) -> Lease | None:
    """The record after a ticket is closed; the same object if there is no such ticket and
    nothing to tidy up."""
    if lease is None:
        return None
    closed = (lease_id, ticket_id)
    return _keeping(
        lease,
        lambda owner, ticket: (
            times.moment(ticket.deadline) > now and (owner, ticket.ticket_id) != closed
        ),
    )


# Turns and grants


def start_turn(
    info: ConversationInfo | None, conversation: Conversation, now: float
) -> ConversationInfo:
    """The conversation's next turn is counted."""
    changed = _info(info, conversation)
    changed.turn += 1
    changed.last_turn_time.CopyFrom(times.timestamp(now))
    return changed


def grant(
    state: State, request: lease_pb2.GrantRequest, limits: Limits, now: float
) -> tuple[State, Lease]:
    """The records after a grant, and the lease to answer with. That the session is the
    holder's is for the caller to know.

    Raises FAILED_PRECONDITION: STALE_TURN, CONVERSATION_ENDED; RESOURCE_EXHAUSTED:
    TOO_MANY_READERS.
    """
    stored = state.lease
    if stored is not None and _is_same_grant(stored, request):
        return state, stored
    _check_turn(state, request)
    lease = _new_lease(request, limits, now)
    info = _info(state.info, request.conversation)
    known = max(info.turn, stored.turn if stored else 0)
    lease.turn = request.turn or known
    if stored is not None:
        lease.retiring.extend(_retire(stored, now))
    info.turn = max(known, lease.turn)
    _remember(info, lease)
    return State(lease, info), lease


def _is_same_grant(stored: Lease, request: lease_pb2.GrantRequest) -> bool:
    return (
        stored.lease_id == request.lease_id
        and stored.holder_session_id == request.session_id
        and stored.state == lease_pb2.LEASE_STATE_HELD
    )


def _check_turn(state: State, request: lease_pb2.GrantRequest) -> None:
    info = state.info or ConversationInfo()
    name = request.conversation.conversation_id
    if info.last_lease_id == request.lease_id and info.last_end_reason:
        raise _precondition(
            "CONVERSATION_ENDED",
            f"lease {request.lease_id} was granted and has ended already: free its blocks",
        )
    if 0 < request.turn <= info.ended_through_turn:
        raise _precondition(
            "CONVERSATION_ENDED",
            f"conversation {name!r} was ended after turn {request.turn} had started: free its "
            "blocks",
        )
    latest = max(info.last_grant_turn, state.lease.turn if state.lease else 0)
    superseded = state.lease is not None and any(
        old.lease_id == request.lease_id for old in state.lease.retiring
    )
    if superseded or 0 < request.turn < latest:
        raise _precondition(
            "STALE_TURN",
            f"turn {latest} of conversation {name!r} has been granted already: free the blocks "
            f"of turn {request.turn}",
        )


def _new_lease(request: lease_pb2.GrantRequest, limits: Limits, now: float) -> Lease:
    retention_s = limits.retention_ttl_s
    if request.HasField("retention"):
        retention_s = min(times.seconds(request.retention), limits.max_retention_s)
    return Lease(
        conversation=request.conversation,
        lease_id=request.lease_id,
        state=lease_pb2.LEASE_STATE_HELD,
        holder_engine_id=request.engine_id,
        holder_incarnation=request.incarnation,
        holder_session_id=request.session_id,
        num_tokens=request.num_tokens,
        num_blocks=request.num_blocks,
        block_size=request.block_size,
        compatibility_hash=request.compatibility_hash,
        proof=request.proof,
        kv_transfer_params_json=request.kv_transfer_params_json,
        grant_time=times.timestamp(now),
        expire_time=times.timestamp(now + retention_s),
        chunk_tokens=request.proof.chunk_tokens,
        traceparent=request.traceparent,
    )


def _retire(stored: Lease, now: float) -> list[RetiringLease]:
    """What a superseded lease leaves behind: readers that are still at it."""
    kept = []
    for old in stored.retiring:
        tickets = open_tickets(old.tickets, now)
        if tickets:
            kept.append(_retiring(old, tickets))
    tickets = open_tickets(stored.tickets, now)
    if tickets:
        kept.append(
            RetiringLease(
                lease_id=stored.lease_id,
                holder_session_id=stored.holder_session_id,
                holder_engine_id=stored.holder_engine_id,
                end_reason=stored.end_reason or lease_pb2.END_REASON_SUPERSEDED,
                tickets=tickets,
            )
        )
    if len(kept) > MAX_RETIRING:
        raise Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_READERS",
            f"{len(kept)} earlier leases of the conversation are still being read: free the "
            "blocks of this turn",
        )
    return kept


def _retiring(old: RetiringLease, tickets: list[Ticket]) -> RetiringLease:
    return RetiringLease(
        lease_id=old.lease_id,
        holder_session_id=old.holder_session_id,
        holder_engine_id=old.holder_engine_id,
        end_reason=old.end_reason,
        tickets=tickets,
    )


# Renewals and ends


def renew(lease: Lease | None, retention_s: float, limits: Limits, now: float) -> Lease:
    """The record with a new end. Raises NOT_FOUND (LEASE_NOT_FOUND) if it cannot be
    claimed any more."""
    if lease is None:
        raise not_found("there is no lease to renew: it was never granted, or has ended")
    if lease.state != lease_pb2.LEASE_STATE_HELD or times.moment(lease.expire_time) <= now:
        raise not_found("the lease has ended and is not brought back")
    changed = _copy(lease)
    until = now + min(retention_s, limits.max_retention_s)
    changed.expire_time.CopyFrom(times.timestamp(until))
    return swept(changed, now) or changed


def revoke(
    state: State, request: lease_pb2.RevokeRequest, now: float
) -> tuple[State, list[Ticket]]:
    """The records after the holder has ended its lease, and the tickets it has to keep
    the blocks for. Raises INVALID_ARGUMENT (INVALID_LEASE) if the lease is another's."""
    lease = state.lease
    if lease is None:
        return state, []
    if lease.lease_id == request.lease_id:
        if lease.holder_session_id != request.session_id:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_LEASE",
                f"lease {request.lease_id} is held by another session: only its holder revokes it",
            )
        tickets = open_tickets(lease.tickets, now)
        if lease.state != lease_pb2.LEASE_STATE_HELD:
            return state, tickets
        return _ended(state, lease, request.reason, now), tickets
    for old in lease.retiring:
        if old.lease_id == request.lease_id and old.holder_session_id == request.session_id:
            return state, open_tickets(old.tickets, now)
    return state, []


def end_conversation(state: State, conversation: Conversation, now: float) -> tuple[State, bool]:
    """The records after a conversation has ended, and whether a lease ended with it."""
    lease, before = state.lease, state.info
    ends = lease is not None and lease.state == lease_pb2.LEASE_STATE_HELD
    if before is None and lease is None:
        return state, False
    info = _info(before, conversation)
    info.turn = max(info.turn, lease.turn if lease else 0)
    info.ended_through_turn = info.turn
    if info.last_lease_id:
        info.last_end_reason = lease_pb2.END_REASON_CONVERSATION_ENDED
    if ends and lease is not None:
        ended = _ended(state, lease, lease_pb2.END_REASON_CONVERSATION_ENDED, now)
        return replace(ended, info=info), True
    return replace(state, info=before if info == before else info), False


def _ended(state: State, lease: Lease, reason: EndReason.ValueType, now: float) -> State:
    """The lease takes no new claims, and the record goes with its last ticket."""
    changed = _copy(lease)
    changed.state = lease_pb2.LEASE_STATE_ENDING
    changed.end_reason = reason
    info = _info(state.info, lease.conversation)
    info.turn = max(info.turn, lease.turn)
    _remember(info, lease)
    info.last_end_reason = reason
    return State(swept(changed, now), info)


def _remember(info: ConversationInfo, lease: Lease) -> None:
    """What of a lease outlives its record."""
    info.last_lease_id = lease.lease_id
    info.last_grant_turn = lease.turn
    info.last_holder_engine_id = lease.holder_engine_id
    info.last_holder_incarnation = lease.holder_incarnation
    info.last_end_reason = lease_pb2.END_REASON_UNSPECIFIED


# Records as others see them


def public(lease: Lease) -> Lease:
    """The record without digests and transfer parameters, as lists and watches show it."""
    shown = _copy(lease)
    shown.ClearField("proof")
    shown.ClearField("kv_transfer_params_json")
    return shown


def sessions_of(lease: Lease) -> frozenset[str]:
    """The sessions that a record concerns: its holder's, and those of retiring leases."""
    return frozenset((lease.holder_session_id, *(old.holder_session_id for old in lease.retiring)))


def not_found(message: str) -> Refused:
    """NOT_FOUND (LEASE_NOT_FOUND)."""
    return Refused(grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND", message)


def _precondition(reason: str, message: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def _copy(lease: Lease) -> Lease:
    copied = Lease()
    copied.CopyFrom(lease)
    return copied


def _info(info: ConversationInfo | None, conversation: Conversation) -> ConversationInfo:
    copied = ConversationInfo()
    if info is None:
        copied.conversation.CopyFrom(conversation)
    else:
        copied.CopyFrom(info)
    return copied
