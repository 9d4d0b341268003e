"""What the page shows, as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlease import outcomes, times
from kvlease.router.rules import Candidate
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.lease_pb2 import ConversationSummary, Lease, TurnRecord


def engine(role: str, state: str, candidate: Candidate) -> dict[str, Any]:
    """One row of the engines. Blocks are None while the engine has not told of any."""
    record = candidate.engine
    usage = record.usage if record.HasField("usage") else None
    return {
        "id": record.engine_id,
        "role": role,
        "state": state,
        "model": record.model,
        "in_flight": candidate.in_flight,
        "blocks": None
        if usage is None
        else {
            "total": usage.total_blocks,
            "free": usage.free_blocks,
            "retained": usage.retained_blocks,
            "leases": usage.retained_leases,
            "budget": usage.retention_budget_blocks,
        },
    }


def conversation(found: ConversationSummary, now: float, jaeger_url: str) -> dict[str, Any]:
    """One row of the conversations. Seconds; ``now`` is by the router's clock."""
    name, last = found.conversation, found.turns[-1] if found.turns else TurnRecord()
    return {
        "tenant": name.tenant,
        "model": name.model,
        "id": name.conversation_id,
        "turn": last.turn,
        "ago_s": max(0.0, now - times.moment(last.start_time)),
        "outcome": _outcome(last),
        "why": _why(last),
        "prompt_tokens": last.prompt_tokens,
        "reused_tokens": last.reused_tokens,
        "trace_url": f"{jaeger_url}/trace/{last.trace_id}" if jaeger_url and last.trace_id else "",
        "ttfts": [_ttft(turn) for turn in found.turns],
        "lease": _lease(found.lease, now) if found.HasField("lease") else None,
    }


def _outcome(turn: TurnRecord) -> str:
    """What became of its blocks, or, if that was never decided, how it ended."""
    if turn.outcome != common_pb2.OUTCOME_UNSPECIFIED:
        return outcomes.word(turn.outcome)
    return _end(turn)


def _end(turn: TurnRecord) -> str:
    return lease_pb2.TurnEnd.Name(turn.end).removeprefix("TURN_END_").lower()


def _why(turn: TurnRecord) -> str:
    return ". ".join(text for text in (turn.detail, turn.error) if text)


def _ttft(turn: TurnRecord) -> dict[str, Any]:
    seconds = times.seconds(turn.ttft) if turn.HasField("ttft") else None
    hit = turn.outcome == common_pb2.OUTCOME_HIT
    return {"turn": turn.turn, "s": seconds, "hit": hit, "end": _end(turn)}


def _lease(lease: Lease, now: float) -> dict[str, Any]:
    ending = lease.state != lease_pb2.LEASE_STATE_HELD
    return {
        "holder": lease.holder_engine_id,
        "tokens": lease.num_tokens,
        "blocks": lease.num_blocks,
        "left_s": 0.0 if ending else max(0.0, times.moment(lease.expire_time) - now),
        "readers": _readers(lease, now),
    }


def _readers(lease: Lease, now: float) -> int:
    tickets: Iterable[lease_pb2.Ticket] = (
        *lease.tickets,
        *(ticket for old in lease.retiring for ticket in old.tickets),
    )
    return sum(times.moment(ticket.deadline) > now for ticket in tickets)
