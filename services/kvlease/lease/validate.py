"""What the lease service accepts. Each refusal is INVALID_ARGUMENT with a sentence that
names the field and the fix."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from kvlease import times
from kvlease.prefix import DIGEST_SIZE
from kvlease.rpc import Refused, check_enum
from kvlease.v1 import lease_pb2
from kvlease.v1.common_pb2 import Conversation, Outcome

MAX_ID_BYTES = 512

MAX_LEASE_BYTES = 1_000_000
"""etcd takes 1.5 MB a request, and a lease grows by its tickets. One million tokens in
blocks of 16 take about 450 kB."""

_REVOKE_REASONS = (
    lease_pb2.END_REASON_EXPIRED,
    lease_pb2.END_REASON_BUDGET,
    lease_pb2.END_REASON_SHUTDOWN,
)


def _invalid(reason: str, message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, reason, message)


def _check_texts(reason: str, fields: Mapping[str, str]) -> None:
    for field, value in fields.items():
        if not value:
            raise _invalid(reason, f"{field} is empty: it is required")
        size = len(value.encode())
        if size > MAX_ID_BYTES:
            raise _invalid(
                reason, f"{field} has {size} bytes: shorten it to at most {MAX_ID_BYTES}"
            )


def conversation(value: Conversation, reason: str = "INVALID_CONVERSATION") -> None:
    """All three parts are there, and none is longer than :data:`MAX_ID_BYTES`."""
    _check_texts(
        reason,
        {
            "conversation.tenant": value.tenant,
            "conversation.model": value.model,
            "conversation.conversation_id": value.conversation_id,
        },
    )


def grant(request: lease_pb2.GrantRequest) -> None:
    """INVALID_LEASE unless the lease can be read and compared by everyone."""
    reason = "INVALID_LEASE"
    conversation(request.conversation, reason)
    _check_texts(
        reason,
        {
            "lease_id": request.lease_id,
            "engine_id": request.engine_id,
            "incarnation": request.incarnation,
            "session_id": request.session_id,
            "compatibility_hash": request.compatibility_hash,
        },
    )
    for field, number in (
        ("num_tokens", request.num_tokens),
        ("num_blocks", request.num_blocks),
        ("block_size", request.block_size),
    ):
        if number < 1:
            raise _invalid(reason, f"{field} is 0: it is at least 1")
    _grant_proof(request)
    if not request.kv_transfer_params_json.startswith("{"):
        raise _invalid(
            reason,
            "kv_transfer_params_json is not a JSON object: give vLLM's transfer parameters",
        )
    if request.ByteSize() > MAX_LEASE_BYTES:
        raise _invalid(
            reason,
            f"the lease has {request.ByteSize()} bytes: at most {MAX_LEASE_BYTES} fit into the "
            "store; use larger KV blocks or grant fewer tokens",
        )
    if request.HasField("retention"):
        _retention(times.seconds(request.retention), reason)


def _grant_proof(request: lease_pb2.GrantRequest) -> None:
    proof = request.proof
    if proof.chunk_tokens < 1 or proof.chunk_tokens % request.block_size:
        raise _invalid(
            "INVALID_LEASE",
            f"proof.chunk_tokens is {proof.chunk_tokens}: give a multiple of block_size "
            f"({request.block_size})",
        )
    chunks, tail = divmod(request.num_tokens, proof.chunk_tokens)
    if len(proof.chunk_digests) != chunks * DIGEST_SIZE:
        raise _invalid(
            "INVALID_LEASE",
            f"proof.chunk_digests has {len(proof.chunk_digests)} bytes: num_tokens "
            f"{request.num_tokens} takes {chunks} digests of {DIGEST_SIZE} bytes",
        )
    expected = DIGEST_SIZE if tail else 0
    if len(proof.tail_digest) != expected:
        raise _invalid(
            "INVALID_LEASE",
            f"proof.tail_digest has {len(proof.tail_digest)} bytes: {tail} tokens after the last "
            f"full chunk take {expected}",
        )


def claim(request: lease_pb2.ClaimRequest) -> None:
    """INVALID_CLAIM unless it can be compared with a lease."""
    reason = "INVALID_CLAIM"
    conversation(request.conversation, reason)
    _check_texts(
        reason,
        {
            "ticket_id": request.ticket_id,
            "reader_engine_id": request.reader_engine_id,
            "reader_incarnation": request.reader_incarnation,
            "compatibility_hash": request.compatibility_hash,
        },
    )
    if request.num_prompt_tokens < 1:
        raise _invalid(reason, "num_prompt_tokens is 0: it is at least 1")
    proof = request.proof
    if proof.chunk_tokens < 1:
        raise _invalid(reason, "proof.chunk_tokens is 0: it is at least 1")
    chunks = request.num_prompt_tokens // proof.chunk_tokens
    if len(proof.chunk_digests) != chunks * DIGEST_SIZE:
        raise _invalid(
            reason,
            f"proof.chunk_digests has {len(proof.chunk_digests)} bytes: num_prompt_tokens "
            f"{request.num_prompt_tokens} takes {chunks} digests of {DIGEST_SIZE} bytes",
        )
    if proof.tail_digest:
        raise _invalid(reason, "proof.tail_digest is set: leave it empty in a claim")


def complete(request: lease_pb2.CompleteRequest) -> None:
    """INVALID_TICKET unless it names a ticket and a result that there is."""
    conversation(request.conversation, "INVALID_TICKET")
    _check_texts("INVALID_TICKET", {"lease_id": request.lease_id, "ticket_id": request.ticket_id})
    check_enum(lease_pb2.ReadResult.DESCRIPTOR, request.result, "result", "INVALID_TICKET")


def renew(request: lease_pb2.RenewRequest) -> None:
    """INVALID_CONVERSATION or INVALID_RETENTION."""
    conversation(request.conversation)
    _retention(times.seconds(request.retention), "INVALID_RETENTION")


def _retention(seconds: float, reason: str) -> None:
    if seconds <= 0:
        raise _invalid(reason, f"retention is {seconds:g} s: give more than 0")


def revoke(request: lease_pb2.RevokeRequest) -> None:
    """INVALID_LEASE unless it names a lease, its holder and a reason of a holder's."""
    conversation(request.conversation, "INVALID_LEASE")
    _check_texts("INVALID_LEASE", {"lease_id": request.lease_id, "session_id": request.session_id})
    if request.reason not in _REVOKE_REASONS:
        raise _invalid(
            "INVALID_LEASE",
            f"reason is {request.reason}: give END_REASON_EXPIRED, END_REASON_BUDGET or "
            "END_REASON_SHUTDOWN",
        )


def turn(value: lease_pb2.TurnRecord) -> None:
    """INVALID_TURNS for an outcome or an end that there is not."""
    check_enum(Outcome.DESCRIPTOR, value.outcome, "turn.outcome", "INVALID_TURNS")
    check_enum(lease_pb2.TurnEnd.DESCRIPTOR, value.end, "turn.end", "INVALID_TURNS")


def list_filter(request: lease_pb2.ListLeasesRequest) -> None:
    """INVALID_FILTER if a model is given without its tenant."""
    if request.model and not request.tenant:
        raise _invalid("INVALID_FILTER", "model is set without tenant: set both, or neither")
