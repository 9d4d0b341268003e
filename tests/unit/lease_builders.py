"""Records and requests for tests of lease rules, with everything that a test does not care
about filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlease import prefix, times
from kvlease.lease.rules import Limits, State, grant
from kvlease.v1 import lease_pb2, registry_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import ClaimRequest, GrantRequest, Lease, PrefixProof, Ticket
from kvlease.v1.registry_pb2 import Engine

NOW = 1_800_000_000.0
BLOCK = 4
CHUNK = 8
LIMITS = Limits(
    retention_ttl_s=480.0,
    max_retention_s=3600.0,
    claim_grace_s=30.0,
    claim_margin_s=1.0,
    clock_tolerance_s=0.0,
    max_readers=3,
)
CONVERSATION = Conversation(tenant="acme", model="qwen", conversation_id="c1")
SEED = prefix.seed_for("acme", "qwen", "", "", "")


def proof_of(tokens: Sequence[int], *, tail: bool) -> PrefixProof:
    """``tail``: as in a lease; without: as in a claim."""
    proof = prefix.prove(tokens, seed=SEED, chunk_tokens=CHUNK)
    return PrefixProof(
        chunk_tokens=CHUNK,
        chunk_digests=proof.chunk_digests,
        tail_digest=proof.tail_digest if tail else b"",
    )


def grant_request(tokens: Sequence[int] = range(20), **fields: Any) -> GrantRequest:
    request = GrantRequest(
        conversation=CONVERSATION,
        lease_id="lease-1",
        turn=1,
        engine_id="decode-0",
        incarnation="i1",
        session_id="s1",
        num_tokens=len(tokens),
        num_blocks=-(-len(tokens) // BLOCK),
        block_size=BLOCK,
        compatibility_hash="hash",
        proof=proof_of(tokens, tail=True),
        kv_transfer_params_json='{"remote_block_ids": [[1, 2]]}',
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    for name, value in fields.items():
        _set(request, name, value)
    return request


def claim_request(tokens: Sequence[int] = range(20), **fields: Any) -> ClaimRequest:
    request = ClaimRequest(
        conversation=CONVERSATION,
        ticket_id="ticket-1",
        reader_engine_id="prefill-0",
        reader_incarnation="p1",
        compatibility_hash="hash",
        proof=proof_of(tokens, tail=False),
        num_prompt_tokens=len(tokens),
        min_tokens=1,
    )
    for name, value in fields.items():
        _set(request, name, value)
    return request


def revoke_request(**fields: Any) -> lease_pb2.RevokeRequest:
    request = lease_pb2.RevokeRequest(
        conversation=CONVERSATION,
        lease_id="lease-1",
        session_id="s1",
        reason=lease_pb2.END_REASON_BUDGET,
    )
    for name, value in fields.items():
        _set(request, name, value)
    return request


def engine(**fields: Any) -> Engine:
    record = Engine(
        engine_id="decode-0",
        role=registry_pb2.ENGINE_ROLE_DECODE,
        incarnation="i1",
        model="qwen",
        http_address="http://127.0.0.1:8200",
        side_channel_host="127.0.0.1",
        side_channel_port=5600,
        block_size=BLOCK,
        compatibility_hash="hash",
        state=registry_pb2.ENGINE_STATE_SERVING,
        session_id="s1",
    )
    for name, value in fields.items():
        _set(record, name, value)
    return record


def granted(tokens: Sequence[int] = range(20), *, now: float = NOW, **fields: Any) -> State:
    """The records after a first grant."""
    state, _ = grant(State(), grant_request(tokens, **fields), LIMITS, now)
    return state


def ticket(ticket_id: str, deadline: float = NOW + 30) -> Ticket:
    return Ticket(ticket_id=ticket_id, deadline=times.timestamp(deadline))


def with_tickets(lease: Lease | None, *tickets: Ticket) -> Lease:
    assert lease is not None
    changed = Lease()
    changed.CopyFrom(lease)
    changed.tickets.extend(tickets)
    return changed


def ids(tickets: Sequence[Ticket]) -> list[str]:
    return [ticket.ticket_id for ticket in tickets]


def _set(message: Any, name: str, value: Any) -> None:
    if hasattr(value, "CopyFrom"):
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)
