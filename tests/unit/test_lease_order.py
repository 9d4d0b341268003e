"""Calls in an unusual order, and handles that are presented again and again: each has one
defined answer (protos/kvlease/v1/lease.proto)."""

from __future__ import annotations

import pytest
from lease_builders import (
    CONVERSATION,
    LIMITS,
    NOW,
    claim_request,
    engine,
    grant_request,
    granted,
    proof_of,
    revoke_request,
)

from kvlease import prefix, times
from kvlease.lease import claims, rules
from kvlease.lease.rules import State
from kvlease.rpc import Refused
from kvlease.v1 import common_pb2, lease_pb2
from kvlease.v1.lease_pb2 import ClaimResponse, Lease


def claim(
    state: State, ticket_id: str = "t1", *, now: float = NOW
) -> tuple[ClaimResponse, Lease | None]:
    return claims.claim(state, engine(), claim_request(ticket_id=ticket_id), LIMITS, now)


def started(state: State) -> State:
    """A turn has started."""
    return State(state.lease, rules.start_turn(state.info, CONVERSATION, NOW))


def ended(state: State) -> State:
    """The conversation has been ended."""
    return rules.end_conversation(state, CONVERSATION, LIMITS, NOW)[0]


def refusal(state: State, **fields: object) -> str:
    with pytest.raises(Refused) as caught:
        rules.grant(state, grant_request(**fields), LIMITS, NOW)
    return caught.value.reason


def test_an_end_during_a_turns_own_prefill_lets_the_read_end_and_refuses_the_grant() -> None:
    # given a turn whose prefill reads the turn before
    state = started(granted(turn=1))
    answer, lease = claim(state)
    assert answer.outcome == common_pb2.OUTCOME_HIT
    # when its conversation is ended
    state = ended(State(lease, state.info))
    # then the reader keeps its ticket, nobody gets another, and nothing is granted
    assert state.lease is not None
    assert [ticket.ticket_id for ticket in state.lease.tickets] == ["t1"]
    assert claim(state, "t2")[0].outcome == common_pb2.OUTCOME_MISS_NO_LEASE
    assert refusal(state, lease_id="lease-2", turn=2) == "CONVERSATION_ENDED"


def test_an_end_during_a_first_turn_refuses_its_grant() -> None:
    state = ended(started(State()))
    assert refusal(state, turn=1) == "CONVERSATION_ENDED"


def test_an_end_between_the_claim_and_its_answer_costs_nothing_but_the_lease() -> None:
    # given a claim that is sent again, because its answer was lost
    state = granted(turn=1)
    first, lease = claim(state)
    state = ended(State(lease, state.info))
    again, _ = claim(state)
    # then the ticket that it opened is good
    assert (again.outcome, again.ticket) == (common_pb2.OUTCOME_HIT, first.ticket)


def test_a_renewal_after_the_end_finds_nothing() -> None:
    state = granted()
    _, lease = claim(state)
    for gone in (ended(state).lease, ended(State(lease, state.info)).lease, None):
        with pytest.raises(Refused) as caught:
            rules.renew(gone, 600, LIMITS, NOW)
        assert caught.value.reason == "LEASE_NOT_FOUND"


def test_a_claim_after_the_revocation_misses_however_often_it_comes() -> None:
    state, _ = rules.revoke(granted(), revoke_request(), LIMITS, NOW)
    for number in range(5):
        answer, lease = claim(state, f"t{number}")
        assert answer.outcome == common_pb2.OUTCOME_MISS_EXPIRED
        assert lease is None


def test_of_two_grants_in_reverse_order_the_later_turn_stays() -> None:
    # given two turns that run at once, and the later one ends first
    state = started(started(State()))
    state, later = rules.grant(state, grant_request(lease_id="later", turn=2), LIMITS, NOW)
    assert refusal(state, lease_id="older", turn=1) == "STALE_TURN"
    assert state.lease is later


@pytest.mark.parametrize("how", ["superseded", "revoked", "ended", "expired"])
def test_a_lease_that_is_over_is_not_granted_again_however_often_it_comes(how: str) -> None:
    state = granted(turn=1)
    match how:
        case "superseded":
            state, _ = rules.grant(state, grant_request(lease_id="lease-2"), LIMITS, NOW)
        case "revoked":
            state, _ = rules.revoke(state, revoke_request(), LIMITS, NOW)
        case "ended":
            state = ended(state)
        case _:
            state = rules.overdue(state, LIMITS, NOW + 10_000)
    for _ in range(3):
        assert refusal(state) == "LEASE_ENDED"
        assert refusal(state, session_id="s2") == "LEASE_ENDED"


def test_a_handle_of_an_earlier_start_of_the_holder_is_never_answered_with() -> None:
    state = granted()
    for number in range(3):
        request = claim_request(ticket_id=f"t{number}")
        answer, lease = claims.claim(state, engine(incarnation="i2"), request, LIMITS, NOW)
        assert answer.outcome == common_pb2.OUTCOME_MISS_ENGINE
        assert not answer.kv_transfer_params_json
        assert lease is state.lease


def test_a_read_that_would_start_within_the_margin_is_declined() -> None:
    state = granted()
    assert state.lease is not None
    last = times.moment(state.lease.expire_time) - LIMITS.claim_margin_s
    assert claim(state, now=last)[0].outcome == common_pb2.OUTCOME_HIT
    answer, lease = claim(state, now=last + 0.001)
    assert answer.outcome == common_pb2.OUTCOME_MISS_EXPIRED
    assert lease is state.lease


def test_a_retry_opens_a_ticket_of_its_own() -> None:
    # given a first try whose read failed
    state = granted()
    _, lease = claim(state, "first")
    lease = rules.complete(lease, "lease-1", "first")
    # then the second has its own time, and the first one's end does not touch it
    answer, lease = claim(State(lease, state.info), "second", now=NOW + 20)
    assert times.seconds(answer.ticket_ttl) == LIMITS.claim_grace_s
    assert lease is not None
    assert rules.complete(lease, "lease-1", "first") is lease
    assert [ticket.ticket_id for ticket in lease.tickets] == ["second"]


def test_new_weights_make_old_leases_unusable() -> None:
    # given a lease of the same tokens, under the weights before
    seed = prefix.seed_for("acme", "qwen", "v1", "", "")
    tokens = range(20)
    proof = prefix.prove(tokens, seed=seed, chunk_tokens=8)
    digests = lease_pb2.PrefixProof(
        chunk_tokens=8, chunk_digests=proof.chunk_digests, tail_digest=proof.tail_digest
    )
    state = granted(tokens, proof=digests)
    # then a reader with others finds nothing equal, nor does the tail look equal to it
    answer, _ = claim(state)
    assert answer.outcome == common_pb2.OUTCOME_MISS_PREFIX
    ours = prefix.prove(tokens, seed=prefix.seed_for("acme", "qwen", "v2", "", ""), chunk_tokens=8)
    assert ours.tail_digest != proof.tail_digest
    assert proof_of(tokens, tail=True) != digests
