"""The rules of retention on an engine: which blocks stay, and until when. (Which go first:
:mod:`kvlease_connector.value`.)

Pure: no I/O, no threads, no clock but the one passed in. ``now`` and all deadlines are
seconds of one monotonic clock of this process.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

SAME_RATE = 0.99
"""What a second here is worth elsewhere, at least. Clocks of machines run at rates that
differ by 0.01 %; this is on the safe side by far, and costs 0.3 s of 30."""


class Phase(enum.Enum):
    """Where a lease stands, as far as its holder knows."""

    GRANTING = "granting"
    """Asked for; it may or may not be readable in the store."""
    HELD = "held"
    """Readable in the store: claims may come at any time."""
    ENDED = "ended"
    """Gone from the store, or refused: no new ticket can be opened."""


@dataclass(slots=True)
class HeldLease:
    """A decode engine's view of one of its leases.

    Blocks may be freed when :meth:`may_free` says so, and not before.
    """

    lease_id: str
    num_blocks: int
    num_tokens: int
    granted_at: float
    retention_s: float
    claim_grace_s: float
    phase: Phase = Phase.GRANTING
    tickets: dict[str, float] = field(default_factory=dict)
    """Open tickets and the latest moment their reads may end."""
    unseen: set[str] = field(default_factory=set)
    """Those that a reader or an answer has told of, and the watch has not shown yet."""
    closed: set[str] = field(default_factory=set)
    """Those that were shown, and then were not: their reads are completed."""
    not_before: float = -math.inf
    """Never free earlier: a ticket may have been opened unseen."""
    expires_at: float = math.inf
    """When the retention TTL is over: the holder then revokes."""
    expire_time: float | None = None
    """The same moment as the store shows it, by a clock that may differ from ours."""
    revoking: bool = False

    def __post_init__(self) -> None:
        self.expires_at = self.granted_at + self.retention_s

    @property
    def hard_deadline(self) -> float:
        """Blocks never outlive the retention TTL by more than the claim grace, whatever
        the control plane says or does not say."""
        return self.expires_at + self.claim_grace_s

    def granted(self, now: float, retention_s: float) -> None:
        """The lease service has stored the lease; its retention counts from then, so at
        the latest from the moment its answer came."""
        if self.phase is Phase.GRANTING:
            self.phase = Phase.HELD
            self.expires_at = now + retention_s

    def expires(self, expire_time: float, now: float) -> None:
        """The store shows this end of the retention. Only by how much it has moved is
        taken over: that does not depend on the difference of the clocks, and the
        differences between replicas' clocks do not add up.

        It never moves into the past: what readers were promised just now is kept."""
        if self.expire_time is not None and expire_time != self.expire_time:
            self.expires_at = max(now, self.expires_at + expire_time - self.expire_time)
        self.expire_time = expire_time

    def confirm(self, ticket_id: str, now: float) -> float:
        """A reader asks whether it may read. The seconds for which it may, by its own
        clock; 0: it may not. The blocks are kept at least so long, unless the ticket is
        completed."""
        until = min(self.tickets.get(ticket_id, now + self.claim_grace_s), self.hard_deadline)
        if until <= now or ticket_id in self.closed:
            return 0.0
        if ticket_id not in self.tickets:
            self.tickets[ticket_id] = now + self.claim_grace_s
            self.unseen.add(ticket_id)
        return (until - now) * SAME_RATE

    def tickets_are(self, ticket_ids: Iterable[str], now: float) -> None:
        """A watch shows these tickets open, and no others. A ticket lives for the claim
        grace from its opening, so for less than that from when its holder first sees it.

        Readers and answers may be ahead of the watch: a ticket that it has not shown yet
        is not one that was closed."""
        shown = set(ticket_ids)
        self._keep_only(shown | self.unseen, now)
        self.unseen -= shown

    def tickets_were(self, ticket_ids: Iterable[str], now: float) -> None:
        """An answer says that these tickets were open, and no others. A watch may have
        shown more since, or less."""
        told = set(ticket_ids) - self.closed
        self.unseen |= told - self.tickets.keys()
        self._keep_only(told | self.unseen, now)

    def _keep_only(self, ticket_ids: set[str], now: float) -> None:
        self.closed |= self.tickets.keys() - ticket_ids
        self.tickets = {
            ticket_id: self.tickets.get(ticket_id, now + self.claim_grace_s)
            for ticket_id in sorted(ticket_ids)
        }

    def end(self, now: float, *, unseen_tickets: bool) -> None:
        """The lease is gone from the store. With ``unseen_tickets`` the last state was not
        seen: a ticket opened just before would live for the claim grace."""
        if self.phase is not Phase.ENDED:
            self.phase = Phase.ENDED
            if unseen_tickets:
                self.not_before = now + self.claim_grace_s

    def may_free(self, now: float) -> bool:
        """Whether nobody can be reading, or start to read, these blocks."""
        if self.phase is not Phase.ENDED and now < self.expires_at:
            return False  # nearly always, for each lease on each step: so it comes first
        if now >= self.hard_deadline:
            return True
        if self.phase is not Phase.ENDED or now < self.not_before:
            return False
        return all(deadline <= now for deadline in self.tickets.values())

    def should_revoke(self, now: float) -> bool:
        """Whether the retention TTL is over and the holder has yet to end the lease."""
        return self.phase is Phase.HELD and not self.revoking and now >= self.expires_at
