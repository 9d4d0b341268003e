"""The lease service over real gRPC, on both stores."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from control_plane import (
    CALL_S,
    ControlPlane,
    claim_request,
    complete_request,
    conversation,
    grant_request,
    until,
)
from google.protobuf.duration_pb2 import Duration
from prometheus_client import REGISTRY

from kvlease import rpc
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.common_pb2 import Conversation, Outcome
from kvlease.v1.lease_pb2 import Lease

HIT = common_pb2.OUTCOME_HIT


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), rpc.reason_of(caught.value)


async def start_turn(plane: ControlPlane, talk: Conversation | None = None) -> Any:
    request = lease_pb2.StartTurnRequest(conversation=talk or conversation())
    return await plane.lease.StartTurn(request, timeout=CALL_S)


async def get_lease(plane: ControlPlane, talk: Conversation | None = None) -> Lease:
    request = lease_pb2.GetLeaseRequest(conversation=talk or conversation())
    lease: Lease = await plane.lease.GetLease(request, timeout=CALL_S)
    return lease


async def claim(plane: ControlPlane, replica: int = 0, **fields: Any) -> Any:
    return await plane.leases[replica].Claim(claim_request(**fields), timeout=CALL_S)


async def has_no_lease(plane: ControlPlane) -> bool:
    answer = await plane.lease.ListLeases(lease_pb2.ListLeasesRequest(), timeout=CALL_S)
    return not answer.leases


# A conversation's life


async def test_a_second_turn_reads_what_the_first_one_left(plane: ControlPlane) -> None:
    holder = await plane.register()
    first = await start_turn(plane)
    assert (first.turn, first.HasField("lease")) == (1, False)
    missed = await claim(plane)
    assert missed.outcome == common_pb2.OUTCOME_MISS_NO_LEASE

    request = grant_request(holder, turn=1, traceparent="00-1-2-01")
    granted = await plane.lease.Grant(request, timeout=CALL_S)
    assert granted.lease.lease_id == request.lease_id
    assert not granted.lease.HasField("proof")
    left = granted.retention.ToTimedelta().total_seconds()
    assert plane.settings.retention_ttl - 5 < left <= plane.settings.retention_ttl

    second = await start_turn(plane)
    assert second.turn == 2
    assert second.lease.holder_engine_id == "decode-0"
    assert second.lease.kv_transfer_params_json == ""

    answer = await claim(plane)
    assert answer.outcome == HIT
    assert (answer.proven_tokens, answer.tail_num_tokens) == (16, 20)
    assert answer.kv_transfer_params_json == request.kv_transfer_params_json
    assert answer.lease_traceparent == "00-1-2-01"
    assert answer.holder == holder
    assert (await get_lease(plane)).tickets[0] == answer.ticket

    await plane.lease.Complete(complete_request(answer), timeout=CALL_S)
    await plane.lease.Complete(complete_request(answer), timeout=CALL_S)  # idempotent
    lease = await get_lease(plane)
    assert not lease.tickets
    assert lease.claim_count == 1
    assert lease.state == lease_pb2.LEASE_STATE_HELD  # a read does not end it


async def test_a_claim_that_is_sent_twice_opens_one_ticket(plane: ControlPlane) -> None:
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    request = claim_request()
    first = await plane.lease.Claim(request, timeout=CALL_S)
    second = await plane.lease.Claim(request, timeout=CALL_S)
    assert first.ticket == second.ticket
    assert len((await get_lease(plane)).tickets) == 1


async def test_granting_supersedes_and_readers_keep_their_tickets(plane: ControlPlane) -> None:
    holder = await plane.register()
    old = grant_request(holder, turn=1)
    await plane.lease.Grant(old, timeout=CALL_S)
    reading = await claim(plane)
    other = await plane.register(engine_id="decode-1")
    await plane.lease.Grant(grant_request(other, turn=2), timeout=CALL_S)
    lease = await get_lease(plane)
    assert lease.holder_engine_id == "decode-1"
    (retiring,) = lease.retiring
    assert retiring.lease_id == old.lease_id
    assert list(retiring.tickets) == [reading.ticket]
    await plane.lease.Complete(complete_request(reading), timeout=CALL_S)
    assert not (await get_lease(plane)).retiring


async def test_an_ended_conversation_refuses_turns_from_before(plane: ControlPlane) -> None:
    holder = await plane.register()
    await start_turn(plane)
    await plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S)
    await start_turn(plane)  # runs while the client ends the conversation
    end = lease_pb2.EndConversationRequest(conversation=conversation())
    assert (await plane.lease.EndConversation(end, timeout=CALL_S)).lease_ended
    assert not (await plane.lease.EndConversation(end, timeout=CALL_S)).lease_ended
    assert await has_no_lease(plane)
    assert await failure(plane.lease.Grant(grant_request(holder, turn=2), timeout=CALL_S)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "CONVERSATION_ENDED",
    )
    assert (await claim(plane)).outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    third = await start_turn(plane)
    assert (third.turn, third.HasField("lease")) == (3, False)
    await plane.lease.Grant(grant_request(holder, turn=3), timeout=CALL_S)


async def test_a_stale_turn_is_refused(plane: ControlPlane) -> None:
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder, turn=5), timeout=CALL_S)
    assert await failure(plane.lease.Grant(grant_request(holder, turn=4), timeout=CALL_S)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_TURN",
    )


async def test_a_grant_that_is_sent_twice_is_stored_once(plane: ControlPlane) -> None:
    holder = await plane.register()
    request = grant_request(holder)
    first = await plane.lease.Grant(request, timeout=CALL_S)
    second = await plane.lease.Grant(request, timeout=CALL_S)
    assert first.lease == second.lease


async def test_only_the_registered_start_of_an_engine_may_grant(plane: ControlPlane) -> None:
    holder = await plane.register()
    refused = (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_LOST")
    for field in ("incarnation", "session_id", "engine_id"):
        fields: dict[str, Any] = {field: "another"}
        request = grant_request(holder, **fields)
        assert await failure(plane.lease.Grant(request, timeout=CALL_S)) == refused
    router_session = await plane.store().open_session(60)
    request = grant_request(holder, session_id=router_session)
    assert await failure(plane.lease.Grant(request, timeout=CALL_S)) == refused


async def test_every_replica_answers_for_every_lease(start_plane: Any) -> None:
    plane = await start_plane(leases=2)
    holder = await plane.register()
    one, other = plane.leases
    talk = conversation()
    for turn in range(1, 6):
        started = await other.StartTurn(
            lease_pb2.StartTurnRequest(conversation=talk), timeout=CALL_S
        )
        assert started.turn == turn
        assert (started.lease.turn if started.HasField("lease") else 0) == turn - 1
        await one.Grant(grant_request(holder, turn=turn), timeout=CALL_S)
        answer = await other.Claim(claim_request(), timeout=CALL_S)
        assert answer.outcome == HIT
        await one.Complete(complete_request(answer), timeout=CALL_S)
    lease = await get_lease(plane)
    assert (lease.turn, len(lease.tickets), len(lease.retiring)) == (5, 0, 0)


# Many at once


async def test_two_replicas_give_200_simultaneous_claims_a_ticket_each(start_plane: Any) -> None:
    # a session that outlives the test on any machine: nothing keeps it alive here
    plane = await start_plane(leases=2, max_readers=400, session_ttl=120, retention_ttl=480)
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    answers = await asyncio.gather(
        *(
            stub.Claim(claim_request(ticket_id=f"t{number}-{replica}"), timeout=30)
            for number in range(100)
            for replica, stub in enumerate(plane.leases)
        )
    )
    assert {Outcome.Name(answer.outcome) for answer in answers} == {"OUTCOME_HIT"}
    lease = await get_lease(plane)
    given = {answer.ticket.ticket_id for answer in answers}
    assert len(given) == 200
    assert {ticket.ticket_id for ticket in lease.tickets} == given
    assert lease.claim_count == 200
    await asyncio.gather(
        *(
            plane.leases[number % 2].Complete(complete_request(answer), timeout=30)
            for number, answer in enumerate(answers)
        )
    )
    assert not (await get_lease(plane)).tickets


async def test_the_reader_limit_holds_across_replicas(start_plane: Any) -> None:
    plane = await start_plane(leases=2, max_readers=7)
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    answers = await asyncio.gather(*(claim(plane, number % 2) for number in range(40)))
    outcomes = [answer.outcome for answer in answers]
    assert outcomes.count(HIT) == 7
    assert outcomes.count(common_pb2.OUTCOME_MISS_BUSY) == 33


async def test_turns_started_at_once_have_numbers_of_their_own(start_plane: Any) -> None:
    plane = await start_plane(leases=2)
    request = lease_pb2.StartTurnRequest(conversation=conversation())
    answers = await asyncio.gather(
        *(plane.leases[number % 2].StartTurn(request, timeout=CALL_S) for number in range(40))
    )
    assert sorted(answer.turn for answer in answers) == list(range(1, 41))


async def test_grants_claims_and_ends_at_once_leave_records_that_agree(start_plane: Any) -> None:
    plane = await start_plane(leases=2)
    holder = await plane.register()
    end = lease_pb2.EndConversationRequest(conversation=conversation())

    async def one_turn(number: int) -> None:
        stub = plane.leases[number % 2]
        request = lease_pb2.StartTurnRequest(conversation=conversation())
        turn = (await stub.StartTurn(request, timeout=CALL_S)).turn
        answer = await stub.Claim(claim_request(), timeout=CALL_S)
        if number % 7 == 0:
            await stub.EndConversation(end, timeout=CALL_S)
        try:
            await stub.Grant(grant_request(holder, turn=turn), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if rpc.reason_of(error) not in ("STALE_TURN", "CONVERSATION_ENDED"):
                raise
        if answer.outcome == HIT:
            await stub.Complete(complete_request(answer), timeout=CALL_S)

    async def several_turns(worker: int) -> None:
        for turn in range(6):
            await one_turn(worker + turn)

    await asyncio.gather(*(several_turns(worker) for worker in range(6)))
    info = await plane.lease.GetConversation(
        lease_pb2.GetConversationRequest(conversation=conversation()), timeout=CALL_S
    )
    assert info.turn == 36
    if await has_no_lease(plane):
        assert info.last_end_reason or not info.last_lease_id
    else:
        lease = await get_lease(plane)
        assert lease.lease_id == info.last_lease_id
        assert not lease.tickets
        assert not lease.retiring


# Renewal, revocation, expiry


async def test_a_renewal_moves_the_end(plane: ControlPlane) -> None:
    holder = await plane.register()
    granted = await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    request = lease_pb2.RenewRequest(conversation=conversation(), retention=Duration(seconds=900))
    renewed = await plane.lease.Renew(request, timeout=CALL_S)
    moved = renewed.expire_time.ToSeconds() - granted.lease.expire_time.ToSeconds()
    assert 415 <= moved <= 425
    assert (await get_lease(plane)).expire_time == renewed.expire_time
    unknown = lease_pb2.RenewRequest(
        conversation=conversation("unknown"), retention=Duration(seconds=900)
    )
    assert await failure(plane.lease.Renew(unknown, timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "LEASE_NOT_FOUND",
    )


async def test_a_revoked_lease_opens_no_ticket_and_tells_those_that_are_open(
    plane: ControlPlane,
) -> None:
    holder = await plane.register()
    granted = grant_request(holder)
    await plane.lease.Grant(granted, timeout=CALL_S)
    reading = await claim(plane)
    revoke = lease_pb2.RevokeRequest(
        conversation=conversation(),
        lease_id=granted.lease_id,
        session_id=holder.session_id,
        reason=lease_pb2.END_REASON_BUDGET,
    )
    answer = await plane.lease.Revoke(revoke, timeout=CALL_S)
    assert list(answer.open_tickets) == [reading.ticket]
    assert (await claim(plane)).outcome == common_pb2.OUTCOME_MISS_EXPIRED
    assert (await get_lease(plane)).state == lease_pb2.LEASE_STATE_ENDING
    await plane.lease.Complete(complete_request(reading), timeout=CALL_S)
    await until(lambda: has_no_lease(plane))
    again = await plane.lease.Revoke(revoke, timeout=CALL_S)
    assert not again.open_tickets
    assert (await claim(plane)).outcome == common_pb2.OUTCOME_MISS_EXPIRED


async def test_a_reader_that_vanishes_does_not_keep_an_ended_lease(start_plane: Any) -> None:
    plane = await start_plane(claim_grace=1.2, claim_margin=0.1, clock_tolerance=0.1)
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    await claim(plane)
    end = lease_pb2.EndConversationRequest(conversation=conversation())
    await plane.lease.EndConversation(end, timeout=CALL_S)
    assert not await has_no_lease(plane)
    await until(lambda: has_no_lease(plane))


async def test_a_lease_that_its_holder_forgets_is_ended(start_plane: Any) -> None:
    plane = await start_plane(
        claim_grace=0.5,
        claim_margin=0.1,
        clock_tolerance=0.1,
        retention_ttl=2.0,
        session_ttl=2,
        leases=2,
    )
    holder = await plane.register()

    async def stay() -> None:
        request = registry_pb2.KeepAliveRequest(
            session_id=holder.session_id,
            role=holder.role,
            engine_id=holder.engine_id,
            incarnation=holder.incarnation,
        )
        while True:
            await plane.registry.KeepAlive(request, timeout=CALL_S)
            await asyncio.sleep(0.4)

    alive = asyncio.create_task(stay())
    try:
        await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
        await until(lambda: has_no_lease(plane))
        assert (await claim(plane)).outcome == common_pb2.OUTCOME_MISS_EXPIRED
    finally:
        alive.cancel()


# What is asked for


async def test_leases_are_listed_with_filters_and_pages(plane: ControlPlane) -> None:
    holders = [await plane.register(engine_id=f"decode-{number}") for number in range(2)]
    for tenant in ("acme", "acme-2", "b/c"):
        for number in range(3):
            talk = conversation(f"c{number}", tenant)
            request = grant_request(holders[number % 2], talk)
            await plane.lease.Grant(request, timeout=CALL_S)

    async def listed(**fields: Any) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        token = ""
        while True:
            request = lease_pb2.ListLeasesRequest(page_size=2, page_token=token, **fields)
            answer = await plane.lease.ListLeases(request, timeout=CALL_S)
            assert len(answer.leases) <= 2
            for lease in answer.leases:
                assert not lease.HasField("proof")
                found.append((lease.conversation.tenant, lease.conversation.conversation_id))
            token = answer.next_page_token
            if not token:
                return found

    assert len(await listed()) == 9
    assert await listed(tenant="acme") == [("acme", f"c{number}") for number in range(3)]
    assert await listed(tenant="b/c", model="qwen", holder_engine_id="decode-1") == [("b/c", "c1")]
    assert await listed(tenant="acme", model="other") == []
    assert await failure(
        plane.lease.ListLeases(lease_pb2.ListLeasesRequest(model="qwen"), timeout=CALL_S)
    ) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FILTER")
    assert await failure(
        plane.lease.ListLeases(lease_pb2.ListLeasesRequest(page_token="?"), timeout=CALL_S)
    ) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PAGE_TOKEN")


async def test_what_is_remembered_of_a_conversation_can_be_read(plane: ControlPlane) -> None:
    request = lease_pb2.GetConversationRequest(conversation=conversation())
    assert await failure(plane.lease.GetConversation(request, timeout=CALL_S)) == (
        grpc.StatusCode.NOT_FOUND,
        "CONVERSATION_NOT_FOUND",
    )
    holder = await plane.register()
    await start_turn(plane)
    granted = grant_request(holder, turn=1)
    await plane.lease.Grant(granted, timeout=CALL_S)
    info = await plane.lease.GetConversation(request, timeout=CALL_S)
    assert (info.turn, info.last_grant_turn, info.last_lease_id) == (1, 1, granted.lease_id)
    assert info.last_holder_engine_id == "decode-0"


@pytest.mark.parametrize(
    ("method", "request_", "reason", "word"),
    [
        ("StartTurn", lease_pb2.StartTurnRequest(), "INVALID_CONVERSATION", "conversation.tenant"),
        (
            "StartTurn",
            lease_pb2.StartTurnRequest(conversation=conversation("é" * 257)),
            "INVALID_CONVERSATION",
            "conversation.conversation_id has 514 bytes",
        ),
        (
            "EndConversation",
            lease_pb2.EndConversationRequest(),
            "INVALID_CONVERSATION",
            "conversation.tenant",
        ),
        (
            "Claim",
            claim_request(ticket_id=""),
            "INVALID_CLAIM",
            "ticket_id is empty",
        ),
        (
            "Claim",
            claim_request(num_prompt_tokens=99),
            "INVALID_CLAIM",
            "takes 12 digests of 16 bytes",
        ),
        (
            "Claim",
            claim_request(proof=lease_pb2.PrefixProof()),
            "INVALID_CLAIM",
            "proof.chunk_tokens is 0",
        ),
        (
            "Claim",
            claim_request(
                num_prompt_tokens=5,
                proof=lease_pb2.PrefixProof(chunk_tokens=8, tail_digest=b"x" * 16),
            ),
            "INVALID_CLAIM",
            "proof.tail_digest is set",
        ),
        (
            "Complete",
            lease_pb2.CompleteRequest(conversation=conversation()),
            "INVALID_TICKET",
            "lease_id is empty",
        ),
        (
            "Complete",
            lease_pb2.CompleteRequest(
                conversation=conversation(),
                lease_id="l",
                ticket_id="t",
                result=77,  # type: ignore[arg-type]
            ),
            "INVALID_TICKET",
            "READ_RESULT_DONE, READ_RESULT_FAILED or READ_RESULT_ABANDONED",
        ),
        (
            "Renew",
            lease_pb2.RenewRequest(conversation=conversation()),
            "INVALID_RETENTION",
            "give more than 0",
        ),
        (
            "Revoke",
            lease_pb2.RevokeRequest(
                conversation=conversation(),
                lease_id="l",
                session_id="s",
                reason=lease_pb2.END_REASON_SUPERSEDED,
            ),
            "INVALID_LEASE",
            "END_REASON_BUDGET",
        ),
    ],
)
async def test_a_wrong_request_is_refused_with_the_field_to_mend(
    plane: ControlPlane, method: str, request_: Any, reason: str, word: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(plane.lease, method)(request_, timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.reason_of(caught.value) == reason
    assert word in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"lease_id": ""}, "lease_id is empty"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 3}, "a multiple of block_size (3)"),
        ({"num_tokens": 24}, "takes 3 digests"),
        ({"num_tokens": 16}, "proof.tail_digest has 16 bytes"),
        ({"kv_transfer_params_json": ""}, "kv_transfer_params_json"),
        ({"kv_transfer_params_json": "{" + " " * 1_100_000 + "}"}, "at most 1000000"),
        ({"retention": Duration()}, "give more than 0"),
    ],
)
async def test_a_wrong_grant_is_refused_with_the_field_to_mend(
    plane: ControlPlane, fields: dict[str, Any], word: str
) -> None:
    holder = await plane.register()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plane.lease.Grant(grant_request(holder, **fields), timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.reason_of(caught.value) == "INVALID_LEASE"
    assert word in (caught.value.details() or "")


async def test_a_lease_of_a_million_tokens_fits(plane: ControlPlane) -> None:
    holder = await plane.register()
    blocks = ",".join(str(100_000 + number) for number in range(62_500))
    request = grant_request(
        holder,
        tokens=range(1_000_000),
        chunk=256,
        block_size=16,
        kv_transfer_params_json=f'{{"remote_block_ids": [[{blocks}]]}}',
    )
    await plane.lease.Grant(request, timeout=CALL_S)
    answer = await claim(plane, tokens=range(1_000_100), chunk=256)
    assert answer.outcome == HIT
    assert answer.tail_num_tokens == 1_000_000


async def test_claims_and_ends_are_counted(plane: ControlPlane) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    def counts() -> list[float]:
        return [
            value("kvlease_leases_granted_total"),
            value("kvlease_claim_seconds_count", outcome="hit"),
            value("kvlease_claim_seconds_count", outcome="miss_no_lease"),
            value("kvlease_leases_ended_total", reason="superseded"),
            value("kvlease_leases_ended_total", reason="conversation_ended"),
            value("kvlease_grants_refused_total", reason="STALE_TURN"),
        ]

    holder = await plane.register()
    before = counts()
    await claim(plane)
    await plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S)
    await plane.lease.Grant(grant_request(holder, turn=2), timeout=CALL_S)
    await failure(plane.lease.Grant(grant_request(holder, turn=1), timeout=CALL_S))
    await claim(plane)
    await until(lambda: value("kvlease_leases", model="qwen", state="held") == 1)
    end = lease_pb2.EndConversationRequest(conversation=conversation())
    await plane.lease.EndConversation(end, timeout=CALL_S)
    after = [now - then for now, then in zip(counts(), before, strict=True)]
    assert after == [2, 1, 1, 1, 1, 1]


async def test_a_claim_takes_milliseconds(plane: ControlPlane) -> None:
    holder = await plane.register()
    await plane.lease.Grant(grant_request(holder), timeout=CALL_S)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        answer = await claim(plane)
        times.append(time.perf_counter() - started)
        await plane.lease.Complete(complete_request(answer), timeout=CALL_S)
    assert sorted(times)[25] < plane.settings.claim_timeout
