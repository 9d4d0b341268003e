"""A decode engine's leases, as it knows them: what it hears goes in, what it must do comes
out.

Pure, like :mod:`kvlease_connector.retention`: no I/O, no threads, no clock but the one
passed in. Records are the protobuf messages of the API.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvlease import times
from kvlease.v1 import common_pb2, lease_pb2
from kvlease_connector.retention import HeldLease, Phase

TRY_AGAIN_S = 0.2
"""A refusal that comes sooner answers a grant's first try."""


@dataclass(slots=True)
class Entry:
    """One lease of the table, from its grant to the end of its blocks."""

    conversation: common_pb2.Conversation
    session_id: str
    lease: HeldLease
    asked_at: float
    """When the grant was sent first."""
    held_since: float = math.inf
    """When the grant was answered."""
    seen_in_watch: bool = False
    retiring_in: str = ""
    """The lease in whose record this one was last seen among the retiring."""
    reason: lease_pb2.EndReason.ValueType = lease_pb2.END_REASON_EXPIRED
    """Why the holder revokes it, if it does."""


@dataclass(slots=True)
class LeaseTable:
    """The leases whose blocks an engine keeps. Not thread-safe."""

    entries: dict[str, Entry] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    """Those under which leases were asked for."""

    def add(self, entry: Entry) -> None:
        """A grant is about to be sent."""
        self.entries[entry.lease.lease_id] = entry
        self.sessions.add(entry.session_id)

    def granted(
        self, lease_id: str, record: lease_pb2.Lease, retention_s: float, now: float
    ) -> None:
        """The lease service has answered a grant with the stored record."""
        entry = self.entries.get(lease_id)
        if entry is None:
            return
        if entry.lease.phase is Phase.GRANTING:
            entry.lease.granted(now, retention_s)
            entry.lease.expires(times.moment(record.expire_time), now)
        entry.held_since = now
        # The grant has superseded, at once, what was held when it was asked for.
        for other in self._of(record.conversation):
            held_before = other.held_since < entry.asked_at or _follows(record, other)
            if other is not entry and held_before:
                _superseded(other, record, now, other.lease.tickets_were)

    def refused(self, lease_id: str, now: float) -> None:
        """The lease service has refused a grant."""
        if (entry := self.entries.get(lease_id)) is not None:
            # An earlier try, whose answer was lost, may have been granted and claimed.
            entry.lease.end(now, unseen_tickets=now >= entry.asked_at + TRY_AGAIN_S)

    def confirm(self, lease_id: str, ticket_id: str, now: float) -> float:
        """A reader asks: for how many seconds it may read the lease's blocks. 0: they are
        not kept (any more)."""
        entry = self.entries.get(lease_id)
        return 0.0 if entry is None else entry.lease.confirm(ticket_id, now)

    def show(self, record: lease_pb2.Lease, now: float) -> list[Entry]:
        """A conversation's record, as a watch shows it. Returns leases that are readable
        in the store although the holder has given them up: they must be revoked again.

        Any other lease of the conversation has ended, if the record follows it, or if a
        watch has shown it before: no record is shown that is older than one shown before.
        """
        entry = self.entries.get(record.lease_id)
        for other in self._of(record.conversation):
            ended = other.lease.phase is Phase.ENDED or other.seen_in_watch
            if other is not entry and (ended or _follows(record, other)):
                _superseded(other, record, now, other.lease.tickets_are)
        if entry is None:
            return self._stray(record)
        lease, entry.seen_in_watch = entry.lease, True
        lease.tickets_are([ticket.ticket_id for ticket in record.tickets], now)
        if record.state == lease_pb2.LEASE_STATE_ENDING:
            lease.end(now, unseen_tickets=False)
        elif lease.phase is Phase.ENDED:
            return [entry]
        elif lease.phase is Phase.HELD:
            lease.expires(times.moment(record.expire_time), now)
        return []

    def _stray(self, record: lease_pb2.Lease) -> list[Entry]:
        """The lease of a record, if it is ours and was stored after its blocks were freed:
        its grant was given up, and came late."""
        ours = record.holder_session_id in self.sessions
        if not ours or record.state != lease_pb2.LEASE_STATE_HELD:
            return []
        nothing = HeldLease(record.lease_id, 0, 0, 0.0, 0.0, 0.0, Phase.ENDED)
        entry = Entry(record.conversation, record.holder_session_id, nothing, asked_at=0.0)
        entry.reason = lease_pb2.END_REASON_BUDGET
        return [entry]

    def removed(self, record: lease_pb2.Lease, now: float, *, after_gap: bool) -> None:
        """A conversation's record is gone from the store; ``record`` is what it was last.

        It may have gone with a session that this engine still believes in, so tickets that
        were open then count as open.
        """
        for entry in self._of(record.conversation):
            lease = entry.lease
            named = _tickets_of(lease.lease_id, record)
            if named is not None:
                if not after_gap:
                    lease.tickets_are(named, now)
                lease.end(now, unseen_tickets=after_gap)
            elif lease.phase is Phase.HELD and entry.seen_in_watch:
                lease.end(now, unseen_tickets=True)

    def synced(self, shown: Iterable[str], started: float, now: float) -> None:
        """A watch that started at ``started`` has shown everything. Leases that were held
        by then and are not among it have ended unseen."""
        shown = set(shown)
        for lease_id, entry in self.entries.items():
            held = entry.lease.phase is Phase.HELD and entry.held_since < started
            if held and lease_id not in shown:
                entry.lease.end(now, unseen_tickets=True)

    def session_lost(self, session_id: str, ended_by: float) -> None:
        """A session is over, and with it its leases: at ``ended_by`` at the latest."""
        for entry in self.entries.values():
            if entry.session_id == session_id:
                entry.lease.end(ended_by, unseen_tickets=True)

    def revoked(self, lease_id: str, open_tickets: Iterable[str], now: float) -> None:
        """The lease service has confirmed that a lease has ended."""
        if (entry := self.entries.get(lease_id)) is not None:
            entry.lease.tickets_were(open_tickets, now)
            # A grant of it that comes later is refused.
            entry.lease.end(now, unseen_tickets=False)

    def take_due(self, now: float) -> list[Entry]:
        """Leases whose retention TTL is over, to be revoked; each is returned once."""
        due = [entry for entry in self.entries.values() if entry.lease.should_revoke(now)]
        for entry in due:
            entry.lease.revoking = True
        return due

    def revocable(self) -> list[Entry]:
        """Leases that the holder may give up: nobody reads them, and they are not ending."""
        return [
            entry
            for entry in self.entries.values()
            if entry.lease.phase is Phase.HELD
            and not entry.lease.revoking
            and not entry.lease.tickets
        ]

    def give_up(self, lease_ids: Iterable[str]) -> list[Entry]:
        """These are about to be revoked, for their blocks' sake."""
        entries = [self.entries[lease_id] for lease_id in lease_ids]
        for entry in entries:
            entry.lease.revoking = True
            entry.reason = lease_pb2.END_REASON_BUDGET
        return entries

    def take_free(self, now: float) -> list[Entry]:
        """Leases whose blocks nobody can be reading; they leave the table."""
        free = [entry for entry in self.entries.values() if entry.lease.may_free(now)]
        for entry in free:
            del self.entries[entry.lease.lease_id]
        return free

    def _of(self, conversation: common_pb2.Conversation) -> list[Entry]:
        return [e for e in self.entries.values() if e.conversation == conversation]


def _superseded(
    entry: Entry,
    record: lease_pb2.Lease,
    now: float,
    tickets: Callable[[Iterable[str], float], None],
) -> None:
    """Another lease has the conversation's record. What is known of tickets of this one?

    All, if the record names it. If it does not, nobody reads, provided that the record
    replaced this very lease, or one whose record named it: every ticket was then carried
    along until it was completed. Else a record in between was lost with its holder, and
    this lease's tickets with it: those that were seen count as open, others as possible.
    """
    lease = entry.lease
    named = _tickets_of(lease.lease_id, record)
    if named is not None:
        entry.retiring_in = record.lease_id
        tickets(named, now)
        lease.end(now, unseen_tickets=False)
    elif _follows(record, entry):
        tickets([], now)
        lease.end(now, unseen_tickets=False)
    else:
        lease.end(now, unseen_tickets=True)


def _follows(record: lease_pb2.Lease, entry: Entry) -> bool:
    """Whether the record names a lease, or carries on from one that did."""
    if _tickets_of(entry.lease.lease_id, record) is not None:
        return True
    if record.superseded_lease_id == entry.lease.lease_id:
        return True
    before = entry.retiring_in
    return bool(before) and before in (record.lease_id, record.superseded_lease_id)


def _tickets_of(lease_id: str, record: lease_pb2.Lease) -> list[str] | None:
    """The open tickets of a lease, in the record; None if the record does not name it."""
    if lease_id == record.lease_id:
        return [ticket.ticket_id for ticket in record.tickets]
    for item in record.retiring:
        if item.lease_id == lease_id:
            return [ticket.ticket_id for ticket in item.tickets]
    return None
