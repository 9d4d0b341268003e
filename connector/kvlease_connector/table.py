"""A decode engine's leases, as it knows them: what it hears goes in, what it must do comes
out.

Pure, like :mod:`kvlease_connector.retention`: no I/O, no threads, no clock but the one
passed in. Records are the protobuf messages of the API.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvlease.v1 import common_pb2, lease_pb2
from kvlease_connector.retention import HeldLease, Phase


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
    reason: lease_pb2.EndReason.ValueType = lease_pb2.END_REASON_EXPIRED
    """Why the holder revokes it, if it does."""


@dataclass(slots=True)
class LeaseTable:
    """The leases whose blocks an engine keeps. Not thread-safe."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """A grant is about to be sent."""
        self.entries[entry.lease.lease_id] = entry

    def granted(
        self, lease_id: str, record: lease_pb2.Lease, retention_s: float, now: float
    ) -> None:
        """The lease service has answered a grant with the stored record."""
        entry = self.entries.get(lease_id)
        if entry is None:
            return
        entry.lease.granted(now, retention_s)
        entry.held_since = now
        # The grant has superseded, at once, what was held when it was asked for.
        self.show(record, now, held_before=entry.asked_at)

    def refused(self, lease_id: str, now: float) -> None:
        """The lease service has refused a grant."""
        if (entry := self.entries.get(lease_id)) is not None:
            entry.lease.end(now, unseen_tickets=False)

    def show(
        self, record: lease_pb2.Lease, now: float, *, held_before: float = -math.inf
    ) -> list[Entry]:
        """A conversation's record, as it is in the store. Returns leases that are readable
        there although the holder has given them up: they must be revoked again.

        A lease that the record does not name has ended, if a watch has shown it before
        (watches show every revision in order), or if it was held before ``held_before``.
        """
        retiring = {item.lease_id: item for item in record.retiring}
        again = []
        for entry in self._of(record.conversation):
            lease = entry.lease
            if lease.lease_id == record.lease_id:
                entry.seen_in_watch = True
                lease.tickets_are([t.ticket_id for t in record.tickets], now)
                if record.state == lease_pb2.LEASE_STATE_ENDING:
                    lease.end(now, unseen_tickets=False)
                elif lease.phase is Phase.ENDED:
                    again.append(entry)
            elif lease.lease_id in retiring:
                lease.tickets_are([t.ticket_id for t in retiring[lease.lease_id].tickets], now)
                lease.end(now, unseen_tickets=False)
            elif lease.phase is Phase.ENDED:
                lease.tickets_are([], now)
            elif entry.seen_in_watch or entry.held_since < held_before:
                lease.tickets_are([], now)
                lease.end(now, unseen_tickets=False)
        return again

    def removed(self, record: lease_pb2.Lease, now: float, *, after_gap: bool) -> None:
        """A conversation's record is gone from the store."""
        for entry in self._of(record.conversation):
            lease = entry.lease
            if lease.lease_id == record.lease_id:
                if not after_gap:
                    # Our own record under a live session goes with its last ticket.
                    lease.tickets_are([], now)
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
            entry.lease.tickets_are(open_tickets, now)
            # An unanswered grant may still be stored after this; see show.
            entry.lease.end(now, unseen_tickets=entry.lease.phase is Phase.GRANTING)

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
