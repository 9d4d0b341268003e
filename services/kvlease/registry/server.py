"""The registry's gRPC face: from requests through the rules to the store, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import structlog

from kvlease import pages, rpc, serving, times
from kvlease.config import Settings
from kvlease.mirror import Change, Entry, FellBehind, Mirror
from kvlease.registry import keys, metrics, rules
from kvlease.registry.routers import Routers
from kvlease.store.base import Conflict, Put, SessionLost, Store, StoreUnavailable, Versioned
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.v1.registry_pb2 import Engine, EngineRole

log = structlog.get_logger("kvlease.registry")

SERVICE = "kvlease.v1.Registry"

MAX_TRIES = 16
"""Of one write. Only replicas and engines that write the same record at the same moment
conflict, so more means that something is wrong."""

Watched = registry_pb2.WatchEnginesResponse


def parse_engine(value: bytes) -> Engine:
    """A stored engine record."""
    return Engine.FromString(value)


class RegistryServer(registry_pb2_grpc.RegistryServicer):
    """Implements ``kvlease.v1.Registry``; the promises stand in its proto file."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        engines: Mirror[Engine],
        monitor: serving.StoreMonitor,
        clock: times.Clock = times.wall_clock,
    ) -> None:
        self._session_ttl_s = settings.session_ttl
        self._store = store
        self._engines = engines
        self._monitor = monitor
        self._clock = clock
        self._routers = Routers(store, settings.session_ttl)

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: rpc.Context
    ) -> registry_pb2.RegisterResponse:
        return await self._answer(context, lambda: self._register(request.engine))

    async def KeepAlive(
        self, request: registry_pb2.KeepAliveRequest, context: rpc.Context
    ) -> registry_pb2.KeepAliveResponse:
        return await self._answer(context, lambda: self._keep_alive(request))

    async def Drain(self, request: registry_pb2.DrainRequest, context: rpc.Context) -> Engine:
        return await self._answer(context, lambda: self._drain(request.role, request.engine_id))

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: rpc.Context
    ) -> registry_pb2.DeregisterResponse:
        return await self._answer(context, lambda: self._deregister(request.session_id))

    async def GetEngine(
        self, request: registry_pb2.GetEngineRequest, context: rpc.Context
    ) -> Engine:
        return await self._answer(context, lambda: self._get(request.role, request.engine_id))

    async def ListEngines(
        self, request: registry_pb2.ListEnginesRequest, context: rpc.Context
    ) -> registry_pb2.ListEnginesResponse:
        return await self._answer(context, lambda: self._list(request))

    async def AnnounceRouter(
        self, request: registry_pb2.AnnounceRouterRequest, context: rpc.Context
    ) -> registry_pb2.AnnounceRouterResponse:
        return await self._answer(context, lambda: self._routers.announce(request.replica))

    async def ListRouters(
        self, request: registry_pb2.ListRoutersRequest, context: rpc.Context
    ) -> registry_pb2.ListRoutersResponse:
        return await self._answer(context, self._routers.list)

    async def WatchEngines(
        self, request: registry_pb2.WatchEnginesRequest, context: rpc.Context
    ) -> AsyncIterator[Watched]:
        async def begin() -> None:
            rules.check_filter(request.role)
            await self._engines.fence()

        await self._answer(context, begin)

        def wanted(engine: Engine | None) -> bool:
            return engine is not None and rules.matches(engine, request.role, request.model)

        with self._engines.subscribe() as changes:
            for entry in self._engines.entries():
                if wanted(entry.record):
                    yield Watched(kind=Watched.KIND_UPSERT, engine=entry.record)
            yield Watched(kind=Watched.KIND_SYNCED)
            try:
                async for change in changes:
                    if wanted(change.after):
                        yield Watched(kind=Watched.KIND_UPSERT, engine=change.after)
                    elif wanted(change.before):
                        yield Watched(kind=Watched.KIND_DELETE, engine=change.before)
            except FellBehind:
                await rpc.abort(context, *serving.FELL_BEHIND)

    async def _answer(
        self, context: rpc.Context, work: Callable[[], Awaitable[serving.Answer]]
    ) -> serving.Answer:
        return await serving.answer(self._monitor, context, work)

    async def _register(self, engine: Engine) -> registry_pb2.RegisterResponse:
        rules.check_engine(engine)
        key = keys.engine(engine.role, engine.engine_id)
        previous = (await self._store.get(key))[key]
        for attempt in range(MAX_TRIES):
            await serving.back_off(attempt)
            if previous is not None and previous.session_id is not None:
                # Its leases are gone when this returns: a handle of a process that is no
                # more, or that believes its session lost, is never handed out.
                await self._store.close_session(previous.session_id)
            stored, result = await self._try_register(key, engine, previous)
            if not isinstance(result, Conflict):
                metrics.REGISTRATIONS.labels(*metrics.ids(stored)).inc()
                log.info(
                    "engine registered",
                    engine_id=engine.engine_id,
                    incarnation=engine.incarnation,
                    session_id=stored.session_id,
                    ended_session_id=previous.session_id if previous else None,
                )
                return registry_pb2.RegisterResponse(engine=stored)
            previous = result.current[key]
        raise serving.unavailable(
            f"several processes register {engine.engine_id!r} at the same time: give each "
            "engine an engine_id of its own"
        )

    async def _try_register(
        self, key: str, engine: Engine, previous: Versioned | None
    ) -> tuple[Engine, object]:
        session_id = await self._store.open_session(self._session_ttl_s)
        stored = rules.registered(
            engine,
            parse_engine(previous.value) if previous else None,
            session_id=session_id,
            session_ttl_s=self._session_ttl_s,
            now=self._clock(),
        )
        result = await self._store.commit(
            {key: 0}, [Put(key, stored.SerializeToString(), session_id)]
        )
        if isinstance(result, Conflict):
            await self._store.close_session(session_id)
        else:
            self._note(key, stored, result.revision, session_id)
        return stored, result

    async def _keep_alive(
        self, request: registry_pb2.KeepAliveRequest
    ) -> registry_pb2.KeepAliveResponse:
        rules.check_keep_alive(request)
        key = keys.engine(request.role, request.engine_id)
        entry = self._engines.latest(key)
        if entry is None or not rules.owns_session(entry.record, request):
            entry = await self._read(key)
        if entry is None or not rules.owns_session(entry.record, request):
            raise _session_lost(request)
        try:
            left_s = await self._store.keep_alive(request.session_id)
            engine = await self._publish_usage(entry, request)
        except SessionLost:
            raise _session_lost(request) from None
        return registry_pb2.KeepAliveResponse(
            session_ttl=times.duration(left_s), state=engine.state
        )

    async def _publish_usage(
        self, entry: Entry[Engine], request: registry_pb2.KeepAliveRequest
    ) -> Engine:
        def with_usage(engine: Engine) -> Engine | None:
            if not rules.owns_session(engine, request):
                raise _session_lost(request)
            if not request.HasField("usage") or engine.usage == request.usage:
                return None
            changed = Engine()
            changed.CopyFrom(engine)
            changed.usage.CopyFrom(request.usage)
            return changed

        engine = await self._rewrite(entry, with_usage)
        if engine is None:
            raise _session_lost(request)
        return engine

    async def _rewrite(
        self, entry: Entry[Engine] | None, change: Callable[[Engine], Engine | None]
    ) -> Engine | None:
        """Stores what ``change`` makes of the record (None: leave it), in the record's own
        session. Returns the record as it is then; None if it is gone."""
        for attempt in range(MAX_TRIES):
            if entry is None:
                return None
            await serving.back_off(attempt)
            changed = change(entry.record)
            if changed is None:
                return entry.record
            item = entry.item
            result = await self._store.commit(
                {item.key: item.revision},
                [Put(item.key, changed.SerializeToString(), item.session_id)],
            )
            if not isinstance(result, Conflict):
                self._note(item.key, changed, result.revision, item.session_id)
                return changed
            entry = _entry(result.current[item.key])
        raise StoreUnavailable("the engine's record changes all the time: try again")

    async def _drain(self, role: EngineRole.ValueType, engine_id: str) -> Engine:
        rules.check_name(role, engine_id)
        try:
            engine = await self._rewrite(await self._read(keys.engine(role, engine_id)), _draining)
        except SessionLost:
            engine = None
        if engine is None:
            raise _not_found(role, engine_id)
        log.info("engine drains", engine_id=engine_id, incarnation=engine.incarnation)
        return engine

    async def _deregister(self, session_id: str) -> registry_pb2.DeregisterResponse:
        rules.check_session_id(session_id)
        for entry in self._engines.entries():
            if entry.record.session_id == session_id:
                try:
                    # So that whoever sees the record disappear can tell this from a crash.
                    await self._rewrite(entry, _draining)
                except SessionLost:
                    break
                log.info("engine deregistered", engine_id=entry.record.engine_id)
        await self._store.close_session(session_id)
        return registry_pb2.DeregisterResponse()

    async def _get(self, role: EngineRole.ValueType, engine_id: str) -> Engine:
        rules.check_name(role, engine_id)
        entry = await self._read(keys.engine(role, engine_id))
        if entry is None:
            raise _not_found(role, engine_id)
        return entry.record

    async def _list(
        self, request: registry_pb2.ListEnginesRequest
    ) -> registry_pb2.ListEnginesResponse:
        rules.check_filter(request.role)
        await self._engines.fence()
        found, token = pages.page(
            self._engines,
            request.page_size,
            request.page_token,
            lambda _, engine: rules.matches(engine, request.role, request.model),
        )
        return registry_pb2.ListEnginesResponse(engines=found, next_page_token=token)

    def _note(self, key: str, engine: Engine, revision: int, session_id: str | None) -> None:
        item = Versioned(key, engine.SerializeToString(), revision, session_id)
        self._engines.note_written(key, revision, Entry(item, engine))

    async def _read(self, key: str) -> Entry[Engine] | None:
        return _entry((await self._store.get(key))[key])


async def follow_engines(engines: Mirror[Engine], collector: metrics.EnginesCollector) -> None:
    """Counts and logs engines that disappear without having been drained or deregistered,
    and keeps the metrics' account of what they retain; runs until the mirror stops."""
    with engines.subscribe() as changes:
        for entry in engines.entries():
            _note(Change(entry.item.key, None, entry.record), collector)
        async for change in changes:
            if change.key:
                _note(change, collector)


def _note(change: Change[Engine], collector: metrics.EnginesCollector) -> None:
    collector.seen(change)
    gone = change.before
    if change.after is not None:
        # So that its first loss is seen as an increase from 0.
        metrics.SESSIONS_LOST.labels(*metrics.ids(change.after))
    elif gone is not None and not rules.is_draining(gone):
        metrics.SESSIONS_LOST.labels(*metrics.ids(gone)).inc()
        log.warning(
            "engine session lost",
            engine_id=gone.engine_id,
            incarnation=gone.incarnation,
            session_id=gone.session_id,
        )


def _entry(item: Versioned | None) -> Entry[Engine] | None:
    return None if item is None else Entry(item, parse_engine(item.value))


def _draining(engine: Engine) -> Engine | None:
    if rules.is_draining(engine):
        return None
    changed = Engine()
    changed.CopyFrom(engine)
    changed.state = registry_pb2.ENGINE_STATE_DRAINING
    return changed


def _session_lost(request: registry_pb2.KeepAliveRequest) -> rpc.Refused:
    return rpc.Refused(
        grpc.StatusCode.NOT_FOUND,
        "SESSION_LOST",
        f"session {request.session_id} of {request.engine_id!r} has ended: register again",
    )


def _not_found(role: EngineRole.ValueType, engine_id: str) -> rpc.Refused:
    return rpc.Refused(
        grpc.StatusCode.NOT_FOUND,
        "ENGINE_NOT_FOUND",
        f"no {keys.ROLE_WORDS[role]} engine is registered as {engine_id!r}: `kvlease engines` "
        "lists those that are",
    )
