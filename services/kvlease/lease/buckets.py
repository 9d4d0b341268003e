"""Sessions that give conversations' records an end.

A record of a conversation should go some time after the conversation's last turn. A
session each would be one etcd lease a conversation; one for all would never end. So a
process opens a session that nobody keeps alive, uses it for a while, then opens the next:
a conversation's record moves to the newest whenever it is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvlease.store.base import Store

USE_S = 600
"""A session takes records for so long. Its TTL is longer by as much, so the last record
lives for the whole conversation TTL too."""

USE_PUTS = 400
"""etcd attaches a key to a lease in time that grows with the keys it has; a few hundred
cost nothing that can be measured."""


class Buckets:
    """Hands out the session for the next conversation record."""

    def __init__(
        self, store: Store, conversation_ttl_s: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._ttl_s = conversation_ttl_s + USE_S
        self._clock = clock
        self._opening = asyncio.Lock()
        self._session_id: str | None = None
        self._opened_at = 0.0
        self._puts = 0

    async def take(self) -> str:
        """The session for one put. Raises
        :class:`~kvlease.store.base.StoreUnavailable`."""
        async with self._opening:
            if self._session_id is None or self._is_used_up():
                self._opened_at = self._clock()
                self._session_id = await self._store.open_session(self._ttl_s)
                self._puts = 0
            self._puts += 1
            return self._session_id

    def discard(self) -> None:
        """The store has lost the session (or may have): the next put opens another."""
        self._session_id = None

    def _is_used_up(self) -> bool:
        return self._puts >= USE_PUTS or self._clock() - self._opened_at >= USE_S
