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

MAX_ENDED = 16
"""Ended leases that a conversation remembers. A grant that comes late is refused by its
turn too, if that is known; this is for tries of one turn, and turns of unknown number."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that rules depend on; seconds."""

    retention_ttl_s: float
    max_retention_s: float
    claim_grace_s: float
    claim_margin_s: float
    clock_tolerance_s: float
    max_readers: int

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits that ``settings`` set."""
        return cls(
            retention_ttl_s=settings.retention_ttl,
            max_retention_s=settings.max_retention,
            claim_grace_s=settings.claim_grace,
            claim_margin_s=settings.claim_margin,
            clock_tolerance_s=settings.clock_tolerance,
            max_readers=settings.max_readers,
        )

    def passed(self, now: float) -> float:
        """The moment that has passed by every replica's clock, if this one shows ``now``."""
        return now - self.clock_tolerance_s


@dataclass(frozen=True, slots=True)
class State:
    """A conversation's two records; None: absent. A rule's result holds the very same
    object where a record does not change."""

    lease: Lease | None = None
    info: ConversationInfo | None = None


# Tickets and what becomes of records when they are over


def open_tickets(tickets: Iterable[Ticket], limits: Limits, now: float) -> list[Ticket]:
    """Those that may be open still, by some replica's clock: one that is behind has given
    them less time ago than this one believes."""
    passed = limits.passed(now)
    return [ticket for ticket in tickets if times.moment(ticket.deadline) > passed]


def swept(lease: Lease, limits: Limits, now: float) -> Lease | None:
    """The record without tickets that are over, and without retiring leases that have
    none left; None if nothing is left of it. The same object if nothing changes."""
    passed = limits.passed(now)
    kept = _keeping(lease, lambda _, ticket: times.moment(ticket.deadline) > passed)
    return None if _is_over(kept) else kept


def _keeping(lease: Lease, keep: Callable[[str, Ticket], bool]) -> Lease:
    """The record with those tickets for which ``keep(lease_id, ticket)``. The same object
    if all are kept."""
    tickets = [ticket for ticket in lease.tickets if keep(lease.lease_id, ticket)]
    retiring = [
        (old, [ticket for ticket in old.tickets if keep(old.lease_id, ticket)])
        for old in lease.retiring
    ]
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


def _is_over(lease: Lease) -> bool:
    """Whether nobody needs the record any more."""
    return lease.state == lease_pb2.LEASE_STATE_ENDING and not (lease.tickets or lease.retiring)


def next_due(lease: Lease, limits: Limits) -> float:
    """The first moment at which :func:`overdue` would change the record."""
    moments = [times.moment(ticket.deadline) for ticket in lease.tickets]
    moments += [times.moment(ticket.deadline) for old in lease.retiring for ticket in old.tickets]
    if lease.state == lease_pb2.LEASE_STATE_HELD:
        moments.append(times.moment(lease.expire_time) + limits.claim_grace_s)
    return min(moments) + limits.clock_tolerance_s if moments else 0.0


def overdue(state: State, limits: Limits, now: float) -> State:
    """What nobody else has tidied up: tickets that are over, a lease whose holder has not
    ended it by the last moment at which it may keep the blocks, an ended one's record."""
    lease = state.lease
    if lease is None:
        return state
    last = times.moment(lease.expire_time) + limits.claim_grace_s
    if lease.state == lease_pb2.LEASE_STATE_HELD and limits.passed(now) >= last:
        return _ended(state, lease, lease_pb2.END_REASON_EXPIRED, limits, now)
    return replace(state, lease=swept(lease, limits, now))


def complete(lease: Lease | None, lease_id: str, ticket_id: str) -> Lease | None:
    """The record after a ticket is closed; the same object if there is no such ticket.

    The record of an ended lease stays, without tickets, for :func:`overdue` to remove:
    so its holder sees that the read was completed. (A record that disappears with a ticket
    may have disappeared with its session, and the reader may still be at it.)
    """
    if lease is None:
        return None
    closed = (lease_id, ticket_id)
    return _keeping(lease, lambda owner, ticket: (owner, ticket.ticket_id) != closed)


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

    Raises FAILED_PRECONDITION: STALE_TURN, CONVERSATION_ENDED, LEASE_ENDED;
    RESOURCE_EXHAUSTED: TOO_MANY_READERS.
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
        lease.superseded_lease_id = stored.lease_id
        lease.retiring.extend(_retire(stored, limits, now))
        _add_ended(info, stored.lease_id)
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
    retiring = state.lease.retiring if state.lease else ()
    name = request.conversation.conversation_id
    if request.lease_id in info.ended_lease_ids or any(
        old.lease_id == request.lease_id for old in retiring
    ):
        raise _precondition(
            "LEASE_ENDED", f"lease {request.lease_id} has ended already: free its blocks"
        )
    if 0 < request.turn <= info.ended_through_turn:
        raise _precondition(
            "CONVERSATION_ENDED",
            f"conversation {name!r} was ended after turn {request.turn} had started: free its "
            "blocks",
        )
    latest = max(info.last_grant_turn, state.lease.turn if state.lease else 0)
    if 0 < request.turn < latest:
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


def _retire(stored: Lease, limits: Limits, now: float) -> list[RetiringLease]:
    """What a superseded lease leaves behind: readers that are still at it."""
    kept = []
    for old in stored.retiring:
        tickets = open_tickets(old.tickets, limits, now)
        if tickets:
            kept.append(_retiring(old, tickets))
    tickets = open_tickets(stored.tickets, limits, now)
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
    return swept(changed, limits, now) or changed


def revoke(
    state: State, request: lease_pb2.RevokeRequest, limits: Limits, now: float
) -> tuple[State, list[Ticket]]:
    """The records after the holder has ended its lease, and the tickets it has to keep
    the blocks for. A lease that is not there is remembered as ended, so that it cannot be
    granted any more. Raises INVALID_ARGUMENT (INVALID_LEASE) if the lease is another's."""
    lease = state.lease
    if lease is not None and lease.lease_id == request.lease_id:
        if lease.holder_session_id != request.session_id:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_LEASE",
                f"lease {request.lease_id} is held by another session: only its holder revokes it",
            )
        tickets = open_tickets(lease.tickets, limits, now)
        if lease.state != lease_pb2.LEASE_STATE_HELD:
            return state, tickets
        return _ended(state, lease, request.reason, limits, now), tickets
    for old in lease.retiring if lease else ():
        if old.lease_id == request.lease_id and old.holder_session_id == request.session_id:
            return state, open_tickets(old.tickets, limits, now)
    before = state.info
    if before is not None and request.lease_id in (*before.ended_lease_ids, before.last_lease_id):
        return state, []
    info = _info(before, request.conversation)
    _add_ended(info, request.lease_id)
    return replace(state, info=info), []


def end_conversation(
    state: State, conversation: Conversation, limits: Limits, now: float
) -> tuple[State, bool]:
    """The records after a conversation has ended, and whether a lease ended with it."""
    lease, before = state.lease, state.info
    if before is None and lease is None:
        return state, False
    ends = lease is not None and lease.state == lease_pb2.LEASE_STATE_HELD
    if ends and lease is not None:
        state = _ended(state, lease, lease_pb2.END_REASON_CONVERSATION_ENDED, limits, now)
    info = _info(state.info, conversation)
    info.turn = max(info.turn, lease.turn if lease else 0)
    info.ended_through_turn = info.turn
    if info.last_lease_id:
        info.last_end_reason = lease_pb2.END_REASON_CONVERSATION_ENDED
    return replace(state, info=before if info == before else info), ends


def _ended(
    state: State, lease: Lease, reason: EndReason.ValueType, limits: Limits, now: float
) -> State:
    """The lease takes no new claims, and the record goes with its last ticket."""
    changed = _copy(lease)
    changed.state = lease_pb2.LEASE_STATE_ENDING
    changed.end_reason = reason
    info = _info(state.info, lease.conversation)
    info.turn = max(info.turn, lease.turn)
    _remember(info, lease)
    info.last_end_reason = reason
    _add_ended(info, lease.lease_id)
    return State(swept(changed, limits, now), info)


def _add_ended(info: ConversationInfo, lease_id: str) -> None:
    if lease_id not in info.ended_lease_ids:
        info.ended_lease_ids.append(lease_id)
        del info.ended_lease_ids[:-MAX_ENDED]


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
