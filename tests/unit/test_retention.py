"""Which blocks stay, and until when."""

from __future__ import annotations

from kvlease_connector.retention import HeldLease, Phase

GRACE_S = 30.0


def lease(
    *, at: float = 0.0, retention_s: float = 480.0, blocks: int = 10, tokens: int = 1280
) -> HeldLease:
    return HeldLease(
        lease_id=f"lease-{at}-{blocks}",
        num_blocks=blocks,
        num_tokens=tokens,
        granted_at=at,
        retention_s=retention_s,
        claim_grace_s=GRACE_S,
    )


def held(**kwargs: float) -> HeldLease:
    item = lease(**kwargs)  # type: ignore[arg-type]
    item.granted(item.granted_at, item.retention_s)
    return item


def test_blocks_of_a_lease_that_may_be_readable_are_kept() -> None:
    for item in (lease(), held()):
        assert not item.may_free(now=479.0)


def test_blocks_of_an_ended_lease_without_readers_are_free_at_once() -> None:
    item = held()
    item.end(now=10.0, unseen_tickets=False)
    assert item.may_free(now=10.0)


def test_blocks_of_an_ended_lease_stay_while_a_ticket_is_open() -> None:
    # given a reader whose ticket was seen at 10
    item = held()
    item.tickets_are(["t1"], now=10.0)
    item.end(now=11.0, unseen_tickets=False)
    # then they stay until the ticket is closed
    assert not item.may_free(now=12.0)
    item.tickets_are([], now=13.0)
    assert item.may_free(now=13.0)


def test_a_ticket_that_is_never_closed_keeps_blocks_for_the_claim_grace() -> None:
    item = held()
    item.tickets_are(["t1"], now=10.0)
    item.end(now=11.0, unseen_tickets=False)
    assert not item.may_free(now=10.0 + GRACE_S - 0.1)
    assert item.may_free(now=10.0 + GRACE_S)


def test_seeing_a_ticket_again_does_not_prolong_it() -> None:
    item = held()
    item.tickets_are(["t1"], now=10.0)
    item.tickets_are(["t1", "t2"], now=35.0)
    assert item.tickets == {"t1": 10.0 + GRACE_S, "t2": 35.0 + GRACE_S}


def test_an_end_that_was_not_seen_keeps_blocks_for_the_claim_grace() -> None:
    item = held()
    item.end(now=10.0, unseen_tickets=True)
    assert not item.may_free(now=10.0 + GRACE_S - 0.1)
    assert item.may_free(now=10.0 + GRACE_S)


def test_no_block_outlives_the_retention_and_the_claim_grace() -> None:
    item = held(retention_s=5.0)
    item.tickets_are(["t1"], now=34.9)
    assert not item.may_free(now=34.9)
    assert item.may_free(now=35.0)


def test_retention_counts_from_the_answer_to_the_grant() -> None:
    item = lease(retention_s=5.0)
    item.granted(now=1.0, retention_s=5.0)
    assert not item.should_revoke(now=5.9)
    assert item.should_revoke(now=6.0)


def test_an_answer_that_comes_after_the_end_does_not_bring_a_lease_back() -> None:
    item = lease()
    item.end(now=1.0, unseen_tickets=False)
    item.granted(now=2.0, retention_s=480.0)
    assert item.phase is Phase.ENDED


def test_a_lease_is_revoked_once() -> None:
    item = held(retention_s=5.0)
    item.revoking = True
    assert not item.should_revoke(now=6.0)
