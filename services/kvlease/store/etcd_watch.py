"""A watch that goes on by itself.

It lists what exists at one revision, then follows the changes after it. When the stream
ends it resumes after the last revision it has seen; when etcd has forgotten the changes
since (a compaction), or has come back with older data, it lists again and reports the
difference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import grpc
import structlog

from kvlease.store.base import StoreUnavailable, Versioned, WatchEvent
from kvlease.store.etcd_api import Message, WatchProgressRequest, pb, prefix_end
from kvlease.store.etcd_channel import Members
from kvlease.store.etcd_errors import EtcdError, Kind
from kvlease.store.etcd_list import list_keys
from kvlease.store.etcd_stream import Stream
from kvlease.store.view import View

_log = structlog.get_logger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Watch:
    """One watch of the keys under a prefix."""

    def __init__(self, members: Members, prefix: str) -> None:
        self._members = members
        self._prefix = prefix
        self._view = View()
        self._next = 0
        """The first revision not yet reported; 0: nothing is known, so list."""
        self._epoch = 0

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """Never raises :class:`StoreUnavailable`; ends when the store is closed."""
        failures = 0
        while not self._members.closed:
            stream: Stream | None = None
            try:
                if await self._must_list():
                    for event in self._view.replace(await self._list()):
                        yield event
                stream = await self._follow()
                if failures:
                    _log.info("watch_resumed", prefix=self._prefix, after=failures)
                failures = 0
                while True:
                    for event in self._events_of(await self._receive(stream)):
                        yield event
            except StoreUnavailable as error:
                if self._compacted(error) or self._members.closed:
                    continue
                failures += 1
                if failures == 1:
                    _log.warning("watch_interrupted", prefix=self._prefix, error=str(error))
            finally:
                if stream is not None:
                    await stream.close()
            await self._members.pause(
                min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 10), _LONGEST_PAUSE_S)
            )

    def _compacted(self, error: StoreUnavailable) -> bool:
        if isinstance(error, EtcdError) and error.kind is Kind.COMPACTED:
            _log.info("watch_compacted", prefix=self._prefix, revision=self._next)
            self._next = 0
            return True
        return False

    async def _must_list(self) -> bool:
        """Whether to list before following: at the start, after a compaction, and when
        etcd's state is older than what was seen (restored from a backup, or empty)."""
        if self._next == 0:
            return True
        head = await self._members.call("Range", self._members.keyspace.range("/"))
        if head.header.revision >= self._next - 1 and self._epoch == self._members.epoch:
            return False
        _log.warning("watch_store_went_back", prefix=self._prefix, revision=self._next)
        return True

    async def _list(self) -> Sequence[Versioned]:
        self._epoch = self._members.epoch
        items, revision = await list_keys(self._members, self._prefix)
        self._next = revision + 1
        return items

    async def _follow(self) -> Stream:
        """Opens a stream from the first revision not yet reported; returns it when etcd
        has confirmed it."""
        start = self._members.keyspace.encode(self._prefix)
        request = pb.WatchCreateRequest(
            key=start,
            range_end=prefix_end(start),
            start_revision=self._next,
            # Every ten minutes etcd tells how far it is, so that a quiet watch does not
            # fall behind a compaction.
            progress_notify=True,
        )
        stream = await self._members.stream("Watch")
        try:
            await stream.send(pb.WatchRequest(create_request=request), self._members.timeout_s)
            response = await stream.receive(self._members.timeout_s)
            if response is None:
                raise stream.silent()
            self._check(stream, response)
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _receive(self, stream: Stream) -> Message:
        """The next message. A member that says nothing for the request deadline is asked
        whether it is there (etcd 3.4 and later answer), and given as long to answer."""
        timeout_s = self._members.timeout_s
        response = await stream.receive(timeout_s)
        if response is None:
            ask = pb.WatchRequest(progress_request=WatchProgressRequest())
            await stream.send(ask, timeout_s)
            response = await stream.receive(timeout_s)
        if response is None:
            raise stream.silent()
        self._check(stream, response)
        return response

    def _check(self, stream: Stream, response: Message) -> None:
        if not response.canceled:
            return
        if response.compact_revision:
            raise EtcdError(Kind.COMPACTED, "the watch's revision has been compacted")
        # etcd 3.4 says "permission denied" of a token that has expired, too.
        self._members.forget_token()
        raise self._members.advice.error(
            stream.endpoint, grpc.StatusCode.UNAVAILABLE, response.cancel_reason
        )

    def _events_of(self, response: Message) -> Sequence[WatchEvent]:
        events: list[WatchEvent] = []
        for change in response.events:
            self._next = change.kv.mod_revision + 1
            event = self._event_of(change)
            if event is not None:
                events.append(event)
        if not response.events and not response.created and response.watch_id >= 0:
            # A periodic notification comes in order with the events. The answer to a
            # question (watch_id -1) may overtake them before etcd 3.4.25 and 3.5.8.
            self._next = max(self._next, response.header.revision + 1)
        return events

    def _event_of(self, change: Message) -> WatchEvent | None:
        keyspace = self._members.keyspace
        if change.type == pb.kv_pb2.Event.DELETE:
            key = keyspace.key(change.kv.key)
            return None if key is None else self._view.remove(key)
        item = keyspace.versioned(change.kv)
        return None if item is None else self._view.change(item)
