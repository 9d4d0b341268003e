"""A prefill engine's side of a lease: prove, claim, and say how the read ended."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from opentelemetry import trace

from kvlease import outcomes, prefix, rpc, telemetry
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.holder import Holders
from kvlease_connector.pull_policy import Verdict

log = structlog.get_logger("kvlease.connector.claims")

COMPLETE_TIMEOUT_S = 2.0

TRANSFER_FIELDS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)
"""vLLM transfer parameters without which there is nothing to read."""


Judge = Callable[[str, str, int], Verdict]
"""From the holder's engine id and incarnation and the usable tokens to whether to pull.
Called in the background thread."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a claim is about."""

    conversation: common_pb2.Conversation
    token_ids: Sequence[int]
    """The prompt. Not changed after this is made."""
    seed: bytes
    chunk_tokens: int
    block_size: int
    min_tokens: int
    num_local_tokens: int
    """Tokens of the prompt that are in the engine's own prefix cache."""
    traceparent: str
    judge: Judge | None = None
    """None: a hit is pulled, whatever it costs."""


@dataclass(slots=True)
class Answer:
    """What came of a claim. ``params`` is set with a hit: vLLM's transfer parameters, cut
    to the ``usable_tokens`` that are proven equal."""

    outcome: common_pb2.Outcome.ValueType
    detail: str = ""
    usable_tokens: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    lease_id: str = ""
    ticket_id: str = ""
    read_by: float = math.inf
    """The moment after which the blocks may be gone."""
    holder: registry_pb2.Engine | None = None
    lease_traceparent: str = ""
    verdict: Verdict | None = None
    claim_s: float = 0.0
    """How long it took to get here; 0 if nobody was asked."""


class Claims:
    """Calls the lease service for one prefill engine. Coroutines run in the background
    loop; nothing here touches the engine."""

    def __init__(
        self,
        stub: lease_pb2_grpc.LeaseServiceAsyncStub,
        reader: registry_pb2.Engine,
        tracer: trace.Tracer,
        *,
        claim_timeout_s: float,
        connect_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        holders: Holders | None = None,
    ) -> None:
        self._stub = stub
        self._reader = reader
        self._tracer = tracer
        self._claim_timeout_s = claim_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._holders = holders or Holders(connect_timeout_s)

    async def claim(self, ask: Ask) -> Answer:
        """One claim, decided: never raises, never takes longer than the claim deadline plus
        the time to reach the holder."""
        context = telemetry.extract({"traceparent": ask.traceparent})
        with telemetry.timed(self._tracer, "lease.claim", context, trace.SpanKind.CLIENT) as span:
            started = self._clock()
            answer = await self._claim(ask, span)
            answer.claim_s = self._clock() - started
            span.set_attributes(
                {
                    "kvlease.conversation": ask.conversation.conversation_id,
                    "kvlease.outcome": outcomes.word(answer.outcome),
                    "kvlease.detail": answer.detail,
                    "kvlease.prompt_tokens": len(ask.token_ids),
                    "kvlease.usable_tokens": answer.usable_tokens,
                    "kvlease.min_tokens": ask.min_tokens,
                    "kvlease.lease_id": answer.lease_id,
                    **(answer.verdict.attributes() if answer.verdict else {}),
                }
            )
            if answer.outcome in _UNANSWERED:
                telemetry.fail(span, answer.detail, outcomes.word(answer.outcome))
            return answer

    async def _claim(self, ask: Ask, span: trace.Span) -> Answer:
        proof = prefix.prove(ask.token_ids, seed=ask.seed, chunk_tokens=ask.chunk_tokens)
        ticket_id = str(uuid.uuid4())
        sent = self._clock()
        try:
            response = await self._stub.Claim(
                lease_pb2.ClaimRequest(
                    conversation=ask.conversation,
                    ticket_id=ticket_id,
                    reader_engine_id=self._reader.engine_id,
                    reader_incarnation=self._reader.incarnation,
                    compatibility_hash=self._reader.compatibility_hash,
                    proof=lease_pb2.PrefixProof(
                        chunk_tokens=proof.chunk_tokens, chunk_digests=proof.chunk_digests
                    ),
                    num_prompt_tokens=proof.num_tokens,
                    min_tokens=ask.min_tokens,
                ),
                timeout=self._claim_timeout_s,
                metadata=tuple(telemetry.inject(span).items()),
            )
        except grpc.aio.AioRpcError as error:
            return _failed(error, self._claim_timeout_s)
        answer = Answer(
            outcome=response.outcome,
            detail=response.detail,
            lease_id=response.lease_id,
            ticket_id=ticket_id,
            read_by=sent + response.ticket_ttl.ToTimedelta().total_seconds(),
            holder=response.holder if response.HasField("holder") else None,
            lease_traceparent=response.lease_traceparent,
        )
        if response.outcome != common_pb2.OUTCOME_HIT:
            return answer
        return await self._settle(ask, proof, response, answer)

    async def _settle(
        self,
        ask: Ask,
        proof: prefix.Proof,
        response: lease_pb2.ClaimResponse,
        answer: Answer,
    ) -> Answer:
        """A ticket is open: compare the tail, look whether the holder is there."""
        usable = response.proven_tokens
        if response.tail_num_tokens > usable:
            usable = _with_tail(ask, proof, response)
            answer.detail = _compared(usable, response.tail_num_tokens)
        refusal = None
        holder = response.holder
        if usable >= ask.min_tokens and ask.judge is not None:
            answer.verdict = ask.judge(holder.engine_id, holder.incarnation, usable)
        if usable == 0:
            refusal = (common_pb2.OUTCOME_MISS_PREFIX, answer.detail)
        elif usable < ask.min_tokens:
            refusal = (
                common_pb2.OUTCOME_MISS_SHORT,
                f"{answer.detail}; {ask.min_tokens:,} would be worth a read",
            )
        elif answer.verdict is not None and not answer.verdict.pull:
            refusal = (common_pb2.OUTCOME_MISS_SHORT, answer.verdict.detail)
        elif why_not := await self._ask_holder(holder, answer):
            refusal = (common_pb2.OUTCOME_MISS_ENGINE, why_not)
        else:
            params = json.loads(response.kv_transfer_params_json)
            if all(params.get(name) for name in TRANSFER_FIELDS):
                answer.usable_tokens = usable
                answer.params = cut(params, usable, ask.block_size)
            else:
                refusal = (
                    common_pb2.OUTCOME_MISS_UNSUPPORTED,
                    "the lease's transfer parameters name no blocks",
                )
        if refusal is not None:
            answer.outcome, answer.detail = refusal
            await self.complete(ask.conversation, answer, lease_pb2.READ_RESULT_ABANDONED)
        return answer

    async def _ask_holder(self, holder: registry_pb2.Engine, answer: Answer) -> str:
        """Has the holder confirm the ticket, which limits the time for the read. Returns
        why nothing can be read, else the empty string."""
        if not holder.holder_address:
            return f"{holder.engine_id} cannot be asked whether it keeps the blocks"
        asked = self._clock()
        try:
            keep_s = await self._holders.confirm(holder, answer.lease_id, answer.ticket_id)
        except grpc.aio.AioRpcError as error:
            return f"{holder.engine_id} does not answer: {error.details()}"
        answer.read_by = min(answer.read_by, asked + keep_s)
        return "" if keep_s > 0 else f"{holder.engine_id} does not keep the lease's blocks any more"

    async def complete(
        self,
        conversation: common_pb2.Conversation,
        answer: Answer,
        result: lease_pb2.ReadResult.ValueType,
    ) -> None:
        """Closes the answer's ticket. If that fails the ticket runs out by itself."""
        try:
            await self._stub.Complete(
                lease_pb2.CompleteRequest(
                    conversation=conversation,
                    lease_id=answer.lease_id,
                    ticket_id=answer.ticket_id,
                    result=result,
                ),
                timeout=COMPLETE_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            log.warning(
                "a ticket could not be closed and will run out",
                conversation_id=conversation.conversation_id,
                ticket_id=answer.ticket_id,
                error=error.details(),
            )


_UNANSWERED = (common_pb2.OUTCOME_MISS_TIMEOUT, common_pb2.OUTCOME_MISS_UNAVAILABLE)


def cut(params: dict[str, Any], usable_tokens: int, block_size: int) -> dict[str, Any]:
    """Transfer parameters for the blocks that hold the first ``usable_tokens`` tokens.
    Every other field stays as it is."""
    blocks = math.ceil(usable_tokens / block_size)
    return {
        **params,
        "remote_block_ids": [group[:blocks] for group in params["remote_block_ids"]],
        "remote_num_tokens": usable_tokens,
    }


def _with_tail(ask: Ask, proof: prefix.Proof, response: lease_pb2.ClaimResponse) -> int:
    """Tokens that are proven equal, the lease's last ones among them if they are."""
    tail = prefix.tail_digest(proof, ask.token_ids, response.tail_num_tokens, seed=ask.seed)
    is_equal = tail == response.tail_digest
    return response.tail_num_tokens if is_equal else response.proven_tokens


def _compared(usable: int, kept: int) -> str:
    """How far a lease and a prompt that is longer are the same."""
    equal = f"{usable:,} of {kept:,} kept tokens are proven equal"
    if usable == kept:
        return equal
    return f"{equal}: the prompt first differs within its tokens {usable + 1:,} to {kept:,}"


def _failed(error: grpc.aio.AioRpcError, timeout_s: float) -> Answer:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Answer(
            common_pb2.OUTCOME_MISS_TIMEOUT,
            f"the lease service did not answer within {timeout_s:g} s",
        )
    reason = rpc.reason_of(error)
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        log.error("claim refused", code=error.code().name, reason=reason, error=error.details())
    return Answer(
        common_pb2.OUTCOME_MISS_UNAVAILABLE,
        f"the lease service cannot answer: {error.details()}",
    )
