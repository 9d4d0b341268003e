"""A decode engine's leases: what it hears, and what it then must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lease_builders import CONVERSATION, ticket

from kvlease import times
from kvlease.v1 import lease_pb2
from kvlease.v1.common_pb2 import Conversation
from kvlease.v1.lease_pb2 import Lease, RetiringLease
from kvlease_connector.retention import SAME_RATE, HeldLease, Phase
from kvlease_connector.table import Entry, LeaseTable

GRACE_S = 30.0
HELD, ENDING = lease_pb2.LEASE_STATE_HELD, lease_pb2.LEASE_STATE_ENDING


def entry(
    lease_id: str = "mine", *, at: float = 0.0, retention_s: float = 480.0, name: str = "c1"
) -> Entry:
    lease = HeldLease(
        lease_id=lease_id,
        num_blocks=4,
        num_tokens=16,
        granted_at=at,
        retention_s=retention_s,
        claim_grace_s=GRACE_S,
    )
    conversation = Conversation(tenant="acme", model="qwen", conversation_id=name)
    return Entry(conversation, "s1", lease, asked_at=at)


def record(
    lease_id: str = "mine",
    *tickets: str,
    state: lease_pb2.LeaseState.ValueType = HELD,
    expires: float = 480.0,
    session: str = "s1",
    superseded: str = "",
    retiring: Sequence[tuple[str, str]] = (),
) -> Lease:
    return Lease(
        conversation=CONVERSATION,
        lease_id=lease_id,
        state=state,
        holder_session_id=session,
        tickets=[ticket(name) for name in tickets],
        expire_time=times.timestamp(expires),
        superseded_lease_id=superseded,
        retiring=[
            RetiringLease(lease_id=owner, holder_session_id="s1", tickets=[ticket(name)])
            for owner, name in retiring
        ],
    )


def held(lease_id: str = "mine", *, seen: bool = True, **fields: Any) -> tuple[LeaseTable, Entry]:
    """A table with one lease, granted at 1 and shown by the watch."""
    table, item = LeaseTable(), entry(lease_id, **fields)
    table.add(item)
    table.granted(lease_id, record(lease_id), item.lease.retention_s, now=1.0)
    if seen:
        table.show(record(lease_id), now=1.0)
    return table, item


def freed(table: LeaseTable, now: float) -> list[str]:
    return [item.lease.lease_id for item in table.take_free(now)]


# Superseded


def test_a_superseded_lease_without_readers_is_free_at_once() -> None:
    table, _ = held()
    table.show(record("next", superseded="mine", session="s2"), now=5.0)
    assert freed(table, 5.0) == ["mine"]


def test_a_superseded_lease_is_free_once_its_reader_has_completed() -> None:
    table, _ = held()
    following = {"superseded": "mine", "session": "s2"}
    table.show(record("next", retiring=[("mine", "t1")], **following), now=5.0)
    assert freed(table, 6.0) == []
    table.show(record("next", **following), now=7.0)
    assert freed(table, 7.0) == ["mine"]


def test_tickets_are_carried_along_by_the_next_but_one() -> None:
    table, _ = held()
    table.show(record("next", superseded="mine", retiring=[("mine", "t1")]), now=5.0)
    table.show(record("third", superseded="next", retiring=[("mine", "t1")]), now=6.0)
    assert freed(table, 7.0) == []
    table.show(record("fourth", superseded="third"), now=8.0)
    assert freed(table, 8.0) == ["mine"]


def test_a_record_that_does_not_follow_says_nothing_about_readers() -> None:
    # given a lease with a reader, and a record of another's that came and went unseen
    table, _ = held()
    table.show(record("mine", "t1"), now=5.0)
    # when a third one starts afresh, without what that one knew
    table.show(record("third", session="s3"), now=20.0)
    # then the reader seen, and one that was not, have their time
    assert freed(table, 20.0 + GRACE_S - 0.1) == []
    assert freed(table, 20.0 + GRACE_S) == ["mine"]


def test_a_new_grant_ends_what_was_held_before() -> None:
    table, _ = held()
    table.add(entry("next", at=10.0))
    following = record("next", superseded="mine", retiring=[("mine", "t1")])
    table.granted("next", following, 480.0, now=10.1)
    assert table.entries["mine"].lease.phase is Phase.ENDED
    table.show(following, now=10.2)
    assert freed(table, 11.0) == []
    table.show(record("next", superseded="mine"), now=12.0)
    assert freed(table, 12.0) == ["mine"]


def test_a_watch_that_is_behind_closes_no_ticket_that_an_answer_has_told_of() -> None:
    # given a ticket that was opened just before the revocation, whose answer tells of it
    table, _ = held()
    table.revoked("mine", ["t1"], now=10.0)
    # when the watch is behind: it shows what was before, and then the ticket
    table.show(record("mine", "t0"), now=10.1)
    table.show(record(), now=10.2)
    assert freed(table, 10.2) == []
    table.show(record("mine", "t1"), now=10.3)
    table.show(record("mine", "t1", state=ENDING), now=10.4)
    assert freed(table, 10.4) == []
    # then it is free when it shows that the read is over
    table.show(record("mine", state=ENDING), now=10.5)
    assert freed(table, 10.5) == ["mine"]


def test_an_answer_does_not_bring_back_what_the_watch_has_shown_to_be_closed() -> None:
    table, _ = held()
    table.show(record("mine", "t1"), now=10.0)
    table.show(record(), now=10.1)
    table.revoked("mine", ["t1"], now=10.2)
    assert freed(table, 10.2) == ["mine"]


def test_a_grants_answer_tells_of_readers_before_the_watch_does() -> None:
    table, _ = held()
    table.add(entry("next", at=10.0))
    following = record("next", superseded="mine", retiring=[("mine", "t1")])
    table.granted("next", following, 480.0, now=10.1)
    # when the watch is behind
    table.show(record("mine"), now=10.2)
    assert freed(table, 10.2) == []
    table.show(record("mine", "t1"), now=10.3)
    table.show(following, now=10.4)
    assert freed(table, 10.4) == []
    table.show(record("next", superseded="mine"), now=10.5)
    assert freed(table, 10.5) == ["mine"]


def test_an_answer_that_is_late_takes_no_ticket_back() -> None:
    # given a grant whose answer is slow, and a reader that the watch has shown meanwhile
    table, item = LeaseTable(), entry()
    table.add(item)
    table.show(record("mine", "t1"), now=1.0)
    table.granted("mine", record("mine"), 480.0, now=2.0)
    table.show(record("mine", "t1", state=ENDING), now=3.0)
    assert freed(table, 4.0) == []


# Gone


def test_a_record_that_goes_without_readers_frees_its_blocks_at_once() -> None:
    table, _ = held()
    table.removed(record(), now=5.0, after_gap=False)
    assert freed(table, 5.0) == ["mine"]


def test_a_record_that_goes_with_a_reader_may_have_lost_its_session() -> None:
    # given a session that the engine believes in, and the store does not
    table, _ = held()
    table.show(record("mine", "t1"), now=5.0)
    table.removed(record("mine", "t1"), now=6.0, after_gap=False)
    assert freed(table, 5.0 + GRACE_S - 0.1) == []
    assert freed(table, 5.0 + GRACE_S) == ["mine"]


def test_an_ended_lease_is_free_when_its_record_shows_no_reader_any_more() -> None:
    table, _ = held()
    table.show(record("mine", "t1", state=ENDING), now=5.0)
    assert freed(table, 5.0) == []
    table.show(record("mine", state=ENDING), now=6.0)
    assert freed(table, 6.0) == ["mine"]


def test_a_record_that_went_unseen_may_have_had_readers() -> None:
    table, _ = held()
    table.removed(record(), now=5.0, after_gap=True)
    assert freed(table, 5.0 + GRACE_S - 0.1) == []
    assert freed(table, 5.0 + GRACE_S) == ["mine"]


def test_readers_of_a_retiring_lease_stay_when_its_successors_session_is_lost() -> None:
    table, _ = held()
    following = record("next", superseded="mine", session="s2", retiring=[("mine", "t1")])
    table.show(following, now=5.0)
    table.removed(following, now=6.0, after_gap=False)
    assert freed(table, 5.0 + GRACE_S - 0.1) == []
    assert freed(table, 5.0 + GRACE_S) == ["mine"]


# Readers that ask


def test_a_reader_is_promised_the_grace_and_gets_it() -> None:
    table, _ = held()
    promised = table.confirm("mine", "t1", now=10.0)
    assert 0.98 * GRACE_S < promised < GRACE_S  # the reader's clock may be a little slower
    table.revoked("mine", [], now=11.0)
    assert freed(table, 10.0 + GRACE_S - 0.1) == []
    assert freed(table, 10.0 + GRACE_S) == ["mine"]


def test_a_reader_is_promised_nothing_of_what_is_not_kept() -> None:
    table, _ = held()
    table.revoked("mine", [], now=5.0)
    assert freed(table, 5.0) == ["mine"]
    for _ in range(3):
        assert table.confirm("mine", "t1", now=5.0) == 0.0
    assert table.confirm("never granted", "t1", now=5.0) == 0.0


def test_a_reader_is_promised_no_more_than_the_engine_may_keep() -> None:
    table, item = held(retention_s=100.0)
    last = item.lease.hard_deadline
    assert table.confirm("mine", "t1", now=last - 3.0) == 3.0 * SAME_RATE
    assert table.confirm("mine", "t2", now=last) == 0.0
    assert freed(table, last) == ["mine"]


def test_asking_again_prolongs_nothing() -> None:
    table, _ = held()
    table.confirm("mine", "t1", now=10.0)
    assert table.confirm("mine", "t1", now=25.0) == 15.0 * SAME_RATE


def test_a_reader_that_asked_is_kept_although_no_record_shows_it_yet() -> None:
    # given a reader that asks before the watch has shown its ticket
    table, item = held()
    table.confirm("mine", "t1", now=10.0)
    table.show(record(), now=10.1)
    assert set(item.lease.tickets) == {"t1"}
    # when it has been shown, it goes as it is shown to go
    table.show(record("mine", "t1"), now=10.2)
    table.show(record(), now=10.3)
    assert not item.lease.tickets


def test_a_question_that_comes_after_the_read_was_completed_keeps_nothing() -> None:
    table, item = held()
    table.confirm("mine", "t1", now=10.0)
    table.show(record("mine", "t1"), now=10.1)
    table.show(record(), now=10.2)
    assert table.confirm("mine", "t1", now=40.0) == 0.0
    assert not item.lease.tickets


def test_a_lease_that_is_read_is_not_given_up_for_its_blocks() -> None:
    table, item = held()
    assert table.revocable() == [item]
    table.confirm("mine", "t1", now=10.0)
    assert table.revocable() == []


# Grants that are late, or refused


def test_a_grant_that_was_given_up_and_is_stored_is_revoked() -> None:
    # given a lease whose blocks are free: its grant was given up
    table, _ = held()
    table.revoked("mine", [], now=5.0)
    table.take_free(5.0)
    # when the store shows it after all
    (late,) = table.show(record("mine"), now=6.0)
    assert (late.lease.lease_id, late.session_id) == ("mine", "s1")
    assert late.conversation == CONVERSATION
    # then it is revoked, unless it is another's or ending
    assert table.show(record("other", session="s9"), now=6.0) == []
    assert table.show(record("mine", state=ENDING), now=6.0) == []


def test_blocks_of_a_refused_grant_are_free_at_once() -> None:
    table, item = LeaseTable(), entry()
    table.add(item)
    table.refused("mine", now=0.01)
    assert freed(table, 0.01) == ["mine"]


def test_a_refusal_after_an_unclear_try_leaves_time_for_its_readers() -> None:
    # given a grant that may have been stored, claimed and ended, before it was tried again
    table, item = LeaseTable(), entry()
    table.add(item)
    table.refused("mine", now=2.2)
    assert freed(table, 2.2 + GRACE_S - 0.1) == []
    assert freed(table, 2.2 + GRACE_S) == ["mine"]


def test_a_revoked_grant_cannot_be_stored_any_more() -> None:
    table, item = LeaseTable(), entry()
    table.add(item)
    table.revoked("mine", [], now=7.0)
    assert freed(table, 7.0) == ["mine"]


# Renewals


def test_a_renewal_moves_the_end_by_as_much_as_the_record_moves() -> None:
    # given clocks that have nothing in common: the record says 480, the engine 481
    table, item = held()
    assert item.lease.expires_at == 481.0
    table.show(record("mine", expires=1080.0), now=400.0)
    assert item.lease.expires_at == 1081.0
    assert item.lease.hard_deadline == 1081.0 + GRACE_S
    assert table.take_due(1080.9) == []
    table.show(record("mine", expires=980.0), now=401.0)
    assert item.lease.expires_at == 981.0
    assert table.take_due(981.0) == [item]


def test_seeing_the_same_end_again_moves_nothing() -> None:
    table, item = held()
    for now in (10.0, 20.0):
        table.show(record("mine", "t1"), now=now)
    assert item.lease.expires_at == 481.0


def test_a_renewal_by_a_replica_whose_clock_is_behind_breaks_no_promise() -> None:
    # given a reader that was promised the grace
    table, item = held()
    promised = table.confirm("mine", "t1", now=100.0)
    # when the retention is cut to 5 s, by a clock that is 40 s behind
    table.show(record("mine", "t1", expires=65.0), now=100.1)
    assert item.lease.expires_at == 100.1
    assert freed(table, 100.0 + promised - 0.1) == []


# What a watch has shown


def test_what_a_whole_listing_does_not_show_has_ended_unseen() -> None:
    table, _ = held()
    table.add(entry("granting", at=5.0))
    table.synced([], started=6.0, now=6.5)
    assert freed(table, 6.5) == []
    assert freed(table, 6.5 + GRACE_S) == ["mine"]
    assert table.entries["granting"].lease.phase is Phase.GRANTING


def test_a_lost_session_ends_its_leases_with_time_for_unseen_readers() -> None:
    table, _ = held()
    table.session_lost("s1", ended_by=20.0)
    assert freed(table, 20.0 + GRACE_S - 0.1) == []
    assert freed(table, 20.0 + GRACE_S) == ["mine"]


def test_records_of_others_change_nothing() -> None:
    table, item = held()
    other = record("other", session="s9")
    other.conversation.conversation_id = "another"
    assert table.show(other, now=5.0) == []
    table.removed(other, now=5.0, after_gap=True)
    assert item.lease.phase is Phase.HELD


def test_a_long_lease_does_not_delay_the_release_of_a_short_one() -> None:
    # given a long lease that was granted first
    table, _ = held("long", retention_s=3600.0)
    short = entry("short", at=2.0, retention_s=10.0, name="another")
    table.add(short)
    table.granted("short", record("short"), 10.0, now=2.0)
    # then the short one is revoked and free in its own time
    assert table.take_due(12.0) == [short]
    table.revoked("short", [], now=12.1)
    assert freed(table, 12.1) == ["short"]
