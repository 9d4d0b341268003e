"""Revocations by the holder, until the lease service has confirmed them.

The background loop makes the calls; the scheduler's thread begins them, and asks which of
them will bring blocks back soon.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from kvlease.v1 import lease_pb2, lease_pb2_grpc
from kvlease_connector.background import Background
from kvlease_connector.retention import Phase
from kvlease_connector.table import Entry, LeaseTable

log = structlog.get_logger("kvlease.connector.decode")

CALL_TIMEOUT_S = 2.0
RETRY_S = 0.2

SURE_S = 0.25
"""A revocation takes a few milliseconds. One without an answer by then is not waited for:
the engine does what it would do without kvlease."""


@dataclass(slots=True)
class _InFlight:
    began: float
    failed: bool = False


class Revocations:
    """Ends leases of ``table``, which ``lock`` protects."""

    def __init__(
        self,
        stub: lease_pb2_grpc.LeaseServiceAsyncStub,
        background: Background,
        table: LeaseTable,
        lock: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._stub = stub
        self._background = background
        self._table = table
        self._lock = lock
        self._clock = clock
        self._in_flight: dict[str, _InFlight] = {}

    def begin(self, entry: Entry, what: str = "revoke") -> None:
        """Revokes until it is confirmed, or nothing is left to revoke. Any thread."""
        item = _InFlight(self._clock())
        with self._lock:
            self._in_flight[entry.lease.lease_id] = item
        self._background.submit(self._until_confirmed(entry, item), what)

    def begin_once(self, entry: Entry, what: str) -> None:
        """Tries once: for a lease of which the store may, or may not, show something."""
        self._background.submit(self._once(entry), what)

    def stuck(self) -> bool:
        """Whether a revocation cannot be confirmed: it has failed, or has no answer yet.
        Then another one would only give up a lease for nothing. Under the lock."""
        now = self._clock()
        return any(item.failed or now > item.began + SURE_S for item in self._in_flight.values())

    def going(self) -> list[str]:
        """Leases whose blocks come back as soon as their revocation is confirmed: no
        trouble so far, and nobody reads. Under the lock."""
        return [
            lease_id for lease_id, item in self._in_flight.items() if self._goes(lease_id, item)
        ]

    def _goes(self, lease_id: str, item: _InFlight) -> bool:
        entry = self._table.entries.get(lease_id)
        return (
            entry is not None
            and entry.lease.phase is Phase.HELD
            and not entry.lease.tickets
            and not item.failed
            and self._clock() <= item.began + SURE_S
        )

    async def _until_confirmed(self, entry: Entry, item: _InFlight) -> None:
        lease = entry.lease
        try:
            while lease.phase is not Phase.ENDED and self._clock() < lease.hard_deadline:
                if await self._once(entry, quiet=item.failed):
                    return
                item.failed = True
                await asyncio.sleep(RETRY_S)
        finally:
            with self._lock:
                self._in_flight.pop(lease.lease_id, None)

    async def _once(self, entry: Entry, *, quiet: bool = False) -> bool:
        request = lease_pb2.RevokeRequest(
            conversation=entry.conversation,
            lease_id=entry.lease.lease_id,
            session_id=entry.session_id,
            reason=entry.reason,
        )
        try:
            answer = await self._stub.Revoke(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if not quiet:
                log.warning(
                    "revoke failed; trying on while the lease lasts",
                    error=error.details(),
                    conversation_id=entry.conversation.conversation_id,
                    lease_id=entry.lease.lease_id,
                )
            return False
        with self._lock:
            self._table.revoked(
                entry.lease.lease_id,
                [ticket.ticket_id for ticket in answer.open_tickets],
                self._clock(),
            )
        return True
