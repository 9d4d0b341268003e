"""The router's client of the lease service. A turn never fails because of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import structlog

from kvlease import rpc, times
from kvlease.router.circuit import Circuit
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc

END_TIMEOUT_S = 3.0
"""Deadline of EndConversation and Renew: above the store's own, so that its answer
arrives."""

LIST_TIMEOUT_S = 6.0
"""Deadline of ListConversations: the lease service's first answer waits for its copy."""

_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)

_CIRCUIT_THRESHOLD = 2
_CIRCUIT_PAUSE_S = 1.0

_log = structlog.get_logger("kvlease.router")


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """``number`` 0: the lease service could not be asked, for the reason ``failure``."""

    number: int = 0
    lease: lease_pb2.Lease | None = None
    failure: str = ""


class ServiceDown(Exception):
    """The lease service did not answer; the message says what to do."""


class Leases:
    """Calls to the lease service. ``clock`` is a monotonic clock in seconds."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Callable[[], float],
        *,
        start_turn_timeout_s: float,
        endpoint: str,
    ) -> None:
        self._stub = lease_pb2_grpc.LeaseServiceStub(channel)
        self._clock = clock
        self._timeout_s = start_turn_timeout_s
        self._endpoint = endpoint
        # A service that is down fails at once (the channel knows); one that hangs, or
        # whose store does, would cost every turn the whole timeout.
        self._circuit = Circuit(clock, threshold=_CIRCUIT_THRESHOLD, pause_s=_CIRCUIT_PAUSE_S)
        self._failing = False

    async def start_turn(
        self, conversation: common_pb2.Conversation, metadata: Mapping[str, str]
    ) -> StartedTurn:
        """Counts a turn and tells who holds the conversation. Never raises for the lease
        service's sake, and takes at most the configured timeout."""
        if not self._circuit.allows():
            return StartedTurn(failure="the lease service has not answered lately")
        request = lease_pb2.StartTurnRequest(conversation=conversation)
        began = self._clock()
        try:
            answer: lease_pb2.StartTurnResponse = await self._stub.StartTurn(
                request, timeout=self._timeout_s, metadata=tuple(metadata.items())
            )
        except grpc.aio.AioRpcError as error:
            return StartedTurn(failure=self._failed(error, self._clock() - began))
        except BaseException:
            self._circuit.succeeded()  # the client went away: nothing was learnt
            raise
        self._circuit.succeeded()
        if self._failing:
            self._failing = False
            _log.info("lease service answers again", endpoint=self._endpoint)
        return StartedTurn(answer.turn, answer.lease if answer.HasField("lease") else None)

    def _failed(self, error: grpc.aio.AioRpcError, seconds: float) -> str:
        # The service, too, gives up just before our deadline. What counts is the wait.
        if seconds > self._timeout_s / 2:
            self._circuit.failed()
        else:
            self._circuit.succeeded()
        detail = f"{error.code().name}: {error.details()}"
        if not self._failing:  # once, not once a turn
            self._failing = True
            _log.warning("lease service does not answer", endpoint=self._endpoint, detail=detail)
        return detail

    async def lease_of(
        self, conversation: common_pb2.Conversation, timeout_s: float
    ) -> lease_pb2.Lease | None:
        """The conversation's lease, or None. Raises :class:`ServiceDown`."""
        request = lease_pb2.GetLeaseRequest(conversation=conversation)
        try:
            lease: lease_pb2.Lease = await self._stub.GetLease(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise self._down(error) from None
        return lease

    async def renew(
        self,
        conversation: common_pb2.Conversation,
        retention_s: float,
        metadata: Mapping[str, str],
    ) -> lease_pb2.Lease | None:
        """Moves the end of the conversation's lease to ``retention_s`` from now; None if
        it has none. Raises :class:`ServiceDown`."""
        request = lease_pb2.RenewRequest(
            conversation=conversation, retention=times.duration(retention_s)
        )
        try:
            lease: lease_pb2.Lease = await self._stub.Renew(
                request, timeout=END_TIMEOUT_S, metadata=tuple(metadata.items())
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise self._down(error) from None
        return lease

    async def end(self, conversation: common_pb2.Conversation, metadata: Mapping[str, str]) -> bool:
        """Ends a conversation; whether a lease was ended by it. Raises
        :class:`ServiceDown`."""
        request = lease_pb2.EndConversationRequest(conversation=conversation)
        try:
            answer: lease_pb2.EndConversationResponse = await self._stub.EndConversation(
                request, timeout=END_TIMEOUT_S, metadata=tuple(metadata.items())
            )
        except grpc.aio.AioRpcError as error:
            raise self._down(error) from None
        return answer.lease_ended

    async def record(self, entries: Sequence[lease_pb2.RecordTurnsRequest.Entry]) -> None:
        """Has what became of turns kept. Raises :class:`ServiceDown` if a later try may
        have more luck."""
        request = lease_pb2.RecordTurnsRequest(entries=entries)
        try:
            await self._stub.RecordTurns(request, timeout=END_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _PASSING:
                raise self._down(error) from None
            # It will never take them (it may be of an older version): nothing to wait for.
            _log.error(
                "what became of turns was refused",
                turns=len(entries),
                code=error.code().name,
                detail=error.details(),
            )

    async def conversations(
        self, limit: int, id_contains: str
    ) -> lease_pb2.ListConversationsResponse:
        """The conversations, of all tenants, whose turns were recorded last. Raises
        :class:`ServiceDown`."""
        request = lease_pb2.ListConversationsRequest(page_size=limit, id_contains=id_contains)
        try:
            answer: lease_pb2.ListConversationsResponse = await self._stub.ListConversations(
                request, timeout=LIST_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise self._down(error) from None
        return answer

    def _down(self, error: grpc.aio.AioRpcError) -> ServiceDown:
        reason = rpc.reason_of(error)
        if reason == "STORE_UNAVAILABLE":
            return ServiceDown("The lease service cannot reach its store: try again when it can.")
        return ServiceDown(
            f"The lease service at {self._endpoint} did not answer "
            f"({error.code().name}): try again, or check that it runs."
        )
