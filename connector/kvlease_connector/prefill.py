"""The prefill engine's part of a turn: claim a lease, offer its blocks to the scheduler if a
pull is worth it, close the ticket, and say what it cost.

Everything in here runs in the scheduler's thread unless it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from opentelemetry import trace

from kvlease import logs, outcomes, telemetry
from kvlease.config import Settings
from kvlease.v1 import common_pb2, lease_pb2
from kvlease_connector.background import Background
from kvlease_connector.claims import Answer, Ask, Claims
from kvlease_connector.prefill_meter import PrefillMeter, Spent
from kvlease_connector.pull_policy import PullPolicy, Verdict

log = structlog.get_logger("kvlease.connector.prefill")

Describe = Callable[[Any], "Ask | Answer"]
"""From a vLLM request with its local tokens to what to ask, or to why not to."""


@dataclass(slots=True)
class PullingTurn:
    """One request's way from the claim to the end of its read."""

    conversation: common_pb2.Conversation
    traceparent: str
    num_local_tokens: int = 0
    """Of the prompt, in the engine's own prefix cache when the verdict was given."""
    verdict: Verdict | None = None
    answer: Answer | None = None
    """The claim's answer, once it is there; a miss once nothing is to be read (any more)."""
    future: Future[Answer] | None = None
    give_up_at: float = 0.0
    read_tried: bool = False
    """Blocks were allocated and the worker was told to read."""
    read_over: bool = False
    request_over: bool = False
    read_started: float = 0.0
    pull_s: float = 0.0
    num_pulled_tokens: int = 0
    span: trace.Span = field(default=trace.INVALID_SPAN)
    watch: telemetry.Stopwatch = field(default_factory=telemetry.Stopwatch)
    """Of the span."""

    @property
    def outcome(self) -> common_pb2.Outcome.ValueType:
        return self.answer.outcome if self.answer else common_pb2.OUTCOME_OFF

    @property
    def source(self) -> tuple[str, str]:
        """Engine id and incarnation of the lease's holder."""
        holder = self.answer.holder if self.answer else None
        return (holder.engine_id, holder.incarnation) if holder else ("", "")


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
        self._clock = clock
        self.policy = PullPolicy(
            settings.pull_policy,
            min_pull_tokens=settings.min_pull_tokens,
            kv_bytes_per_token=kv_bytes_per_token,
        )
        self.meter = PrefillMeter(self.policy, clock)
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
        usable = min(answer.usable_tokens, num_prompt_tokens)
        if turn.verdict is None or turn.num_local_tokens != num_local_tokens:
            # The local cache has changed since the claim.
            turn.num_local_tokens = num_local_tokens
            turn.verdict = self.policy.decide(*turn.source, num_local_tokens, usable, self._clock())
        if not turn.verdict.pull:
            self._decline(turn, common_pb2.OUTCOME_MISS_SHORT, turn.verdict.detail)
            return 0
        if self._clock() + self._settings.pull_timeout >= answer.read_by:
            self._decline(
                turn,
                common_pb2.OUTCOME_MISS_EXPIRED,
                "the ticket runs out before a read could end safely",
            )
            return 0
        params.update(answer.params)
        return usable - num_local_tokens

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
        self.meter.follow(request_id)
        if isinstance(asked, Ask):
            asked = self._consider(turn, asked)
        if isinstance(asked, Answer):
            turn.answer = asked
            return turn
        turn.future = self._background.submit(self._claims.claim(asked), "claim")
        turn.give_up_at = (
            self._clock() + self._settings.claim_timeout + self._settings.connect_timeout
        )
        return turn

    def _consider(self, turn: PullingTurn, ask: Ask) -> Ask | Answer:
        """Before the claim: whether to make it, and how its answer is judged."""
        if self.policy.mode == "never":
            return Answer(common_pb2.OUTCOME_OFF, "pulls are turned off: pull_policy is never")
        num_local, num_prompt = ask.num_local_tokens, len(ask.token_ids)
        turn.num_local_tokens = num_local
        early = self.policy.before_claim(num_local, num_prompt, self._clock())
        if not early.pull:
            turn.verdict = early
            return Answer(common_pb2.OUTCOME_MISS_SHORT, early.detail)
        decide, clock = self.policy.decide, self._clock

        def judge(engine_id: str, incarnation: str, usable: int) -> Verdict:
            return decide(engine_id, incarnation, num_local, min(usable, num_prompt), clock())

        return replace(ask, judge=judge)

    def _answered(self, turn: PullingTurn) -> bool:
        """Whether the claim has come to an end, by its answer or by waiting too long."""
        assert turn.future is not None
        if turn.future.done():
            answer = turn.answer = turn.future.result()
            turn.verdict = answer.verdict
            if answer.claim_s > 0:
                self.policy.claimed(answer.claim_s, self._clock())
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
        self.policy.read_started(*turn.source, turn.verdict, turn.read_started)
        turn.watch = telemetry.Stopwatch()
        turn.span = self._tracer.start_span(
            "kv.pull",
            context=telemetry.extract({"traceparent": turn.traceparent}),
            kind=trace.SpanKind.CLIENT,
            start_time=turn.watch.start_ns,
            attributes={
                "kvlease.conversation": turn.conversation.conversation_id,
                "kvlease.lease_id": answer.lease_id,
                "kvlease.source_engine": turn.source[0],
                "kvlease.tokens": num_external_tokens,
                "kvlease.bytes": self.policy.bytes_of(num_external_tokens),
                "kvlease.blocks": sum(len(g) for g in answer.params["remote_block_ids"]),
                **(turn.verdict.attributes() if turn.verdict else {}),
            },
        )
        return answer.read_by

    def received(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Reads have ended, ``failed`` ones without the blocks."""
        self.meter.output()
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
            telemetry.fail(turn.span, f"the read from {turn.source[0] or 'the holder'} failed")
        turn.span.end(turn.watch.now_ns())
        if failed:
            self._close(turn.conversation, answer, lease_pb2.READ_RESULT_FAILED)
            holder = turn.source[0] or "the holder"
            ids = logs.turn_ids(turn.conversation.conversation_id, turn.traceparent)
            log.warning("a read failed", source=holder, seconds=round(seconds, 3), **ids)
            turn.answer = Answer(common_pb2.OUTCOME_MISS_ENGINE, f"the read from {holder} failed")
            turn.num_pulled_tokens = 0
            return
        self._close(turn.conversation, answer, lease_pb2.READ_RESULT_DONE)
        turn.pull_s = seconds
        at_least_s, at_most_s = self.meter.read_bounds(turn.read_started)
        self.policy.read_ended(
            *turn.source,
            turn.num_pulled_tokens,
            turn.verdict,
            at_least_s=at_least_s,
            at_most_s=at_most_s,
            now=self._clock(),
        )

    def finished(self, request_id: str, num_prompt_tokens: int) -> dict[str, Any]:
        """The request has ended, in whatever way. Returns what the router is told."""
        turn = self._turns.get(request_id)
        spent = self.meter.leave(request_id)
        if turn is None:
            return _report(PullingTurn(common_pb2.Conversation(), ""), num_prompt_tokens)
        if turn.read_tried and not turn.read_over:
            # Aborted while its blocks were being read: the ticket stays open until the
            # worker reports that the read has ended (see received).
            turn.request_over = True
        else:
            del self._turns[request_id]
            self._leave(turn)
        return {
            **_report(turn, num_prompt_tokens),
            **_costs(turn, spent, self.policy.bytes_of(turn.num_pulled_tokens)),
        }

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


def _report(turn: PullingTurn, num_prompt_tokens: int) -> dict[str, Any]:
    answer = turn.answer
    return {
        "outcome": outcomes.word(turn.outcome),
        "reused_tokens": turn.num_pulled_tokens,
        "prompt_tokens": num_prompt_tokens,
        "detail": answer.detail if answer else "",
        "lease_traceparent": answer.lease_traceparent if answer else "",
    }


def _costs(turn: PullingTurn, spent: Spent, num_bytes: int) -> dict[str, Any]:
    """What was expected, and what came of it; only what is known."""
    verdict = turn.verdict or Verdict(False)
    pulled = turn.pull_s > 0
    costs = {
        "claim_s": (turn.answer.claim_s or None) if turn.answer else None,
        "predicted_pull_s": verdict.predicted_pull_s,
        "predicted_compute_s": verdict.predicted_compute_s,
        "pull_s": turn.pull_s if pulled else None,
        "pull_bytes": num_bytes if pulled else None,
        "pull_source": turn.source[0] if pulled else None,
        "prefill_s": spent.seconds or None,
        "predicted_prefill_s": spent.predicted_s or None,
    }
    return {name: value for name, value in costs.items() if value is not None}
