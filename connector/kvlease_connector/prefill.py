"""The prefill engine's part of a turn: claim a lease, offer its blocks to the scheduler,
close the ticket, and keep the prompt's blocks until the decode engine has fetched them.

Everything in here runs in the scheduler's thread unless it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from kvlease import outcomes, telemetry
from kvlease.config import Settings
from kvlease.v1 import common_pb2, lease_pb2
from kvlease_connector.background import Background
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.claims import Answer, Ask, Claims

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Describe = Callable[[Any], "Ask | Answer"]
"""From a vLLM request with its local tokens to what to ask, or to why not to."""


@dataclass(slots=True)
class PullingTurn:
    """One request's way from the claim to the end of its read."""

    conversation: common_pb2.Conversation
    traceparent: str
    answer: Answer | None = None
    """The claim's answer, once it is there; a miss once nothing is to be read (any more)."""
    future: Future[Answer] | None = None
    give_up_at: float = 0.0
    read_tried: bool = False
    """Blocks were allocated and the worker was told to read."""
    read_over: bool = False
    request_over: bool = False
    read_started: float = 0.0
    num_pulled_tokens: int = 0
    span: trace.Span = field(default=trace.INVALID_SPAN)

    @property
    def outcome(self) -> common_pb2.Outcome.ValueType:
        return self.answer.outcome if self.answer else common_pb2.OUTCOME_OFF


class PrefillSide:
    """What the scheduler asks of a prefill engine's connector."""

    def __init__(
        self,
        claims: Claims,
        background: Background,
        tracer: trace.Tracer,
        settings: Settings,
        *,
        kv_bytes_per_token: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claims = claims
        self._background = background
        self._tracer = tracer
        self._settings = settings
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._turns: dict[str, PullingTurn] = {}

    def match(
        self,
        request_id: str,
        params: dict[str, Any],
        num_prompt_tokens: int,
        num_local_tokens: int,
        ask: Callable[[], Ask | Answer],
    ) -> int | None:
        """How many tokens beyond the local ones will be read; None: ask again on the next
        step. On a hit ``params`` are given what vLLM's worker needs to read.

        Offers nothing once a read was tried: vLLM asks again after a failed one, and
        would wait for ever for a second that it never starts.
        """
        turn = self._turns.get(request_id)
        if turn is None:
            turn = self._begin(request_id, params, ask())
        if turn.answer is None and not self._answered(turn):
            return None
        answer = turn.answer
        assert answer is not None
        if answer.outcome != common_pb2.OUTCOME_HIT or turn.read_tried:
            return 0
        count = min(answer.usable_tokens, num_prompt_tokens) - num_local_tokens
        if count < self._settings.min_pull_tokens:
            self._decline(
                turn,
                common_pb2.OUTCOME_MISS_SHORT,
                f"{count} tokens beyond the {num_local_tokens} in the local cache",
            )
            return 0
        if self._clock() + self._settings.pull_timeout >= answer.read_by:
            self._decline(
                turn,
                common_pb2.OUTCOME_MISS_EXPIRED,
                "the ticket runs out before a read could end safely",
            )
            return 0
        params.update(answer.params)
        return count

    def _begin(
        self, request_id: str, params: Mapping[str, Any], asked: Ask | Answer
    ) -> PullingTurn:
        told = params["kvlease"]
        turn = self._turns[request_id] = PullingTurn(
            conversation=asked.conversation
            if isinstance(asked, Ask)
            else common_pb2.Conversation(),
            traceparent=told.get("traceparent") or "",
        )
        if isinstance(asked, Answer):
            turn.answer = asked
            return turn
        turn.future = self._background.submit(self._claims.claim(asked), "claim")
        turn.give_up_at = (
            self._clock() + self._settings.claim_timeout + self._settings.connect_timeout
        )
        return turn

    def _answered(self, turn: PullingTurn) -> bool:
        """Whether the claim has come to an end, by its answer or by waiting too long."""
        assert turn.future is not None
        if turn.future.done():
            turn.answer = turn.future.result()
            return True
        if self._clock() < turn.give_up_at:
            return False
        conversation = turn.conversation
        turn.future.add_done_callback(lambda done: self._abandon_late(conversation, done.result()))
        turn.answer = Answer(common_pb2.OUTCOME_MISS_TIMEOUT, "the claim was not decided in time")
        return True

    def _abandon_late(self, conversation: common_pb2.Conversation, answer: Answer) -> None:
        """In the background thread: a hit that came too late."""
        if answer.outcome == common_pb2.OUTCOME_HIT:
            self._close(conversation, answer, lease_pb2.READ_RESULT_ABANDONED)

    def _decline(
        self, turn: PullingTurn, outcome: common_pb2.Outcome.ValueType, detail: str
    ) -> None:
        assert turn.answer is not None
        self._close(turn.conversation, turn.answer, lease_pb2.READ_RESULT_ABANDONED)
        turn.answer = Answer(outcome, detail)

    def _close(
        self,
        conversation: common_pb2.Conversation,
        answer: Answer,
        result: lease_pb2.ReadResult.ValueType,
    ) -> None:
        self._background.submit(self._claims.complete(conversation, answer, result), "complete")

    def allocated(self, request_id: str, num_external_tokens: int) -> float | None:
        """The scheduler has made room. Returns the moment by which a read that starts now
        must have ended, None if nothing is read."""
        turn = self._turns.get(request_id)
        if turn is None or turn.read_tried or turn.outcome != common_pb2.OUTCOME_HIT:
            return None
        answer = turn.answer
        assert answer is not None
        if num_external_tokens <= 0:
            self._decline(
                turn, common_pb2.OUTCOME_MISS_UNSUPPORTED, "the scheduler did not take the blocks"
            )
            return None
        turn.read_tried = True
        turn.read_started = self._clock()
        turn.num_pulled_tokens = num_external_tokens
        turn.span = self._tracer.start_span(
            "kv.pull",
            context=telemetry.extract({"traceparent": turn.traceparent}),
            kind=trace.SpanKind.CLIENT,
            attributes={
                "kvlease.conversation": turn.conversation.conversation_id,
                "kvlease.lease_id": answer.lease_id,
                "kvlease.source_engine": answer.holder.engine_id if answer.holder else "",
                "kvlease.tokens": num_external_tokens,
                "kvlease.bytes": num_external_tokens * self._kv_bytes_per_token,
                "kvlease.blocks": sum(len(g) for g in answer.params["remote_block_ids"]),
            },
        )
        return answer.read_by

    def received(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Reads have ended, ``failed`` ones without the blocks."""
        failures = set(failed)
        for request_id in finished:
            turn = self._turns.get(request_id)
            if turn is None or not turn.read_tried or turn.read_over:
                continue
            turn.read_over = True
            self._read_ended(turn, request_id in failures)
            if turn.request_over:
                del self._turns[request_id]

    def _read_ended(self, turn: PullingTurn, failed: bool) -> None:
        answer = turn.answer
        assert answer is not None
        seconds = self._clock() - turn.read_started
        turn.span.set_attributes({"kvlease.seconds": seconds, "kvlease.failed": failed})
        if failed:
            turn.span.set_status(trace.StatusCode.ERROR, "the read failed")
        turn.span.end()
        if failed:
            self._close(turn.conversation, answer, lease_pb2.READ_RESULT_FAILED)
            holder = answer.holder.engine_id if answer.holder else "the holder"
            turn.answer = Answer(common_pb2.OUTCOME_MISS_ENGINE, f"the read from {holder} failed")
            turn.num_pulled_tokens = 0
        else:
            self._close(turn.conversation, answer, lease_pb2.READ_RESULT_DONE)

    def finished(self, request_id: str, num_prompt_tokens: int) -> dict[str, Any]:
        """The request has ended, in whatever way. Returns what the router is told."""
        turn = self._turns.get(request_id)
        if turn is None:
            return _report(None, num_prompt_tokens)
        if turn.read_tried and not turn.read_over:
            # Aborted while its blocks were being read: the ticket stays open until the
            # worker reports that the read has ended (see received).
            turn.request_over = True
        else:
            del self._turns[request_id]
            self._leave(turn)
        return _report(turn, num_prompt_tokens)

    def _leave(self, turn: PullingTurn) -> None:
        """Closes the ticket of a request that ended before it read."""
        if turn.read_tried:
            return
        conversation = turn.conversation
        if turn.answer is None:
            assert turn.future is not None
            turn.future.add_done_callback(
                lambda done: self._abandon_late(conversation, done.result())
            )
        else:
            self._abandon_late(conversation, turn.answer)


def _report(turn: PullingTurn | None, num_prompt_tokens: int) -> dict[str, Any]:
    answer = turn.answer if turn else None
    return {
        "outcome": outcomes.word(turn.outcome if turn else common_pb2.OUTCOME_OFF),
        "reused_tokens": turn.num_pulled_tokens if turn else 0,
        "prompt_tokens": num_prompt_tokens,
        "detail": answer.detail if answer else "",
        "lease_traceparent": answer.lease_traceparent if answer else "",
    }


class Handoffs:
    """Prompts' blocks that wait for the decode engine to fetch them."""

    @dataclass(slots=True)
    class _Held:
        blocks: list[KVCacheBlock]
        reads_left: int
        free_at: float

    def __init__(self, holder: BlockHolder) -> None:
        self._holder = holder
        self._held: dict[str, Handoffs._Held] = {}
        self.retained_blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, num_blocks: list[int], *, reads: int, free_at: float) -> None:
        """Keeps a finished request's blocks until ``reads`` workers have read them, or
        until ``free_at``."""
        blocks = self._holder.hold(request_id, num_blocks)
        self._held[request_id] = self._Held(blocks, reads, free_at)
        self.retained_blocks += len(blocks)

    def read(self, counts: Mapping[str, int]) -> None:
        """Workers have read the blocks of these requests so many times."""
        for request_id, count in counts.items():
            held = self._held.get(request_id)
            if held is not None:
                held.reads_left -= count
                if held.reads_left <= 0:
                    self._free(request_id)

    def drain(self, now: float) -> None:
        """Frees what was not fetched in time."""
        for request_id in [key for key, held in self._held.items() if held.free_at <= now]:
            self._free(request_id)

    def expired_blocks(self, now: float) -> int:
        """Blocks that the next drain frees. Safe to call from another thread."""
        return sum(len(held.blocks) for held in list(self._held.values()) if held.free_at <= now)

    def expired(self, now: float) -> int:
        """Handoffs that the next drain ends. Safe to call from another thread."""
        return sum(1 for held in list(self._held.values()) if held.free_at <= now)

    def _free(self, request_id: str) -> None:
        held = self._held.pop(request_id)
        self.retained_blocks -= len(held.blocks)
        self._holder.release(held.blocks)
