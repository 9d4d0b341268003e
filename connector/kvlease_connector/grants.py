"""Grants: from the end of a turn to the lease service's clear answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from opentelemetry import trace

from kvlease import logs, prefix, rpc, telemetry
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.background import Background
from kvlease_connector.retention import Phase
from kvlease_connector.revocations import CALL_TIMEOUT_S, RETRY_S, Revocations
from kvlease_connector.table import Entry, LeaseTable

log = structlog.get_logger("kvlease.connector.decode")

GRANT_TRIES_S = 5.0
"""A grant without a clear answer is tried again for so long, then revoked: until one of
the two is confirmed the store may show the lease."""

_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


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
    seconds_since_arrival: float = 0.0
    """How long ago the engine got the request."""

    @property
    def ids(self) -> dict[str, object]:
        """What a log line needs, so that someone finds the turn."""
        ids = logs.turn_ids(self.conversation.conversation_id, self.traceparent)
        return {**ids, "turn": self.turn}


class Grants:
    """Grants leases for one decode engine. ``lock`` protects ``table``."""

    def __init__(
        self,
        stub: lease_pb2_grpc.LeaseServiceAsyncStub,
        engine: registry_pb2.Engine,
        background: Background,
        tracer: trace.Tracer,
        table: LeaseTable,
        lock: threading.Lock,
        revocations: Revocations,
        clock: Callable[[], float],
        *,
        chunk_tokens: int,
    ) -> None:
        self._stub = stub
        self._engine = engine
        self._background = background
        self._tracer = tracer
        self._table = table
        self._lock = lock
        self._revocations = revocations
        self._clock = clock
        self._chunk_tokens = chunk_tokens

    def begin(self, entry: Entry, turn: Finished) -> None:
        """Asks for a lease that the table has already. Any thread."""
        self._background.submit(self._grant(entry, turn), "grant")

    async def _grant(self, entry: Entry, turn: Finished) -> None:
        lease = entry.lease
        with telemetry.timed(
            self._tracer,
            "lease.grant",
            telemetry.extract({"traceparent": turn.traceparent}),
            trace.SpanKind.CLIENT,
            {
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
                log.info("not granted", reason=refusal, **turn.ids)

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
                self._revocations.begin(entry, "revoke after an unclear grant")
                telemetry.fail(span, f"no clear answer: {error.details()}", error.code().name)
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
