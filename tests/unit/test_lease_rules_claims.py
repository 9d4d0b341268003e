"""Claims: how much may be reused, and when not, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lease_builders import (
    CHUNK,
    CONVERSATION,
    LIMITS,
    NOW,
    SEED,
    claim_request,
    engine,
    granted,
    revoke_request,
    ticket,
    with_tickets,
)

from kvlease import prefix, times
from kvlease.lease import claims, rules
from kvlease.lease.rules import State
from kvlease.v1 import common_pb2, lease_pb2, registry_pb2
from kvlease.v1.common_pb2 import Outcome
from kvlease.v1.lease_pb2 import ClaimRequest, ClaimResponse, Lease
from kvlease.v1.registry_pb2 import Engine


def claim(
    state: State,
    request: ClaimRequest | None = None,
    holder: Engine | None = None,
    now: float = NOW,
) -> tuple[ClaimResponse, Lease | None]:
    return claims.claim(state, holder or engine(), request or claim_request(), LIMITS, now)


def outcome(answer: ClaimResponse) -> str:
    return Outcome.Name(answer.outcome).removeprefix("OUTCOME_")


# Hits


def test_an_unchanged_history_is_offered_to_its_last_token() -> None:
    state = granted(range(20))
    answer, lease = claim(state, claim_request(range(25)))
    assert outcome(answer) == "HIT"
    assert answer.proven_tokens == 16
    assert answer.tail_num_tokens == 20
    assert state.lease is not None
    assert answer.tail_digest == state.lease.proof.tail_digest
    assert answer.ticket.num_tokens == 20
    assert answer.kv_transfer_params_json == state.lease.kv_transfer_params_json
    assert answer.holder == engine()
    assert answer.lease_traceparent == state.lease.traceparent
    assert lease is not None
    assert lease.claim_count == 1
    assert list(lease.tickets) == [answer.ticket]


def test_a_ticket_lasts_for_the_grace() -> None:
    answer, _ = claim(granted())
    assert times.moment(answer.ticket.open_time) == NOW
    assert times.moment(answer.ticket.deadline) == NOW + LIMITS.claim_grace_s
    assert times.seconds(answer.ticket_ttl) == LIMITS.claim_grace_s
    assert answer.ticket.reader_engine_id == "prefill-0"
    assert answer.ticket.reader_incarnation == "p1"


def test_a_changed_history_is_offered_up_to_the_last_equal_chunk() -> None:
    tokens = list(range(40))
    changed = [*tokens[:20], 999, *tokens[21:]]
    answer, _ = claim(granted(tokens), claim_request(changed))
    assert outcome(answer) == "HIT"
    assert answer.proven_tokens == 2 * CHUNK
    assert answer.tail_num_tokens == 0
    assert answer.tail_digest == b""
    assert answer.detail == (
        "16 of 40 kept tokens are proven equal: the prompt first differs within its tokens 17 to 24"
    )


def test_a_history_cut_short_is_offered_by_whole_chunks() -> None:
    answer, _ = claim(granted(range(40)), claim_request(range(19)))
    assert (outcome(answer), answer.proven_tokens) == ("HIT", 16)
    assert answer.tail_num_tokens == 0


def test_a_lease_that_ends_with_a_chunk_is_proven_whole() -> None:
    answer, _ = claim(granted(range(16)), claim_request(range(16)))
    assert (outcome(answer), answer.proven_tokens) == ("HIT", 16)
    assert answer.tail_digest == b""


def test_a_lease_shorter_than_a_chunk_is_offered_by_its_tail() -> None:
    answer, _ = claim(granted(range(5)), claim_request(range(9)))
    assert (outcome(answer), answer.proven_tokens) == ("HIT", 0)
    assert answer.tail_num_tokens == 5
    assert answer.ticket.num_tokens == 5


def test_a_retry_of_the_same_call_gets_the_same_ticket() -> None:
    state = granted()
    first, lease = claim(state)
    again, unchanged = claim(State(lease), now=NOW + 5)
    assert again.ticket == first.ticket
    assert times.seconds(again.ticket_ttl) == LIMITS.claim_grace_s - 5
    assert unchanged is lease


def test_no_difference_of_clocks_gives_a_ticket_more_than_the_grace() -> None:
    # given a ticket, and the same call once more at a replica whose clock is behind
    state = granted()
    _, lease = claim(state, now=NOW + 40)
    behind, _ = claim(State(lease), now=NOW)
    assert times.seconds(behind.ticket_ttl) == LIMITS.claim_grace_s
    # or ahead, by more than the grace
    limits = replace(LIMITS, clock_tolerance_s=40.0)
    ahead, _ = claims.claim(State(lease), engine(), claim_request(), limits, NOW + 75)
    assert (outcome(ahead), times.seconds(ahead.ticket_ttl)) == ("HIT", 0.0)


def test_readers_that_are_over_leave_room_at_once() -> None:
    limits = replace(LIMITS, clock_tolerance_s=40.0)
    state = granted()
    over = [ticket(f"t{number}", NOW - 1) for number in range(LIMITS.max_readers)]
    lease = with_tickets(state.lease, *over)
    answer, after = claims.claim(State(lease), engine(), claim_request(), limits, NOW)
    assert outcome(answer) == "HIT"
    assert after is not None
    assert len(after.tickets) == LIMITS.max_readers + 1


def test_a_retry_gets_its_ticket_although_the_lease_has_ended_since() -> None:
    state = granted()
    first, lease = claim(state)
    ended, _ = rules.end_conversation(State(lease, state.info), CONVERSATION, LIMITS, NOW)
    again, _ = claim(ended, now=NOW + 1)
    assert (outcome(again), again.ticket) == ("HIT", first.ticket)
    another, _ = claim(ended, claim_request(ticket_id="ticket-2"), now=NOW + 1)
    assert outcome(another) == "MISS_NO_LEASE"


def test_readers_get_tickets_of_their_own_up_to_the_limit() -> None:
    state = granted()
    for number in range(LIMITS.max_readers):
        answer, lease = claim(state, claim_request(ticket_id=f"t{number}"))
        assert answer.ticket.ticket_id == f"t{number}"
        state = State(lease)
    answer, lease = claim(state, claim_request(ticket_id="one-too-many"))
    assert outcome(answer) == "MISS_BUSY"
    assert answer.proven_tokens == 16
    assert lease is state.lease


def test_a_reader_that_is_over_makes_room() -> None:
    tickets = [ticket(f"t{number}", NOW - 1) for number in range(LIMITS.max_readers)]
    state = State(with_tickets(granted().lease, *tickets))
    answer, lease = claim(state)
    assert outcome(answer) == "HIT"
    assert lease is not None
    assert len(lease.tickets) == 1


# Misses, in the order of the checks


def test_a_conversation_without_a_grant_has_no_lease() -> None:
    answer, lease = claims.claim(State(), None, claim_request(), LIMITS, NOW)
    assert (outcome(answer), lease) == ("MISS_NO_LEASE", None)
    info = rules.start_turn(None, CONVERSATION, NOW)
    answer, _ = claims.claim(State(None, info), None, claim_request(), LIMITS, NOW)
    assert outcome(answer) == "MISS_NO_LEASE"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (lease_pb2.END_REASON_EXPIRED, "MISS_EXPIRED"),
        (lease_pb2.END_REASON_BUDGET, "MISS_EXPIRED"),
        (lease_pb2.END_REASON_SHUTDOWN, "MISS_NO_LEASE"),
    ],
)
@pytest.mark.parametrize("read", [False, True])
def test_a_revoked_lease_is_missed_for_its_reason(
    reason: lease_pb2.EndReason.ValueType, expected: str, read: bool
) -> None:
    state = granted()
    if read:  # then the record is still there, ending
        state = State(with_tickets(state.lease, ticket("another's")), state.info)
    state, _ = rules.revoke(state, revoke_request(reason=reason), LIMITS, NOW)
    assert (state.lease is not None) == read
    answer, _ = claim(state)
    assert outcome(answer) == expected


def test_an_ended_conversation_has_no_lease() -> None:
    state, _ = rules.end_conversation(granted(), CONVERSATION, LIMITS, NOW)
    assert outcome(claim(state)[0]) == "MISS_NO_LEASE"


def test_a_lease_that_vanished_with_its_holders_session_is_told_so() -> None:
    answer, _ = claim(State(None, granted().info))
    assert outcome(answer) == "MISS_ENGINE"
    assert answer.detail.startswith("decode-0, which held the lease of turn")
    assert "has lost its session:" in answer.detail


def test_a_session_that_was_seen_to_end_is_told_with_its_time() -> None:
    info = granted().info
    assert info is not None
    lost = {(info.last_holder_engine_id, info.last_holder_incarnation): 1_000_000.5}
    state = State(None, info)
    answer, _ = claims.claim(
        state, None, claim_request(), LIMITS, NOW, lambda *engine: lost.get(engine)
    )
    assert "has lost its session at 1970-01-12T13:46:40.500Z" in answer.detail


def test_a_hit_says_how_much_is_equal() -> None:
    assert claim(granted(range(20)))[0].detail == (
        "16 of 20 kept tokens are proven equal, and the last 4 may be"
    )
    assert claim(granted(range(16)), claim_request(range(16)))[0].detail == (
        "16 of 16 kept tokens are proven equal"
    )
    assert claim(granted(range(40)), claim_request(range(19)))[0].detail == (
        "16 of 40 kept tokens are proven equal: the prompt has only 19 tokens"
    )


def test_a_holder_that_is_gone_or_came_back_is_not_read_from() -> None:
    state = granted()
    gone, _ = claims.claim(state, None, claim_request(), LIMITS, NOW)
    restarted, _ = claim(state, holder=engine(incarnation="i2"))
    assert (outcome(gone), outcome(restarted)) == ("MISS_ENGINE", "MISS_ENGINE")


def test_a_draining_holder_is_not_read_from() -> None:
    holder = engine(state=registry_pb2.ENGINE_STATE_DRAINING)
    answer, _ = claim(granted(), holder=holder)
    assert outcome(answer) == "MISS_ENGINE"
    assert "drains" in answer.detail


def test_an_incompatible_reader_does_not_read() -> None:
    answer, _ = claim(granted(), claim_request(compatibility_hash="another"))
    assert outcome(answer) == "MISS_ENGINE"
    request = claim_request()
    request.proof.chunk_tokens = 2 * CHUNK
    assert outcome(claim(granted(), request)[0]) == "MISS_ENGINE"


def test_a_lease_without_time_for_a_read_is_expired() -> None:
    end = NOW + LIMITS.retention_ttl_s
    state = granted()
    assert outcome(claim(state, now=end - LIMITS.claim_margin_s)[0]) == "HIT"
    assert outcome(claim(state, now=end - LIMITS.claim_margin_s + 0.01)[0]) == "MISS_EXPIRED"


def test_another_text_shares_no_prefix() -> None:
    answer, _ = claim(granted(range(20)), claim_request(range(100, 120)))
    assert outcome(answer) == "MISS_PREFIX"
    assert answer.detail == (
        "0 of 20 kept tokens are proven equal: the prompt first differs within its tokens 1 to 8"
    )
    assert answer.proven_tokens == 0


def test_the_same_text_of_another_tenant_or_adapter_shares_no_prefix() -> None:
    request = claim_request()
    other = prefix.seed_for("acme", "qwen", "", "adapter", "")
    proof = prefix.prove(range(20), seed=other, chunk_tokens=CHUNK)
    request.proof.chunk_digests = proof.chunk_digests
    assert outcome(claim(granted(), request)[0]) == "MISS_PREFIX"


def test_a_prompt_shorter_than_a_lease_without_chunks_shares_no_prefix() -> None:
    answer, _ = claim(granted(range(6)), claim_request(range(5)))
    assert outcome(answer) == "MISS_PREFIX"


def test_less_than_is_worth_a_read_is_short() -> None:
    state = granted(range(40))
    changed = [*range(20), 999, *range(21, 40)]
    answer, _ = claim(state, claim_request(changed, min_tokens=17))
    assert (outcome(answer), answer.proven_tokens) == ("MISS_SHORT", 16)
    assert outcome(claim(state, claim_request(changed, min_tokens=16))[0]) == "HIT"


def test_what_the_tail_may_add_counts_towards_what_is_worth_a_read() -> None:
    state = granted(range(20))
    assert outcome(claim(state, claim_request(range(25), min_tokens=20))[0]) == "HIT"
    assert outcome(claim(state, claim_request(range(25), min_tokens=21))[0]) == "MISS_SHORT"


def test_a_miss_opens_nothing() -> None:
    state = granted(range(20))
    answer, lease = claim(state, claim_request(range(100, 120)))
    assert lease is state.lease
    assert not answer.HasField("ticket")
    assert answer.lease_id == ""
    assert answer.kv_transfer_params_json == ""


# For any two texts


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(shared=texts, ours=texts, theirs=texts, min_tokens=st.integers(0, 50))
def test_a_reader_never_reuses_a_token_that_differs_and_misses_no_equal_chunk(
    shared: list[int], ours: list[int], theirs: list[int], min_tokens: int
) -> None:
    held, prompt = shared + ours, shared + theirs
    equal = 0
    while equal < min(len(held), len(prompt)) and held[equal] == prompt[equal]:
        equal += 1
    request = claim_request(prompt, min_tokens=min_tokens)
    answer, _ = claim(granted(held), request)

    if answer.outcome == common_pb2.OUTCOME_HIT:
        usable = answer.proven_tokens
        proof = prefix.prove(prompt, seed=SEED, chunk_tokens=CHUNK)
        if answer.tail_num_tokens and answer.tail_digest == prefix.tail_digest(
            proof, prompt, answer.tail_num_tokens, seed=SEED
        ):
            usable = answer.tail_num_tokens
        expected = len(held) if equal == len(held) else equal // CHUNK * CHUNK
        assert usable == expected
        assert usable <= equal
        assert answer.ticket.num_tokens >= max(usable, min_tokens)
    elif answer.outcome == common_pb2.OUTCOME_MISS_PREFIX:
        assert equal < CHUNK
        assert equal < len(held)
    else:
        assert answer.outcome == common_pb2.OUTCOME_MISS_SHORT
        assert answer.proven_tokens == equal // CHUNK * CHUNK
        assert answer.proven_tokens < min_tokens
