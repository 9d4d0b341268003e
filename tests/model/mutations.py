"""Each rule, broken on purpose: what a model test must notice to be worth anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvlease import prefix
from kvlease.lease import claims as claim_rules
from kvlease.lease import knowledge, rules, service
from kvlease.lease.knowledge import Part
from kvlease.lease.rules import Limits
from kvlease.lease.sweeper import Sweeper
from kvlease.rpc import Refused
from kvlease.store.base import Delete, Put
from kvlease.v1 import lease_pb2
from kvlease_connector import table as table_rules
from kvlease_connector.budget import Retained
from kvlease_connector.claims import Claims
from kvlease_connector.retention import HeldLease, Phase
from kvlease_connector.revocations import Revocations
from kvlease_connector.session import Session
from kvlease_connector.table import LeaseTable

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """``found`` is what the model says, ``scenario`` where (scenarios.py)."""

    name: str
    break_it: Break
    scenario: str
    found: str


def _patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Break:
    """Replaces an attribute by what ``make`` makes of it."""

    def break_it(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, make(getattr(owner, name)))

    return break_it


# --- the lease service --------------------------------------------------------------------


def _forget_what_was_revoked(real: Any) -> Any:
    def revoke(state: Any, request: Any, limits: Any, now: float) -> Any:
        after, tickets = real(state, request, limits, now)
        unknown = after.lease is state.lease and after.info is not state.info
        return (state if unknown else after), tickets

    return revoke


def _grant_stale_turns(real: Any) -> Any:
    def check(state: Any, request: Any) -> None:
        try:
            real(state, request)
        except Refused as refused:
            if refused.reason != "STALE_TURN":
                raise

    return check


def _one_chunk_too_many(real: Any) -> Any:
    def match(lease: Any, request: Any) -> Any:
        found = real(lease, request)
        return replace(found, proven=min(found.proven + lease.chunk_tokens, lease.num_tokens))

    return match


def _outlive_the_session(real: Any) -> Any:
    def write(key: str, known: Any, after: Any) -> Any:
        made = real(key, known, after)
        return Put(made.key, made.value) if isinstance(made, Put) else made

    return write


def _delete_instead_of_ending(real: Any) -> Any:
    def write(key: str, known: Any, after: Any) -> Any:
        ending = after.lease is not None and after.lease.state == lease_pb2.LEASE_STATE_ENDING
        return Delete(key) if ending else real(key, known, after)

    return write


def _same_seed_for_all_salts(real: Any) -> Any:
    return lambda tenant, model, weights, lora, salt: real(tenant, model, weights, lora, "")


class _EqualsAll(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


# --- the decode engine --------------------------------------------------------------------


def _free_under_readers(real: Any) -> Any:
    def may_free(self: HeldLease, now: float) -> bool:
        ended = self.phase is Phase.ENDED and now >= self.not_before
        return ended or now >= self.hard_deadline

    return may_free


def _tickets_without_an_end(real: Any) -> Any:
    def keep_only(self: HeldLease, ticket_ids: set[str], now: float) -> None:
        self.tickets = dict.fromkeys(ticket_ids, math.inf)

    return keep_only


def _watches_are_never_behind(real: Any) -> Any:
    def tickets_were(self: HeldLease, ticket_ids: Any, now: float) -> None:
        self.tickets_are(ticket_ids, now)

    return tickets_were


def _free_before_the_answer(real: Any) -> Any:
    def begin(self: Revocations, entry: Any, what: str = "revoke") -> None:
        with self._lock:
            self._table.revoked(entry.lease.lease_id, [], self._clock())
        self.begin_once(entry, what)

    return begin


def _gap_or_not(real: Any) -> Any:
    def removed(self: LeaseTable, record: Any, now: float, *, after_gap: bool) -> None:
        real(self, record, now, after_gap=False)

    return removed


def _gone_means_unread(real: Any) -> Any:
    def removed(self: LeaseTable, record: Any, now: float, *, after_gap: bool) -> None:
        unread = type(record)()
        unread.CopyFrom(record)
        del unread.tickets[:]
        real(self, unread, now, after_gap=after_gap)

    return removed


def _not_named_means_unread(real: Any) -> Any:
    def superseded(entry: Any, record: Any, now: float, tickets: Any) -> None:
        if table_rules._tickets_of(entry.lease.lease_id, record) is not None:
            real(entry, record, now, tickets)
            return
        entry.lease.tickets.clear()
        entry.lease.end(now, unseen_tickets=False)

    return superseded


def _lost_means_gone(real: Any) -> Any:
    def lost(self: LeaseTable, session_id: str, ended_by: float) -> None:
        for entry in self.entries.values():
            if entry.session_id == session_id:
                entry.lease.end(ended_by, unseen_tickets=False)

    return lost


def _from_the_last_answer(real: Any) -> Any:
    def lose(self: Session, ended_by: float) -> None:
        real(self, min(ended_by, self.last_acknowledged + self.ttl_s))

    return lose


def _promise_and_forget(real: Any) -> Any:
    def confirm(self: HeldLease, ticket_id: str, now: float) -> float:
        return max(0.0, min(now + self.claim_grace_s, self.hard_deadline) - now)

    return confirm


def _confirm_what_is_freed(real: Any) -> Any:
    def confirm(self: LeaseTable, lease_id: str, ticket_id: str, now: float) -> float:
        return float(real(self, lease_id, ticket_id, now)) or 30.0

    return confirm


def _no_last_moment(real: Any) -> Any:
    return property(lambda self: math.inf)


def _no_budget(real: Any) -> Any:
    return lambda self: 0


def _nothing(real: Any) -> Any:
    return lambda *args, **kwargs: None


# --- the prefill engine -------------------------------------------------------------------


def _ask_nobody(real: Any) -> Any:
    async def ask(self: Claims, holder: Any, answer: Any) -> str:
        return ""

    return ask


def _from_the_end(real: Any) -> Any:
    async def claim(self: Claims, ask: Any, span: Any) -> Any:
        began = self._clock()
        answer = await real(self, ask, span)
        answer.read_by += self._clock() - began
        return answer

    return claim


MUTATIONS = (
    Mutation(
        "a superseded lease forgets its readers",
        _patch(rules, "_retire", lambda real: lambda *args: []),
        "a turn is granted while the one before is read",
        "an open ticket is not forgotten",
    ),
    Mutation(
        "an older turn replaces a later one",
        _patch(rules, "_check_turn", _grant_stale_turns),
        "an older turn ends after a later one",
        "turns never go back",
    ),
    Mutation(
        "ended leases are not remembered",
        _patch(rules, "_add_ended", _nothing),
        "a grant comes twice, the second time after its lease has ended",
        "an ended lease does not come back",
    ),
    Mutation(
        "a revocation before the grant leaves nothing behind",
        _patch(rules, "revoke", _forget_what_was_revoked),
        "a grant comes after its holder has given it up",
        "a lease is stored only while its blocks are kept",
    ),
    Mutation(
        "replicas believe their own clocks",
        _patch(Limits, "passed", lambda real: lambda self, now: now),
        "a replica's clock is ahead of the one that opened a ticket",
        "an open ticket is not forgotten",
    ),
    Mutation(
        "tickets in the store have no end",
        _patch(Limits, "passed", lambda real: lambda self, now: -math.inf),
        "a conversation ends, and its reader never says that it is done",
        "the store still has",
    ),
    Mutation(
        "nobody tidies up after readers that have gone",
        _patch(Sweeper, "_sweep", lambda real: _never),
        "a conversation ends, and its reader never says that it is done",
        "the store still has",
    ),
    Mutation(
        "an ended lease goes although it is read",
        _patch(knowledge, "_lease_write", _delete_instead_of_ending),
        "a conversation ends while it is read",
        "an open ticket is not forgotten",
    ),
    Mutation(
        "a lease does not live with its holder's session",
        _patch(knowledge, "_lease_write", _outlive_the_session),
        "an engine comes back as another incarnation",
        "a new incarnation ends the earlier one's leases",
    ),
    Mutation(
        "leases are written without looking at their revision",
        _patch(service, "LEASE", lambda real: Part(lease=False, info=False)),
        "many readers ask at once",
        "an open ticket is not forgotten",
    ),
    Mutation(
        "one chunk more than is equal is reused",
        _patch(claim_rules, "match", _one_chunk_too_many),
        "a history is edited",
        "what is reused equals the prompt",
    ),
    Mutation(
        "the tail is reused without a look at it",
        _patch(prefix, "tail_digest", lambda real: lambda *args, **kwargs: _EqualsAll()),
        "a history loses its last words",
        "what is reused equals the prompt",
    ),
    Mutation(
        "digests do not depend on the cache salt",
        _patch(prefix, "seed_for", _same_seed_for_all_salts),
        "a turn has another cache salt",
        "what is reused equals the prompt",
    ),
    Mutation(
        "a holder frees blocks under open tickets",
        _patch(HeldLease, "may_free", _free_under_readers),
        "a conversation ends while it is read",
        "no block is freed under a reader",
    ),
    Mutation(
        "a holder waits for ever for a reader",
        _patch(HeldLease, "_keep_only", _tickets_without_an_end),
        "a conversation ends, and its reader never says that it is done",
        "decode-0 keeps",
    ),
    Mutation(
        "a holder frees blocks before its revocation is confirmed",
        _patch(Revocations, "begin", _free_before_the_answer),
        "the lease service is out of reach until the retention is over",
        "blocks of a lease that can be claimed are kept",
    ),
    Mutation(
        "a removal that was not seen counts as seen",
        _patch(LeaseTable, "removed", _gap_or_not),
        "a watch misses what a lost successor knew",
        "blocks with an open ticket are kept",
    ),
    Mutation(
        "a record that is gone was not being read",
        _patch(LeaseTable, "removed", _gone_means_unread),
        "a session runs out while its lease is read",
        "no block is freed under a reader",
    ),
    Mutation(
        "a lease that a record does not name is not being read",
        _patch(table_rules, "_superseded", _not_named_means_unread),
        "a successor is lost while its predecessor is read",
        "no block is freed under a reader",
    ),
    Mutation(
        "what an answer has told is forgotten when the watch is behind",
        _patch(HeldLease, "tickets_were", _watches_are_never_behind),
        "a watch is behind what an answer has told",
        "no block is freed under a reader",
    ),
    Mutation(
        "a lost session leaves no time for readers that were not seen",
        _patch(LeaseTable, "session_lost", _lost_means_gone),
        "an engine is cut off while its lease is read",
        "blocks with an open ticket are kept",
    ),
    Mutation(
        "a session is measured from its last answer",
        _patch(Session, "_lose", _from_the_last_answer),
        "answers to renewals are lost",
        "blocks with an open ticket are kept",
    ),
    Mutation(
        "a holder keeps blocks until somebody confirms that it need not",
        _patch(HeldLease, "hard_deadline", _no_last_moment),
        "the lease service is out of reach until the retention is over",
        "no block outlives its retention and the grace",
    ),
    Mutation(
        "a holder does not hear of renewals",
        _patch(HeldLease, "expires", _nothing),
        "a tool takes longer than the retention",
        "the last turn was no hit",
    ),
    Mutation(
        "a holder does not hear of ends",
        _patch(LeaseTable, "removed", _nothing),
        "a conversation ends",
        "decode-0 keeps",
    ),
    Mutation(
        "a holder promises blocks and forgets it",
        _patch(HeldLease, "confirm", _promise_and_forget),
        "the store elects a leader while a holder is cut off",
        "no block is freed under a reader",
    ),
    Mutation(
        "a holder promises blocks that it has freed",
        _patch(LeaseTable, "confirm", _confirm_what_is_freed),
        "the store is restarted long after a holder was cut off",
        "a hit is on blocks that are kept",
    ),
    Mutation(
        "a holder keeps as much as it likes",
        _patch(Retained, "__len__", _no_budget),
        "more is said than fits the budget",
        "retained blocks stay under their budget",
    ),
    Mutation(
        "a reader does not ask the holder",
        _patch(Claims, "_ask_holder", _ask_nobody),
        "the store elects a leader while a holder is cut off",
        "no block is freed under a reader",
    ),
    Mutation(
        "a reader counts its time from the answers",
        _patch(Claims, "_claim", _from_the_end),
        "answers are slow, and reads end as late as they may",
        "no block is freed under a reader",
    ),
)


async def _never(self: Any, key: str) -> None:
    return None
