"""What became of turns, told to the lease service: after the turn, in the background, and
never at a turn's expense."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from kvlease import outcomes, times
from kvlease.router.leases import ServiceDown
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.lease_pb2 import TurnEnd, TurnRecord

BATCH = 64
"""Turns in one call: what the lease service takes."""

PAUSE_S = 0.25
"""Turns that end within so long go together."""

RETRY_S = 2.0
"""After a call that failed. The turns wait."""

MAX_WAITING = 2048
"""Turns that wait while the lease service is away: about 1 MB. Then the oldest go."""

CLOSE_S = 1.0
"""A router that stops takes so long, at most, to tell the rest."""

Entry = lease_pb2.RecordTurnsRequest.Entry

_ENDS: dict[str, TurnEnd.ValueType] = {
    "ok": lease_pb2.TURN_END_OK,
    "client_error": lease_pb2.TURN_END_CLIENT_ERROR,
    "failed": lease_pb2.TURN_END_FAILED,
    "disconnected": lease_pb2.TURN_END_DISCONNECTED,
}

_log = structlog.get_logger("kvlease.router")


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that is over. ``outcome`` empty: it was not decided; ``end`` is the word that
    metrics use; ``start`` is in seconds since 1970, ``ttft_s`` None: no content was sent."""

    conversation: common_pb2.Conversation
    number: int
    start: float
    end: str
    trace_id: str
    outcome: str = ""
    detail: str = ""
    error: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    ttft_s: float | None = None
    prefill_engine_id: str = ""
    decode_engine_id: str = ""

    def entry(self) -> Entry:
        """As the lease service takes it."""
        record = TurnRecord(
            turn=self.number,
            start_time=times.timestamp(self.start),
            outcome=(
                outcomes.from_word(self.outcome) if self.outcome else common_pb2.OUTCOME_UNSPECIFIED
            ),
            detail=self.detail,
            end=_ENDS.get(self.end, lease_pb2.TURN_END_UNSPECIFIED),
            error=self.error,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            computed_tokens=max(0, self.prompt_tokens - self.reused_tokens),
            prefill_engine_id=self.prefill_engine_id,
            decode_engine_id=self.decode_engine_id,
            trace_id=self.trace_id,
        )
        if self.ttft_s is not None:
            record.ttft.CopyFrom(times.duration(self.ttft_s))
        return Entry(conversation=self.conversation, turn=record)


class TurnLog:
    """Turns that wait to be told. ``send`` raises
    :class:`~kvlease.router.leases.ServiceDown`; ``dropped`` is called with the number of
    turns that nobody will learn of."""

    def __init__(
        self,
        send: Callable[[Sequence[Entry]], Awaitable[None]],
        dropped: Callable[[int], None],
    ) -> None:
        self._send = send
        self._dropped = dropped
        self._waiting: deque[EndedTurn] = deque()
        self._added = asyncio.Event()

    def add(self, turn: EndedTurn) -> None:
        """Costs a turn nothing but this call."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._dropped(1)
        self._waiting.append(turn)
        self._added.set()

    async def run(self) -> None:
        """Tells them until cancelled."""
        failing = False
        while True:
            await self._added.wait()
            await asyncio.sleep(RETRY_S if failing else PAUSE_S)
            try:
                await self._flush()
            except ServiceDown as down:
                if not failing:  # once, not once a try
                    _log.warning("what became of turns waits to be recorded", detail=str(down))
                failing = True
                continue
            failing = False
            self._added.clear()

    async def close(self) -> None:
        """Tells the rest, once :meth:`run` has ended, if that is quick."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._flush()
        except (ServiceDown, TimeoutError):
            self._dropped(len(self._waiting))
            _log.warning("what became of turns was not recorded", turns=len(self._waiting))

    async def _flush(self) -> None:
        """A batch that fails waits at the front again, as far as there is room."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            try:
                await self._send([turn.entry() for turn in batch])
            except BaseException:
                room = max(0, MAX_WAITING - len(self._waiting))
                self._waiting.extendleft(reversed(batch[-room:] if room else []))
                self._dropped(max(0, len(batch) - room))
                raise
