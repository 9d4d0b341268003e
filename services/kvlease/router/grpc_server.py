"""The router's gRPC face: what it would do with a turn, and which routers there are."""

from __future__ import annotations

import time

import grpc

from kvlease import rpc
from kvlease.router import rules
from kvlease.router.engines import Engines
from kvlease.router.leases import Leases, ServiceDown
from kvlease.router.turn import DECODE, PREFILL
from kvlease.v1 import (
    common_pb2,
    lease_pb2,
    registry_pb2,
    registry_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

SERVICE_NAME = "kvlease.v1.Router"

CALL_TIMEOUT_S = 3.0
"""Deadline of calls to registry and lease service: above the store's own."""


class RouterService(router_pb2_grpc.RouterServicer):
    """Nothing here runs, counts or reserves anything."""

    def __init__(self, engines: Engines, leases: Leases, registry: grpc.aio.Channel) -> None:
        self._engines = engines
        self._leases = leases
        self._registry = registry_pb2_grpc.RegistryStub(registry)

    async def Plan(
        self, request: router_pb2.PlanRequest, context: rpc.Context
    ) -> router_pb2.PlanResponse:
        return await rpc.answer(context, self._plan(request))

    async def _plan(self, request: router_pb2.PlanRequest) -> router_pb2.PlanResponse:
        conversation = _conversation(request)
        if not self._engines.synced:
            raise rpc.Refused(
                grpc.StatusCode.UNAVAILABLE,
                "REGISTRY_UNAVAILABLE",
                self._engines.unready_reason(),
            )
        lease, foreseen = None, common_pb2.OUTCOME_OFF
        why = "the turn names no conversation"
        if conversation.conversation_id:
            lease, foreseen, why = await self._lease(conversation)
        affinity = f"{conversation.tenant}/{conversation.model}/{conversation.conversation_id}"
        prefill = rules.choose_prefill(self._engines.candidates(PREFILL, request.model), affinity)
        decode = rules.choose_decode(
            self._engines.candidates(DECODE, request.model), lease, affinity
        )
        if prefill.engine is None or decode.engine is None:
            missing = prefill if prefill.engine is None else decode
            raise rpc.Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "NO_ENGINE",
                f"{missing.reason}: start one for {request.model!r}, or ask for a model that "
                "ListEngines of the registry shows",
            )
        if lease is not None and foreseen == common_pb2.OUTCOME_UNSPECIFIED:
            foreseen, why = self._foresee(lease, prefill.engine)
        return router_pb2.PlanResponse(
            prefill=prefill.engine,
            decode=decode.engine,
            lease=lease,
            foreseen_outcome=foreseen,
            reason=f"prefill: {prefill.reason}. decode: {decode.reason}. reuse: {why}.",
        )

    async def _lease(
        self, conversation: common_pb2.Conversation
    ) -> tuple[lease_pb2.Lease | None, common_pb2.Outcome.ValueType, str]:
        """The lease, without what only engines read; the outcome as far as it is clear
        without one; and why."""
        try:
            lease = await self._leases.lease_of(conversation, CALL_TIMEOUT_S)
        except ServiceDown as down:
            return None, common_pb2.OUTCOME_MISS_UNAVAILABLE, str(down).rstrip(".")
        if lease is None:
            return None, common_pb2.OUTCOME_MISS_NO_LEASE, "the conversation has no lease"
        lease.ClearField("kv_transfer_params_json")
        lease.ClearField("proof")
        return lease, common_pb2.OUTCOME_UNSPECIFIED, ""

    def _foresee(
        self, lease: lease_pb2.Lease, prefill: registry_pb2.Engine
    ) -> tuple[common_pb2.Outcome.ValueType, str]:
        """What can be said of a claim without the prompt's tokens."""
        holder = lease.holder_engine_id
        held_by = {
            candidate.engine.incarnation: candidate
            for candidate in self._engines.candidates(DECODE, lease.conversation.model)
        }
        candidate = held_by.get(lease.holder_incarnation)
        if lease.state != lease_pb2.LEASE_STATE_HELD:
            reason = lease_pb2.EndReason.Name(lease.end_reason).removeprefix("END_REASON_")
            expired = lease.end_reason == lease_pb2.END_REASON_EXPIRED
            outcome = (
                common_pb2.OUTCOME_MISS_EXPIRED if expired else common_pb2.OUTCOME_MISS_NO_LEASE
            )
            return outcome, f"the lease has ended ({reason.lower()})"
        if lease.HasField("expire_time") and lease.expire_time.ToSeconds() < time.time():
            return common_pb2.OUTCOME_MISS_EXPIRED, "the lease has run out"
        if candidate is None or candidate.departed:
            return common_pb2.OUTCOME_MISS_ENGINE, f"{holder}, which held the blocks, is gone"
        if candidate.engine.state == registry_pb2.ENGINE_STATE_DRAINING:
            return common_pb2.OUTCOME_MISS_ENGINE, f"{holder}, which holds the blocks, is draining"
        if prefill.compatibility_hash != lease.compatibility_hash:
            return (
                common_pb2.OUTCOME_MISS_ENGINE,
                f"{prefill.engine_id} cannot read the blocks of {holder}: they are not alike",
            )
        return (
            common_pb2.OUTCOME_UNSPECIFIED,
            f"depends on the prompt; {holder} keeps {lease.num_tokens} tokens",
        )

    async def ListReplicas(
        self, request: router_pb2.ListReplicasRequest, context: rpc.Context
    ) -> router_pb2.ListReplicasResponse:
        return await rpc.answer(context, self._replicas())

    async def _replicas(self) -> router_pb2.ListReplicasResponse:
        try:
            answer: registry_pb2.ListRoutersResponse = await self._registry.ListRouters(
                registry_pb2.ListRoutersRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.Refused(
                grpc.StatusCode.UNAVAILABLE,
                rpc.reason_of(error) or "REGISTRY_UNAVAILABLE",
                f"the registry did not answer ({error.code().name}): try again, or check that "
                "it runs",
            ) from None
        return router_pb2.ListReplicasResponse(replicas=answer.replicas)


def _conversation(request: router_pb2.PlanRequest) -> common_pb2.Conversation:
    if not request.model:
        raise rpc.Refused(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_CONVERSATION", "model is missing: name one"
        )
    if request.conversation_id:
        try:
            rules.checked_conversation_id(request.conversation_id, "conversation_id")
        except rules.InvalidRequest as error:
            raise rpc.Refused(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_CONVERSATION", str(error)
            ) from None
    return common_pb2.Conversation(
        tenant=request.tenant or rules.DEFAULT_TENANT,
        model=request.model,
        conversation_id=request.conversation_id,
    )
