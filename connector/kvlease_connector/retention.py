"""The rules of retention on an engine: which blocks stay, until when, and which go first.

Pure: no I/O, no threads, no clock but the one passed in. ``now`` and all deadlines are
seconds of one monotonic clock of this process.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


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
    not_before: float = -math.inf
    """Never free earlier: a ticket may have been opened unseen."""
    expires_at: float = math.inf
    """When the retention TTL is over: the holder then revokes."""
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

    def tickets_are(self, ticket_ids: Iterable[str], now: float) -> None:
        """The store shows these tickets open. A ticket lives for the claim grace from its
        opening, so for less than that from when its holder first sees it."""
        self.tickets = {
            ticket_id: self.tickets.get(ticket_id, now + self.claim_grace_s)
            for ticket_id in ticket_ids
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
        if now >= self.hard_deadline:
            return True
        if self.phase is not Phase.ENDED or now < self.not_before:
            return False
        return all(deadline <= now for deadline in self.tickets.values())

    def should_revoke(self, now: float) -> bool:
        """Whether the retention TTL is over and the holder has yet to end the lease."""
        return self.phase is Phase.HELD and not self.revoking and now >= self.expires_at


def keep_value(lease: HeldLease, now: float) -> float:
    """What keeping a lease is worth a block: the tokens it saves, times the chance that
    its turn still comes. Ages of conversations are heavy-tailed, so the chance falls with
    the age as ``1 / (1 + age / 60 s)``: a lease of five minutes' age counts a sixth of a
    fresh one."""
    age = max(0.0, now - lease.granted_at)
    return (lease.num_tokens / max(1, lease.num_blocks)) / (1.0 + age / 60.0)


def victims(leases: Sequence[HeldLease], *, blocks_needed: int, now: float) -> list[HeldLease]:
    """The leases to revoke, cheapest first, until ``blocks_needed`` blocks are on their
    way back. Leases with open tickets and leases that are ending already are not chosen;
    blocks of the latter are counted. May fall short."""
    coming = sum(
        lease.num_blocks for lease in leases if lease.phase is Phase.ENDED or lease.revoking
    )
    candidates = sorted(
        (
            lease
            for lease in leases
            if lease.phase is Phase.HELD and not lease.revoking and not lease.tickets
        ),
        key=lambda lease: keep_value(lease, now),
    )
    chosen = []
    for lease in candidates:
        if coming >= blocks_needed:
            break
        chosen.append(lease)
        coming += lease.num_blocks
    return chosen


def over_budget(retained_blocks: int, total_blocks: int, max_fraction: float) -> int:
    """How many blocks the engine keeps beyond its budget; 0 if none."""
    return max(0, retained_blocks - int(total_blocks * max_fraction))
