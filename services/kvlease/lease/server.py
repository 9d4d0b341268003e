"""The lease service's gRPC face."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from opentelemetry import trace

from kvlease import outcomes, rpc, serving, telemetry
from kvlease.admission import Gate
from kvlease.lease import watches
from kvlease.lease.history import History
from kvlease.lease.knowledge import LeaseView
from kvlease.lease.service import LeaseOperations
from kvlease.mirror import FellBehind, Mirror
from kvlease.v1 import lease_pb2, lease_pb2_grpc
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import (
    ClaimResponse,
    CompleteResponse,
    ConversationInfo,
    EndConversationResponse,
    GrantResponse,
    Lease,
    ListLeasesResponse,
    RevokeResponse,
    StartTurnResponse,
    WatchLeasesResponse,
)

SERVICE = "kvlease.v1.LeaseService"

PLACES = 8
"""Calls that are worked on at once, besides those that a first token waits for: these pass.
Fewer would leave etcd's groups small, more make claims wait."""

LENT_S = 0.1
"""A call that takes longer waits for the store, not for this process: another may begin."""

_TRACE_HEADERS = ("traceparent", "tracestate")


class LeaseServer(lease_pb2_grpc.LeaseServiceServicer):
    """Implements ``kvlease.v1.LeaseService``; the promises stand in its proto file.

    ``tracer``: where a turn's start, claim and grant get a span; None: nowhere.
    """

    def __init__(
        self,
        operations: LeaseOperations,
        history: History,
        leases: Mirror[LeaseView],
        monitor: serving.StoreMonitor,
        tracer: trace.Tracer | None = None,
    ) -> None:
        self._operations = operations
        self._history = history
        self._leases = leases
        self._monitor = monitor
        self._tracer = tracer
        self._gate = Gate(PLACES, LENT_S)

    async def StartTurn(
        self, request: lease_pb2.StartTurnRequest, context: rpc.Context
    ) -> StartTurnResponse:
        with self._span("lease_service.start_turn", context, request.conversation) as span:
            answer = await self._answer(context, lambda: self._operations.start_turn(request))
            span.set_attribute("kvlease.turn", answer.turn)
            return answer

    async def Grant(self, request: lease_pb2.GrantRequest, context: rpc.Context) -> GrantResponse:
        with self._span("lease_service.grant", context, request.conversation) as span:
            answer = await self._in_turn(context, lambda: self._operations.grant(request))
            span.set_attribute("kvlease.lease_id", request.lease_id)
            span.set_attribute("kvlease.turn", answer.lease.turn)
            return answer

    async def Claim(self, request: lease_pb2.ClaimRequest, context: rpc.Context) -> ClaimResponse:
        with self._span("lease_service.claim", context, request.conversation) as span:
            answer = await self._answer(context, lambda: self._operations.claim(request))
            span.set_attribute("kvlease.outcome", outcomes.word(answer.outcome))
            span.set_attribute("kvlease.detail", answer.detail)
            return answer

    async def Complete(
        self, request: lease_pb2.CompleteRequest, context: rpc.Context
    ) -> CompleteResponse:
        return await self._in_turn(context, lambda: self._operations.complete(request))

    async def Renew(self, request: lease_pb2.RenewRequest, context: rpc.Context) -> Lease:
        return await self._in_turn(context, lambda: self._operations.renew(request))

    async def Revoke(
        self, request: lease_pb2.RevokeRequest, context: rpc.Context
    ) -> RevokeResponse:
        # A request may wait for these blocks; ends of other kinds come by the hundred.
        urgent = request.reason == lease_pb2.END_REASON_BUDGET
        answer = self._answer if urgent else self._in_turn
        return await answer(context, lambda: self._operations.revoke(request))

    async def EndConversation(
        self, request: lease_pb2.EndConversationRequest, context: rpc.Context
    ) -> EndConversationResponse:
        return await self._in_turn(context, lambda: self._operations.end_conversation(request))

    async def GetLease(self, request: lease_pb2.GetLeaseRequest, context: rpc.Context) -> Lease:
        return await self._in_turn(context, lambda: self._operations.get_lease(request))

    async def ListLeases(
        self, request: lease_pb2.ListLeasesRequest, context: rpc.Context
    ) -> ListLeasesResponse:
        return await self._in_turn(context, lambda: self._operations.list_leases(request))

    async def GetConversation(
        self, request: lease_pb2.GetConversationRequest, context: rpc.Context
    ) -> ConversationInfo:
        return await self._in_turn(context, lambda: self._conversation(request))

    async def _conversation(self, request: lease_pb2.GetConversationRequest) -> ConversationInfo:
        answer = ConversationInfo()
        answer.CopyFrom(await self._operations.get_conversation(request))
        answer.turns.extend(await self._history.turns(request.conversation))
        return answer

    async def RecordTurns(
        self, request: lease_pb2.RecordTurnsRequest, context: rpc.Context
    ) -> lease_pb2.RecordTurnsResponse:
        await self._in_turn(context, lambda: self._history.record(request))
        return lease_pb2.RecordTurnsResponse()

    async def ListConversations(
        self, request: lease_pb2.ListConversationsRequest, context: rpc.Context
    ) -> lease_pb2.ListConversationsResponse:
        return await self._in_turn(context, lambda: self._history.list(request))

    async def WatchLeases(
        self, request: lease_pb2.WatchLeasesRequest, context: rpc.Context
    ) -> AsyncIterator[WatchLeasesResponse]:
        await self._answer(context, self._leases.fence)
        events = watches.events(self._leases, request.holder_session_id)
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    yield event
            except FellBehind:
                await rpc.abort(context, *serving.FELL_BEHIND)

    async def _answer(
        self, context: rpc.Context, work: Callable[[], Awaitable[serving.Answer]]
    ) -> serving.Answer:
        return await serving.answer(self._monitor, context, work)

    async def _in_turn(
        self, context: rpc.Context, work: Callable[[], Awaitable[serving.Answer]]
    ) -> serving.Answer:
        """As :meth:`_answer`, for a call that no first token waits for."""

        async def admitted() -> serving.Answer:
            self._monitor.require_store()  # it may have gone while the call waited
            return await work()

        return await self._answer(context, lambda: self._gate.through(admitted))

    @contextlib.contextmanager
    def _span(
        self, name: str, context: rpc.Context, conversation: Conversation
    ) -> Iterator[trace.Span]:
        """A span under the caller's; none where it is not exported or has no parent."""
        headers = {}
        if self._tracer is not None:
            metadata = context.invocation_metadata() or ()
            headers = {key: str(value) for key, value in metadata if key in _TRACE_HEADERS}
        if self._tracer is None or "traceparent" not in headers:
            yield trace.INVALID_SPAN
            return
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "kvlease.tenant": conversation.tenant,
            "kvlease.conversation": conversation.conversation_id,
            "gen_ai.request.model": conversation.model,
        }
        parent, kind = telemetry.extract(headers), trace.SpanKind.SERVER

        def why(error: BaseException) -> str:
            """The status that the call was ended with says more than the exception."""
            return context.details() or telemetry.words_of(error)

        with telemetry.timed(self._tracer, name, parent, kind, attributes, why=why) as span:
            yield span
