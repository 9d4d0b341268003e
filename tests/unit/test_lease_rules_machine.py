"""Any sequence of calls on one conversation keeps what was promised to readers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from lease_builders import (
    CONVERSATION,
    LIMITS,
    NOW,
    claim_request,
    engine,
    grant_request,
    revoke_request,
)

from kvlease import times
from kvlease.lease import claims, rules
from kvlease.lease.rules import State
from kvlease.rpc import Refused
from kvlease.v1 import common_pb2, lease_pb2


class OneConversation(RuleBasedStateMachine):
    """``promised``: (lease_id, ticket_id) → deadline of every ticket that was handed out
    and not closed."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.now = NOW
        self.number = 0
        self.promised: dict[tuple[str, str], float] = {}
        self.ended: set[str] = set()

    def fresh(self, word: str) -> str:
        self.number += 1
        return f"{word}-{self.number}"

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 31.0, 500.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_turn_starts(self) -> None:
        info = rules.start_turn(self.state.info, CONVERSATION, self.now)
        self.state = State(self.state.lease, info)

    @rule(late=st.integers(0, 2), known=st.booleans(), session=st.sampled_from(["s1", "s2"]))
    def a_turn_is_granted(self, late: int, known: bool, session: str) -> None:
        started = self.state.info.turn if self.state.info else 0
        turn = max(started - late, 0) if known else 0
        request = grant_request(lease_id=self.fresh("lease"), turn=turn, session_id=session)
        before = self.state.lease
        try:
            self.state, lease = rules.grant(self.state, request, LIMITS, self.now)
        except Refused:
            return
        assert lease.lease_id == request.lease_id
        if before is not None:
            self.ended.add(before.lease_id)

    @rule(target=tickets)
    def a_reader_claims(self) -> object:
        request = claim_request(ticket_id=self.fresh("ticket"))
        answer, lease = claims.claim(self.state, engine(), request, LIMITS, self.now)
        if answer.outcome != common_pb2.OUTCOME_HIT:
            assert lease is self.state.lease
            return multiple()
        assert answer.lease_id not in self.ended
        self.state = State(lease, self.state.info)
        deadline = times.moment(answer.ticket.deadline)
        self.promised[answer.lease_id, request.ticket_id] = deadline
        return (answer.lease_id, request.ticket_id)

    @rule(ticket=consumes(tickets))
    def a_reader_completes(self, ticket: tuple[str, str]) -> None:
        lease = rules.complete(self.state.lease, *ticket)
        self.state = State(lease, self.state.info)
        self.promised.pop(ticket, None)

    @rule(reason=st.sampled_from([lease_pb2.END_REASON_BUDGET, lease_pb2.END_REASON_EXPIRED]))
    def the_holder_revokes(self, reason: lease_pb2.EndReason.ValueType) -> None:
        lease = self.state.lease
        if lease is None:
            return
        request = revoke_request(
            lease_id=lease.lease_id, session_id=lease.holder_session_id, reason=reason
        )
        self.state, open_tickets = rules.revoke(self.state, request, LIMITS, self.now)
        self.ended.add(lease.lease_id)
        told = {ticket.ticket_id for ticket in open_tickets}
        assert told == {t for (owner, t) in self.still_promised() if owner == lease.lease_id}

    @rule()
    def the_client_ends_it(self) -> None:
        lease = self.state.lease
        self.state, _ = rules.end_conversation(self.state, CONVERSATION, LIMITS, self.now)
        if lease is not None:
            self.ended.add(lease.lease_id)

    @rule()
    def the_client_renews(self) -> None:
        try:
            lease = rules.renew(self.state.lease, 100, LIMITS, self.now)
        except Refused:
            return
        assert lease.lease_id not in self.ended
        self.state = State(lease, self.state.info)

    @rule()
    def the_sweeper_comes(self) -> None:
        before = self.state.lease
        self.state = rules.overdue(self.state, LIMITS, self.now)
        after = self.state.lease
        if before is not None and (after is None or after.state != lease_pb2.LEASE_STATE_HELD):
            self.ended.add(before.lease_id)
        if after is not None:
            assert rules.next_due(after, LIMITS) > self.now

    def still_promised(self) -> set[tuple[str, str]]:
        return {key for key, deadline in self.promised.items() if deadline > self.now}

    @invariant()
    def every_promised_ticket_is_in_the_record(self) -> None:
        lease = self.state.lease
        stored: set[tuple[str, str]] = set()
        if lease is not None:
            stored = {(lease.lease_id, ticket.ticket_id) for ticket in lease.tickets}
            stored |= {(old.lease_id, t.ticket_id) for old in lease.retiring for t in old.tickets}
        assert self.still_promised() <= stored
        assert stored <= set(self.promised)

    @invariant()
    def an_ended_lease_without_readers_is_gone(self) -> None:
        lease = self.state.lease
        if lease is None:
            return
        assert all(old.tickets for old in lease.retiring)
        if lease.state == lease_pb2.LEASE_STATE_ENDING:
            reading = lease.tickets or lease.retiring
            assert reading or rules.next_due(lease, LIMITS) <= self.now
            assert lease.end_reason
        else:
            assert not lease.end_reason
            assert lease.lease_id not in self.ended

    @invariant()
    def turns_never_go_back(self) -> None:
        info, lease = self.state.info, self.state.lease
        if info is not None:
            assert info.ended_through_turn <= info.turn
            assert info.last_grant_turn <= info.turn
            if lease is not None:
                assert lease.lease_id == info.last_lease_id


TestOneConversation = OneConversation.TestCase
TestOneConversation.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
