"""What a watch of leases reports."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvlease.lease.knowledge import LeaseView
from kvlease.mirror import Change, Mirror
from kvlease.v1.lease_pb2 import WatchLeasesResponse

_Kind = WatchLeasesResponse


def event(change: Change[LeaseView], session_id: str) -> WatchLeasesResponse | None:
    """What a change is to a watch of one session's leases (of all where ``session_id`` is
    empty); None: nothing.

    A record that stops concerning the session, because another holder superseded its lease
    and nobody reads that any more, is shown one last time: it is what tells the old holder.
    """
    before = change.before is not None and _concerns(change.before, session_id)
    if change.after is not None and (before or _concerns(change.after, session_id)):
        return WatchLeasesResponse(kind=_Kind.KIND_UPSERT, lease=change.after.public)
    if change.before is not None and before:
        return WatchLeasesResponse(
            kind=_Kind.KIND_DELETE, lease=change.before.public, after_gap=change.after_gap
        )
    return None


async def events(
    leases: Mirror[LeaseView], session_id: str
) -> AsyncGenerator[WatchLeasesResponse, None]:
    """Everything there is, SYNCED, then what changes, until the mirror stops or has missed
    something: then the watch is started again, and told what there is.

    The caller passes :meth:`~kvlease.mirror.Mirror.fence` first. Raises
    :class:`~kvlease.mirror.FellBehind`.
    """
    with leases.subscribe(session_id) as changes:
        for entry in leases.entries():
            there = event(Change(entry.item.key, None, entry.record), session_id)
            if there is not None:
                yield there
        yield WatchLeasesResponse(kind=_Kind.KIND_SYNCED)
        async for change in changes:
            if not change.key:
                return
            changed = event(change, session_id)
            if changed is not None:
                yield changed


def _concerns(view: LeaseView, session_id: str) -> bool:
    return not session_id or session_id in view.sessions
