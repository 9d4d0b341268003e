"""Grants, supersession and ends: the rules, without any I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from lease_builders import (
    CONVERSATION,
    LIMITS,
    NOW,
    grant_request,
    granted,
    ids,
    revoke_request,
    ticket,
    with_tickets,
)

from kvlease import times
from kvlease.lease import rules
from kvlease.lease.rules import MAX_RETIRING, State
from kvlease.rpc import Refused
from kvlease.v1 import lease_pb2
from kvlease.v1.lease_pb2 import ConversationInfo, Lease


def grant(state: State, now: float = NOW, **fields: Any) -> tuple[State, Lease]:
    return rules.grant(state, grant_request(**fields), LIMITS, now)


def refusal_of(state: State, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        grant(state, **fields)
    return caught.value


# First grants


def test_a_grant_holds_the_blocks_for_the_retention_ttl() -> None:
    state, lease = grant(State(), NOW, turn=3)
    assert state.lease is lease
    assert lease.state == lease_pb2.LEASE_STATE_HELD
    assert times.moment(lease.grant_time) == NOW
    assert times.moment(lease.expire_time) == NOW + LIMITS.retention_ttl_s
    assert lease.chunk_tokens == lease.proof.chunk_tokens
    assert (lease.holder_engine_id, lease.holder_incarnation) == ("decode-0", "i1")
    assert lease.turn == 3


def test_transfer_parameters_are_kept_to_the_letter() -> None:
    text = '{ "remote_block_ids":[[1]],  "new_in_0.40": {"x": 1e0} }'
    _, lease = grant(State(), kv_transfer_params_json=text)
    assert lease.kv_transfer_params_json == text


def test_a_grant_is_remembered_beyond_its_lease() -> None:
    state, _ = grant(State(), turn=3)
    info = state.info
    assert info is not None
    assert info.conversation == CONVERSATION
    assert (info.last_lease_id, info.last_grant_turn, info.turn) == ("lease-1", 3, 3)
    assert (info.last_holder_engine_id, info.last_holder_incarnation) == ("decode-0", "i1")
    assert info.last_end_reason == lease_pb2.END_REASON_UNSPECIFIED


@pytest.mark.parametrize(("asked", "got"), [(60.0, 60.0), (3600.0, 3600.0), (7200.0, 3600.0)])
def test_a_holder_may_ask_for_a_retention_up_to_the_limit(asked: float, got: float) -> None:
    _, lease = grant(State(), retention=times.duration(asked))
    assert times.moment(lease.expire_time) == NOW + got


def test_granting_the_same_lease_again_is_answered_with_the_stored_one() -> None:
    state, first = grant(State())
    again, lease = grant(state, NOW + 100)
    assert lease is first
    assert (again.lease, again.info) == (state.lease, state.info)
    assert again.lease is state.lease  # nothing is written


def test_a_turn_of_unknown_number_counts_as_the_last_one_known() -> None:
    info = ConversationInfo(conversation=CONVERSATION, turn=7)
    state, lease = grant(State(None, info), turn=0)
    assert lease.turn == 7
    assert state.info is not None
    assert state.info.turn == 7


def test_a_grant_does_not_change_the_records_it_was_given() -> None:
    state, _ = grant(State(), turn=1)
    assert state.lease is not None
    assert state.info is not None
    before = (state.lease.SerializeToString(), state.info.SerializeToString())
    grant(state, turn=2, lease_id="lease-2")
    assert (state.lease.SerializeToString(), state.info.SerializeToString()) == before


# Supersession


def test_a_lease_says_which_one_it_replaced() -> None:
    state, first = grant(State())
    assert first.superseded_lease_id == ""
    state, second = grant(state, turn=2, lease_id="lease-2")
    assert second.superseded_lease_id == "lease-1"
    state, _ = rules.revoke(state, revoke_request(lease_id="lease-2"), LIMITS, NOW)
    _, third = grant(state, turn=3, lease_id="lease-3")
    assert third.superseded_lease_id == ""


def test_a_later_turn_supersedes_and_leaves_nothing_when_nobody_reads() -> None:
    _, lease = grant(granted(), turn=2, lease_id="lease-2")
    assert lease.lease_id == "lease-2"
    assert not lease.retiring


def test_a_superseded_lease_keeps_its_open_tickets() -> None:
    state = granted()
    state = State(
        with_tickets(state.lease, ticket("open"), ticket("over", NOW - 1)),
        state.info,
    )
    _, lease = grant(state, turn=2, lease_id="lease-2", session_id="s2", engine_id="decode-1")
    (old,) = lease.retiring
    assert ids(old.tickets) == ["open"]
    assert (old.lease_id, old.holder_session_id, old.holder_engine_id) == (
        "lease-1",
        "s1",
        "decode-0",
    )
    assert old.end_reason == lease_pb2.END_REASON_SUPERSEDED
    assert not lease.tickets


def test_tickets_survive_any_number_of_supersessions() -> None:
    state = granted()
    for turn in range(2, 6):
        lease = with_tickets(state.lease, ticket(f"reader-{turn - 1}"))
        state, _ = grant(State(lease, state.info), turn=turn, lease_id=f"lease-{turn}")
    assert state.lease is not None
    assert [ids(old.tickets) for old in state.lease.retiring] == [
        ["reader-1"],
        ["reader-2"],
        ["reader-3"],
        ["reader-4"],
    ]


def test_a_lease_that_was_ending_is_superseded_with_its_own_reason() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("open")), state.info)
    state, _ = rules.revoke(state, revoke_request(), LIMITS, NOW)
    _, lease = grant(state, turn=2, lease_id="lease-2")
    (old,) = lease.retiring
    assert old.end_reason == lease_pb2.END_REASON_BUDGET


def test_a_grant_is_refused_rather_than_a_readers_ticket_forgotten() -> None:
    state = granted()
    lease = with_tickets(state.lease, ticket("open"))
    for number in range(MAX_RETIRING):
        lease.retiring.add(lease_id=f"old-{number}", tickets=[ticket(f"reader-{number}")])
    refused = refusal_of(State(lease, state.info), turn=2, lease_id="lease-2")
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.reason == "TOO_MANY_READERS"


# Refusals


def test_a_turn_before_the_granted_one_is_stale() -> None:
    refused = refusal_of(granted(turn=5), turn=4, lease_id="lease-2")
    assert (refused.code, refused.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_TURN",
    )


def test_a_turn_stays_stale_after_the_later_ones_lease_has_ended() -> None:
    state, _ = rules.revoke(granted(turn=5), revoke_request(), LIMITS, NOW)
    assert state.lease is None
    assert refusal_of(state, turn=4, lease_id="lease-2").reason == "STALE_TURN"


def test_the_same_turn_may_be_granted_twice_by_a_second_try() -> None:
    _, lease = grant(granted(turn=5), turn=5, lease_id="lease-2")
    assert lease.lease_id == "lease-2"


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("info_lost", [True, False])
def test_a_late_retry_of_a_superseded_grant_is_refused(
    turn: int, read: bool, info_lost: bool
) -> None:
    state = granted(turn=turn)
    lease = with_tickets(state.lease, ticket("open")) if read else state.lease
    state, _ = grant(State(lease, state.info), turn=turn, lease_id="lease-2")
    if info_lost and not read:
        return  # then nobody remembers
    state = State(state.lease, None if info_lost else state.info)
    for _ in range(3):
        assert refusal_of(state, turn=turn, lease_id="lease-1").reason == "LEASE_ENDED"


def test_a_turn_that_started_before_the_end_is_refused_and_one_after_is_not() -> None:
    state = State(None, ConversationInfo(conversation=CONVERSATION, turn=4))
    state, _ = rules.end_conversation(state, CONVERSATION, LIMITS, NOW)
    for turn in (1, 4):
        refused = refusal_of(state, turn=turn)
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "CONVERSATION_ENDED",
        )
    _, lease = grant(state, turn=5)
    assert lease.turn == 5


def test_a_turn_of_unknown_number_is_never_stale() -> None:
    state, _ = rules.end_conversation(granted(turn=4), CONVERSATION, LIMITS, NOW)
    _, lease = grant(state, turn=0, lease_id="lease-2")
    assert lease.lease_id == "lease-2"


def test_a_retry_does_not_bring_back_a_lease_that_has_ended() -> None:
    state, _ = rules.revoke(granted(turn=0), revoke_request(), LIMITS, NOW)
    for _ in range(3):
        assert refusal_of(state, turn=0).reason == "LEASE_ENDED"


def test_a_retry_does_not_bring_back_a_lease_that_ended_before_others_did() -> None:
    state, _ = rules.revoke(granted(turn=0), revoke_request(), LIMITS, NOW)
    for number in range(2, rules.MAX_ENDED + 1):
        state, _ = grant(state, turn=0, lease_id=f"lease-{number}")
    assert refusal_of(state, turn=0).reason == "LEASE_ENDED"
    assert state.info is not None
    assert len(state.info.ended_lease_ids) <= rules.MAX_ENDED


def test_a_grant_that_comes_after_its_revocation_is_refused() -> None:
    # given a holder that has given a grant up, and revoked it, before it was stored
    state, tickets = rules.revoke(State(), revoke_request(), LIMITS, NOW)
    assert (state.lease, tickets) == (None, [])
    # then it is refused when it comes, whatever was granted meanwhile
    assert refusal_of(state, turn=1).reason == "LEASE_ENDED"
    state, _ = grant(state, turn=0, lease_id="lease-2")
    assert refusal_of(state, turn=0).reason == "LEASE_ENDED"


def test_a_lease_lost_with_its_session_may_be_granted_anew() -> None:
    state = granted(turn=2)
    _, lease = grant(State(None, state.info), turn=2, session_id="s2")
    assert lease.holder_session_id == "s2"


# Turns


def test_every_start_counts() -> None:
    info = rules.start_turn(None, CONVERSATION, NOW)
    info = rules.start_turn(info, CONVERSATION, NOW + 1)
    assert info.turn == 2
    assert times.moment(info.last_turn_time) == NOW + 1
    assert info.conversation == CONVERSATION


# Renewal


def test_a_renewal_counts_from_now_and_is_cut_to_the_limit() -> None:
    state = granted()
    renewed = rules.renew(state.lease, 600, LIMITS, NOW + 100)
    assert times.moment(renewed.expire_time) == NOW + 700
    shorter = rules.renew(state.lease, 5, LIMITS, NOW + 100)
    assert times.moment(shorter.expire_time) == NOW + 105
    longest = rules.renew(state.lease, 1e6, LIMITS, NOW)
    assert times.moment(longest.expire_time) == NOW + LIMITS.max_retention_s


@pytest.mark.parametrize("case", ["never granted", "expired", "ending"])
def test_a_lease_that_has_ended_is_not_brought_back(case: str) -> None:
    state = granted()
    lease = state.lease
    now = NOW
    if case == "never granted":
        lease = None
    elif case == "expired":
        now = NOW + LIMITS.retention_ttl_s
    else:
        held = State(with_tickets(lease, ticket("open")), state.info)
        lease = rules.revoke(held, revoke_request(), LIMITS, NOW)[0].lease
        assert lease is not None
    with pytest.raises(Refused) as caught:
        rules.renew(lease, 60, LIMITS, now)
    assert (caught.value.code, caught.value.reason) == (
        grpc.StatusCode.NOT_FOUND,
        "LEASE_NOT_FOUND",
    )


# Revocation


def test_a_revoked_lease_without_readers_is_gone_and_its_reason_remembered() -> None:
    state, tickets = rules.revoke(granted(), revoke_request(), LIMITS, NOW)
    assert state.lease is None
    assert tickets == []
    assert state.info is not None
    assert state.info.last_end_reason == lease_pb2.END_REASON_BUDGET


def test_a_revoked_lease_with_readers_ends_with_the_last_of_them() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a"), ticket("b")), state.info)
    state, tickets = rules.revoke(state, revoke_request(), LIMITS, NOW)
    assert ids(tickets) == ["a", "b"]
    assert state.lease is not None
    assert state.lease.state == lease_pb2.LEASE_STATE_ENDING
    assert state.lease.end_reason == lease_pb2.END_REASON_BUDGET
    lease = rules.complete(state.lease, "lease-1", "a")
    assert lease is not None
    # The holder is shown that nobody reads any more; then the record goes.
    lease = rules.complete(lease, "lease-1", "b")
    assert lease is not None
    assert not lease.tickets
    assert rules.next_due(lease, LIMITS) <= NOW
    assert rules.overdue(State(lease, state.info), LIMITS, NOW).lease is None


def test_revoking_twice_answers_with_what_is_still_open_and_writes_nothing() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    ended, _ = rules.revoke(state, revoke_request(), LIMITS, NOW)
    again, tickets = rules.revoke(
        ended, revoke_request(reason=lease_pb2.END_REASON_SHUTDOWN), LIMITS, NOW
    )
    assert ids(tickets) == ["a"]
    assert again.lease is ended.lease
    assert again.info is ended.info


def test_revoking_a_superseded_lease_tells_its_open_tickets() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    state, _ = grant(state, turn=2, lease_id="lease-2", session_id="s2")
    after, tickets = rules.revoke(state, revoke_request(), LIMITS, NOW)
    assert ids(tickets) == ["a"]
    assert after.lease is state.lease


def test_revoking_what_is_gone_is_not_an_error() -> None:
    state = granted()
    after, tickets = rules.revoke(state, revoke_request(lease_id="other"), LIMITS, NOW)
    assert (after.lease, tickets) == (state.lease, [])
    again, tickets = rules.revoke(after, revoke_request(lease_id="other"), LIMITS, NOW)
    assert (again.lease, again.info, tickets) == (after.lease, after.info, [])


def test_revoking_what_went_with_its_session_writes_nothing() -> None:
    state = State(None, granted().info)
    after, tickets = rules.revoke(state, revoke_request(), LIMITS, NOW)
    assert (after.lease, after.info, tickets) == (None, state.info, [])


def test_nobody_revokes_anothers_lease() -> None:
    with pytest.raises(Refused) as caught:
        rules.revoke(granted(), revoke_request(session_id="s2"), LIMITS, NOW)
    assert caught.value.reason == "INVALID_LEASE"


def test_a_revoked_lease_stays_while_an_earlier_one_is_read() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    state, _ = grant(state, turn=2, lease_id="lease-2")
    state, tickets = rules.revoke(state, revoke_request(lease_id="lease-2"), LIMITS, NOW)
    assert tickets == []
    assert state.lease is not None
    assert state.lease.state == lease_pb2.LEASE_STATE_ENDING
    lease = rules.complete(state.lease, "lease-1", "a")
    assert rules.overdue(State(lease, state.info), LIMITS, NOW).lease is None


# The end of a conversation


def test_ending_a_conversation_ends_its_lease() -> None:
    state, ended = rules.end_conversation(granted(turn=3), CONVERSATION, LIMITS, NOW)
    assert ended
    assert state.lease is None
    assert state.info is not None
    assert state.info.ended_through_turn == 3
    assert state.info.last_end_reason == lease_pb2.END_REASON_CONVERSATION_ENDED


def test_ending_a_conversation_keeps_the_readers_that_are_at_it() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    state, ended = rules.end_conversation(state, CONVERSATION, LIMITS, NOW)
    assert ended
    assert state.lease is not None
    assert state.lease.state == lease_pb2.LEASE_STATE_ENDING
    assert ids(state.lease.tickets) == ["a"]


def test_ending_a_conversation_without_a_lease_still_ends_its_turns() -> None:
    info = ConversationInfo(conversation=CONVERSATION, turn=2)
    state, ended = rules.end_conversation(State(None, info), CONVERSATION, LIMITS, NOW)
    assert not ended
    assert state.info is not None
    assert state.info.ended_through_turn == 2


def test_ending_an_ended_or_unknown_conversation_writes_nothing() -> None:
    assert rules.end_conversation(State(), CONVERSATION, LIMITS, NOW) == (State(), False)
    once, _ = rules.end_conversation(granted(), CONVERSATION, LIMITS, NOW)
    twice, ended = rules.end_conversation(once, CONVERSATION, LIMITS, NOW)
    assert not ended
    assert twice.info is once.info


def test_ending_works_when_the_conversations_record_is_lost() -> None:
    state, ended = rules.end_conversation(State(granted(turn=3).lease), CONVERSATION, LIMITS, NOW)
    assert ended
    assert state.info is not None
    assert (state.info.turn, state.info.ended_through_turn) == (3, 3)


# What nobody tidies up


def test_no_replica_takes_anothers_open_ticket_for_over() -> None:
    # given a ticket that a replica opened whose clock is up to 40 s behind
    limits = replace(LIMITS, clock_tolerance_s=40.0)
    state = granted()
    state = State(with_tickets(state.lease, ticket("a", NOW + 30)), state.info)
    later = NOW + 69
    # then whatever a replica does that is ahead, it keeps the ticket
    assert state.lease is not None
    assert rules.next_due(state.lease, limits) == NOW + 70
    assert rules.swept(state.lease, limits, later) is state.lease
    _, told = rules.revoke(state, revoke_request(), limits, later)
    assert ids(told) == ["a"]
    _, lease = rules.grant(state, grant_request(turn=2, lease_id="lease-2"), limits, later)
    assert ids(lease.retiring[0].tickets) == ["a"]
    ended, _ = rules.end_conversation(state, CONVERSATION, limits, later)
    assert ended.lease is not None
    assert ids(ended.lease.tickets) == ["a"]
    assert rules.swept(state.lease, limits, NOW + 70) is not state.lease


def test_tickets_that_are_over_go_and_their_lease_stays() -> None:
    lease = with_tickets(granted().lease, ticket("a", NOW + 30), ticket("b", NOW + 40))
    assert rules.next_due(lease, LIMITS) == NOW + 30
    assert rules.swept(lease, LIMITS, NOW + 29) is lease
    later = rules.swept(lease, LIMITS, NOW + 30)
    assert later is not None
    assert ids(later.tickets) == ["b"]


def test_an_ending_record_goes_with_its_last_tickets_deadline() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a", NOW + 30)), state.info)
    state, _ = rules.end_conversation(state, CONVERSATION, LIMITS, NOW)
    assert rules.overdue(state, LIMITS, NOW + 29).lease is state.lease
    assert rules.overdue(state, LIMITS, NOW + 30).lease is None


def test_a_lease_that_its_holder_forgets_ends_when_the_blocks_must_be_free() -> None:
    state = granted()
    assert state.lease is not None
    last = NOW + LIMITS.retention_ttl_s + LIMITS.claim_grace_s
    assert rules.next_due(state.lease, LIMITS) == last
    assert rules.overdue(state, LIMITS, last - 1).lease is state.lease
    after = rules.overdue(state, LIMITS, last)
    assert after.lease is None
    assert after.info is not None
    assert after.info.last_end_reason == lease_pb2.END_REASON_EXPIRED


def test_retiring_leases_go_when_their_readers_are_over() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a", NOW + 30)), state.info)
    state, lease = grant(state, turn=2, lease_id="lease-2")
    assert rules.next_due(lease, LIMITS) == NOW + 30
    after = rules.swept(lease, LIMITS, NOW + 30)
    assert after is not None
    assert not after.retiring
    assert after.state == lease_pb2.LEASE_STATE_HELD


# Closing tickets


def test_closing_a_ticket_leaves_the_others() -> None:
    lease = with_tickets(granted().lease, ticket("a"), ticket("b"))
    after = rules.complete(lease, "lease-1", "a")
    assert after is not None
    assert ids(after.tickets) == ["b"]
    assert ids(lease.tickets) == ["a", "b"]


@pytest.mark.parametrize(("lease_id", "ticket_id"), [("lease-1", "x"), ("other", "a")])
def test_closing_an_unknown_ticket_writes_nothing(lease_id: str, ticket_id: str) -> None:
    lease = with_tickets(granted().lease, ticket("a"))
    assert rules.complete(lease, lease_id, ticket_id) is lease
    assert rules.complete(None, lease_id, ticket_id) is None


def test_a_ticket_of_a_superseded_lease_is_closed_there() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    _, lease = grant(state, turn=2, lease_id="lease-2")
    lease.tickets.append(ticket("a"))  # another reader's, by chance of the same name
    after = rules.complete(lease, "lease-1", "a")
    assert after is not None
    assert not after.retiring
    assert ids(after.tickets) == ["a"]


# What others see


def test_lists_show_a_lease_without_what_only_readers_need() -> None:
    lease = granted().lease
    assert lease is not None
    shown = rules.public(lease)
    assert not shown.HasField("proof")
    assert shown.kv_transfer_params_json == ""
    assert shown.chunk_tokens == lease.proof.chunk_tokens
    assert lease.HasField("proof")


def test_a_lease_concerns_its_holder_and_those_whose_leases_retire() -> None:
    state = granted()
    state = State(with_tickets(state.lease, ticket("a")), state.info)
    _, lease = grant(state, turn=2, lease_id="lease-2", session_id="s2")
    assert rules.sessions_of(lease) == {"s1", "s2"}
