"""Router replicas: each has a record in a session of its own."""

from __future__ import annotations

from kvlease import serving, times
from kvlease.registry import keys, rules
from kvlease.store.base import Conflict, Put, SessionLost, Store, StoreUnavailable, Versioned
from kvlease.v1 import registry_pb2
from kvlease.v1.registry_pb2 import AnnounceRouterResponse, ListRoutersResponse, Replica

MAX_TRIES = 8


class Routers:
    """What the registry knows of routers. Which session is whose stands in the store, so
    any registry replica can prolong it."""

    def __init__(self, store: Store, session_ttl_s: int) -> None:
        self._store = store
        self._session_ttl_s = session_ttl_s

    async def announce(self, replica: Replica) -> AnnounceRouterResponse:
        """Stores the record, or prolongs its session."""
        rules.check_replica(replica)
        key = keys.router(replica.replica_id)
        for attempt in range(MAX_TRIES):
            await serving.back_off(attempt)
            try:
                left_s = await self._announce_once(key, replica)
            except SessionLost:
                continue  # it ended since it was read: the next try opens a new one
            if left_s is not None:
                return AnnounceRouterResponse(session_ttl=times.duration(left_s))
        raise StoreUnavailable(f"the record of router {replica.replica_id} changes all the time")

    async def _announce_once(self, key: str, replica: Replica) -> float | None:
        """Seconds that the record will live; None if another write came between."""
        item = (await self._store.get(key))[key]
        value = replica.SerializeToString(deterministic=True)
        if item is None or item.session_id is None:
            return await self._store_new(key, value, item)
        left_s = await self._store.keep_alive(item.session_id)
        if item.value != value:
            put = Put(key, value, item.session_id)
            if isinstance(await self._store.commit({key: item.revision}, [put]), Conflict):
                return None
        return left_s

    async def _store_new(self, key: str, value: bytes, item: Versioned | None) -> float | None:
        session_id = await self._store.open_session(self._session_ttl_s)
        expect = {key: item.revision if item else 0}
        if isinstance(await self._store.commit(expect, [Put(key, value, session_id)]), Conflict):
            await self._store.close_session(session_id)
            return None
        return float(self._session_ttl_s)

    async def list(self) -> ListRoutersResponse:
        """The routers that run, by start_time."""
        found = [Replica.FromString(item.value) for item in await self._store.list(keys.ROUTERS)]
        found.sort(key=lambda replica: (times.moment(replica.start_time), replica.replica_id))
        return registry_pb2.ListRoutersResponse(replicas=found)
