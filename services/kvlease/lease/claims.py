"""The rules of claims: how much of a lease a prompt may reuse, and whether now.

Pure, like :mod:`kvlease.lease.rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlease import prefix, times
from kvlease.lease.rules import Limits, State, open_tickets, swept
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.common_pb2 import Outcome
from kvlease.v1.lease_pb2 import (
    ClaimRequest,
    ClaimResponse,
    ConversationInfo,
    EndReason,
    Lease,
    Ticket,
)
from kvlease.v1.registry_pb2 import Engine

LostAt = Callable[[str, str], float | None]
"""From an engine's id and incarnation to when it lost its session; None: nobody saw it."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt shares with a lease, in tokens from the start.

    ``proven`` is certain: full chunks that are equal. ``tail`` is the lease's length where
    its tail may be equal too (only the reader can tell), else 0.
    """

    proven: int
    tail: int
    equal_chunks: int
    lease_chunks: int

    @property
    def potential(self) -> int:
        """The most that the reader may find equal."""
        return max(self.proven, self.tail)


def match(lease: Lease, request: ClaimRequest) -> Match:
    """Compares the digests of the two."""
    chunk_tokens = lease.proof.chunk_tokens
    ours = lease.proof.chunk_digests
    equal = prefix.matching_chunks(ours, request.proof.chunk_digests)
    chunks = len(ours) // prefix.DIGEST_SIZE
    whole = equal == chunks and request.num_prompt_tokens >= lease.num_tokens
    return Match(
        proven=equal * chunk_tokens,
        tail=lease.num_tokens if whole else 0,
        equal_chunks=equal,
        lease_chunks=chunks,
    )


def claim(
    state: State,
    holder: Engine | None,
    request: ClaimRequest,
    limits: Limits,
    now: float,
    lost_at: LostAt = lambda *_: None,
) -> tuple[ClaimResponse, Lease | None]:
    """The answer to a claim, and the lease's record after it: the same object unless a
    ticket was opened.

    ``holder`` is what is registered under the lease's holder_engine_id now. ``lost_at`` is
    only for the words of a miss. The order of
    the checks is the order in which a person would ask: is there a lease, is its holder
    there, is there time, is it the same text, is it enough, is there room. A ticket that
    an earlier try of the same call opened is not questioned again.
    """
    lease = state.lease
    if lease is None:
        return _without_lease(state.info, lost_at), None
    found = match(lease, request)
    ticket = _open_ticket(lease, request, limits, now)
    if ticket is not None and holder is not None and not _gone(lease, holder):
        return _hit(lease, holder, found, request, ticket, limits, now), lease
    refusal = (
        _ended_refusal(lease)
        or _holder_refusal(lease, holder, request)
        or _time_refusal(lease, limits, now)
        or _match_refusal(found, lease, request)
        or _room_refusal(lease, limits, now)
    )
    if refusal is not None:
        return _miss(refusal, found), lease
    assert holder is not None  # _holder_refusal would have refused
    ticket = _new_ticket(lease, found, request, limits, now)
    after = _with_ticket(lease, ticket, limits, now)
    return _hit(lease, holder, found, request, ticket, limits, now), after


@dataclass(frozen=True, slots=True)
class _Refusal:
    outcome: Outcome.ValueType
    detail: str


_ENDS = {
    lease_pb2.END_REASON_EXPIRED: _Refusal(
        common_pb2.OUTCOME_MISS_EXPIRED, "its retention TTL has passed"
    ),
    lease_pb2.END_REASON_BUDGET: _Refusal(
        common_pb2.OUTCOME_MISS_EXPIRED, "the engine needed the blocks"
    ),
    lease_pb2.END_REASON_CONVERSATION_ENDED: _Refusal(
        common_pb2.OUTCOME_MISS_NO_LEASE, "the conversation was ended"
    ),
    lease_pb2.END_REASON_SHUTDOWN: _Refusal(
        common_pb2.OUTCOME_MISS_NO_LEASE, "the engine has shut down"
    ),
}


def _of_end(holder: str, turn: int, reason: EndReason.ValueType, lost: str = "") -> _Refusal:
    """Of a lease that has ended. ``lost``: the time at which its session was lost."""
    known = _ENDS.get(reason)
    if known is None:
        when = f" at {lost}" if lost else ""
        return _Refusal(
            common_pb2.OUTCOME_MISS_ENGINE,
            f"{holder}, which held the lease of turn {turn}, has lost its session{when}: it "
            "crashed, hung, was cut off or restarted",
        )
    return _Refusal(known.outcome, f"{holder}'s lease of turn {turn} has ended: {known.detail}")


def _without_lease(info: ConversationInfo | None, lost_at: LostAt) -> ClaimResponse:
    if info is None or not info.last_lease_id:
        refusal = _Refusal(
            common_pb2.OUTCOME_MISS_NO_LEASE, "no turn of the conversation has been granted yet"
        )
    else:
        holder = info.last_holder_engine_id
        moment = lost_at(holder, info.last_holder_incarnation)
        lost = "" if moment is None else times.timestamp(moment).ToJsonString()
        refusal = _of_end(holder, info.last_grant_turn, info.last_end_reason, lost)
    return ClaimResponse(outcome=refusal.outcome, detail=refusal.detail)


def _open_ticket(lease: Lease, request: ClaimRequest, limits: Limits, now: float) -> Ticket | None:
    """The ticket that an earlier try of this very call opened."""
    for ticket in open_tickets(lease.tickets, limits, now):
        if ticket.ticket_id == request.ticket_id:
            return ticket
    return None


def _ended_refusal(lease: Lease) -> _Refusal | None:
    if lease.state == lease_pb2.LEASE_STATE_HELD:
        return None
    return _of_end(lease.holder_engine_id, lease.turn, lease.end_reason)


def _gone(lease: Lease, holder: Engine) -> bool:
    return holder.incarnation != lease.holder_incarnation


def _holder_refusal(lease: Lease, holder: Engine | None, request: ClaimRequest) -> _Refusal | None:
    name = lease.holder_engine_id
    detail = ""
    if holder is None or _gone(lease, holder):
        detail = f"{name}, which holds the lease, is not registered any more"
    elif holder.state == registry_pb2.ENGINE_STATE_DRAINING:
        detail = f"{name}, which holds the lease, drains"
    elif lease.compatibility_hash != request.compatibility_hash:
        detail = f"{name}'s KV cache has another layout than the reader's"
    elif lease.proof.chunk_tokens != request.proof.chunk_tokens:
        detail = (
            f"{name} proves {lease.proof.chunk_tokens} tokens at a time, the reader "
            f"{request.proof.chunk_tokens}"
        )
    return _Refusal(common_pb2.OUTCOME_MISS_ENGINE, detail) if detail else None


def _time_refusal(lease: Lease, limits: Limits, now: float) -> _Refusal | None:
    left_s = times.moment(lease.expire_time) - now
    if left_s < limits.claim_margin_s:
        return _Refusal(
            common_pb2.OUTCOME_MISS_EXPIRED,
            f"the lease has {max(left_s, 0.0):.1f} s left, a read needs {limits.claim_margin_s:g}",
        )
    return None


def _match_refusal(found: Match, lease: Lease, request: ClaimRequest) -> _Refusal | None:
    if found.potential == 0:
        return _Refusal(common_pb2.OUTCOME_MISS_PREFIX, _compared(found, lease, request))
    if found.potential < request.min_tokens:
        return _Refusal(
            common_pb2.OUTCOME_MISS_SHORT,
            f"{_compared(found, lease, request)}; {request.min_tokens:,} would be worth a read",
        )
    return None


def _compared(found: Match, lease: Lease, request: ClaimRequest) -> str:
    """How far the two are the same, as far as digests of whole chunks tell."""
    prompt = request.num_prompt_tokens
    equal = f"{found.proven:,} of {lease.num_tokens:,} kept tokens are proven equal"
    if found.tail:
        rest = found.tail - found.proven
        where = f", and the last {rest:,} may be" if rest else ""
    elif found.proven + lease.proof.chunk_tokens > prompt:
        where = f": the prompt has only {prompt:,} tokens"
    else:
        last = found.proven + lease.proof.chunk_tokens
        where = f": the prompt first differs within its tokens {found.proven + 1:,} to {last:,}"
    return equal + where


def _room_refusal(lease: Lease, limits: Limits, now: float) -> _Refusal | None:
    reading = sum(times.moment(ticket.deadline) > now for ticket in lease.tickets)
    if reading < limits.max_readers:
        return None
    return _Refusal(
        common_pb2.OUTCOME_MISS_BUSY,
        f"{reading} readers have the lease open, max_readers is {limits.max_readers}",
    )


def _miss(refusal: _Refusal, found: Match) -> ClaimResponse:
    tells = refusal.outcome in (common_pb2.OUTCOME_MISS_SHORT, common_pb2.OUTCOME_MISS_BUSY)
    return ClaimResponse(
        outcome=refusal.outcome,
        detail=refusal.detail,
        proven_tokens=found.proven if tells else 0,
    )


def _new_ticket(
    lease: Lease, found: Match, request: ClaimRequest, limits: Limits, now: float
) -> Ticket:
    # The holder keeps blocks for claim_grace beyond the lease's end, and no longer.
    deadline = min(now, times.moment(lease.expire_time)) + limits.claim_grace_s
    return Ticket(
        ticket_id=request.ticket_id,
        reader_engine_id=request.reader_engine_id,
        reader_incarnation=request.reader_incarnation,
        open_time=times.timestamp(now),
        deadline=times.timestamp(deadline),
        num_tokens=found.potential,
    )


def _with_ticket(lease: Lease, ticket: Ticket, limits: Limits, now: float) -> Lease:
    changed = Lease()
    # A lease that can be claimed is held, so sweeping leaves something.
    changed.CopyFrom(swept(lease, limits, now) or lease)
    changed.tickets.append(ticket)
    changed.claim_count += 1
    return changed


def _hit(
    lease: Lease,
    holder: Engine,
    found: Match,
    request: ClaimRequest,
    ticket: Ticket,
    limits: Limits,
    now: float,
) -> ClaimResponse:
    # The replica that opened the ticket may have had another time: never more than it gave.
    ttl_s = min(max(0.0, times.moment(ticket.deadline) - now), limits.claim_grace_s)
    return ClaimResponse(
        outcome=common_pb2.OUTCOME_HIT,
        proven_tokens=found.proven,
        tail_num_tokens=found.tail,
        tail_digest=lease.proof.tail_digest if found.tail else b"",
        ticket=ticket,
        ticket_ttl=times.duration(ttl_s),
        lease_id=lease.lease_id,
        kv_transfer_params_json=lease.kv_transfer_params_json,
        holder=holder,
        detail=_compared(found, lease, request),
        lease_traceparent=lease.traceparent,
    )
