"""etcd's members: connections, failover, deadlines and authentication.

Each member has a channel of its own, so that it is known which one failed. Requests go
round the members; one that failed is left out for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import structlog

from kvlease.config import Settings
from kvlease.store.etcd_api import Keyspace, Message, pb
from kvlease.store.etcd_errors import Advice, EtcdError, Kind
from kvlease.store.etcd_stream import Stream
from kvlease.store.etcd_tls import credentials_of, endpoints_of

_log = structlog.get_logger(__name__)

_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name this is how long one attempt to connect may take (gRPC core,
    # subchannel.cc).
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A host name may get another address: a container that was started anew.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # etcd closes connections with pings more often than every 5 s, or while no call
    # runs (--grpc-keepalive-min-time; embed/config.go).
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    # etcd limits requests, not responses; a page of a listing may be large.
    ("grpc.max_receive_message_length", -1),
    # The members are in the cluster's own network, never behind a web proxy.
    ("grpc.enable_http_proxy", 0),
    # Another store's channel must not lend us its reconnect backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

_FIRST_SHUN_S = 0.5
_LONGEST_SHUN_S = 10.0
"""A member that failed is asked again after so long; it doubles with each failure."""

_PAUSE_S = 0.03
_LONGEST_PAUSE_S = 0.2
"""Between two tries of a request, while a cluster elects a leader."""

_MAX_TOKEN_RENEWALS = 3
"""In one request. More would mean that etcd takes none of the tokens that it gives."""

# Ends a call at once on a member that has lost its leader, instead of letting it hang
# (etcd, api/v3rpc/rpctypes/metadatafields.go; a partitioned member sees no leader).
_REQUIRE_LEADER = ("hasleader", "true")


def left_s(deadline: float) -> float:
    """Seconds to a deadline (monotonic), as a time-out: more than 0."""
    return max(deadline - time.monotonic(), 0.001)


class Member:
    """One etcd process."""

    def __init__(self, endpoint: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.endpoint = endpoint
        target, options = f"dns:///{endpoint}", list(_CHANNEL_OPTIONS)
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        stubs = (pb.KVStub, pb.LeaseStub, pb.WatchStub, pb.AuthStub)
        self.rpcs: dict[str, Any] = {}
        for stub in stubs:
            self.rpcs.update(vars(stub(self.channel)))
        self._shunned_until = 0.0
        self._shun_s = 0.0

    def free_at(self) -> float:
        """The time (monotonic) from which on it may be asked."""
        return self._shunned_until

    def failed(self) -> None:
        now = time.monotonic()
        if now >= self._shunned_until:  # else many requests failed together
            self._shun_s = min(max(2 * self._shun_s, _FIRST_SHUN_S), _LONGEST_SHUN_S)
            self._shunned_until = now + self._shun_s

    def answered(self) -> None:
        self._shun_s = self._shunned_until = 0.0


class Members:
    """Sends requests to whichever member answers."""

    def __init__(self, settings: Settings) -> None:
        endpoints = endpoints_of(settings)
        credentials = credentials_of(settings)
        self.timeout_s = settings.etcd_timeout
        self.keyspace = Keyspace.of(settings.etcd_prefix)
        self.advice = Advice(
            endpoints=", ".join(endpoints),
            prefix=settings.etcd_prefix,
            user=settings.etcd_user,
            tls=credentials is not None,
            timeout_s=settings.etcd_timeout,
        )
        self.revision = 0
        """A revision that the store has reached; everything written later has a higher
        one. 0: not known."""
        self.epoch = 0
        """Changes when etcd has been replaced by another, or by an older state of itself:
        revisions remembered from before mean nothing then."""
        self._term = self._cluster = 0
        self._members = [Member(endpoint, credentials) for endpoint in endpoints]
        self._turn = 0
        self._user, self._password = settings.etcd_user, settings.etcd_password
        self._token = ""
        self._authenticating = asyncio.Lock()
        self._streams: set[Stream] = set()
        self._closed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def deadline(self) -> float:
        """For a request that starts now (monotonic)."""
        return time.monotonic() + self.timeout_s

    async def call(
        self,
        rpc: str,
        request: Message,
        *,
        safe: bool = True,
        patient: bool = False,
        deadline: float | None = None,
    ) -> Message:
        """One request, for example ``Range``, answered by any member.

        A ``safe`` request may reach etcd twice, and is tried on other members until the
        deadline; another one is sent again only if it was certainly not applied. When no
        member takes a connection it fails at once, a ``patient`` one at the deadline.
        Raises :class:`EtcdError`, with kind ``UNKNOWN`` where it may have been applied.
        """
        deadline = self.deadline() if deadline is None else deadline
        refused_by: set[str] = set()
        renewals, pause_s = 0, _PAUSE_S
        while True:
            member = self._next()
            try:
                return await self._try(member, rpc, request, deadline)
            except EtcdError as error:
                match error.kind:
                    case Kind.UNSENT if not patient:
                        refused_by.add(member.endpoint)
                        if len(refused_by) == len(self._members):
                            raise
                    case Kind.STALE_TOKEN if renewals < _MAX_TOKEN_RENEWALS:
                        renewals += 1
                    case Kind.UNSENT | Kind.UNKNOWN if safe and left_s(deadline) > pause_s:
                        await self.pause(pause_s)
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    case _:
                        raise
                if time.monotonic() >= deadline:
                    raise

    async def _try(self, member: Member, rpc: str, request: Message, deadline: float) -> Message:
        # What is left is for another member, or for settling what became of a write.
        timeout_s = left_s(deadline) * (0.5 if len(self._members) > 1 else 0.75)
        token = "" if rpc == "Authenticate" else await self._current_token(deadline)
        try:
            response = await member.rpcs[rpc](
                request, timeout=timeout_s, metadata=self._metadata(token)
            )
        except grpc.aio.AioRpcError as error:
            raise self.failure(member, error, token) from None
        except asyncio.CancelledError:
            # gRPC cancels whoever waits for a call when its channel is closed.
            task = asyncio.current_task()
            if self.closed and (task is None or not task.cancelling()):
                raise self._closed_error() from None
            raise
        member.answered()
        self._observe(response.header)
        return response

    async def stream(self, rpc: str) -> Stream:
        """Opens a stream to the next member. Whoever asked for it closes it."""
        token = await self._current_token(self.deadline())
        member = self._next()
        call = member.rpcs[rpc](metadata=self._metadata(token))
        stream = Stream(call, member.endpoint, lambda e: self.failure(member, e, token))
        self._streams.add(stream)
        stream.on_close = lambda: self._streams.discard(stream)
        return stream

    def failure(
        self, member: Member, error: grpc.aio.AioRpcError | None, token: str = ""
    ) -> EtcdError:
        """What a member's failure means; None: it was silent too long. A member that
        cannot be reached is left out for a while."""
        if self.closed:
            return self._closed_error()
        if error is None:
            result = self.advice.silent(member.endpoint)
        else:
            result = self.advice.error(member.endpoint, error.code(), error.details() or "")
        if result.kind in (Kind.UNSENT, Kind.UNKNOWN):
            member.failed()
        elif result.kind is Kind.STALE_TOKEN:
            self.forget_token(token)
        return result

    def forget_token(self, token: str | None = None) -> None:
        """Has the next request authenticate anew; not if another has done so since
        ``token`` was used."""
        if token is None or token == self._token:
            self._token = ""

    async def pause(self, seconds: float) -> None:
        """Waits, but not beyond the end of the store."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    async def close(self) -> None:
        self._closed.set()
        for stream in list(self._streams):
            stream.cancel()
        for member in self._members:
            await member.channel.close(None)

    def _observe(self, header: Message) -> None:
        """Remembers how far etcd is, from the header of an answer."""
        if header.cluster_id != self._cluster or header.raft_term < self._term:
            if self._cluster:
                self.epoch += 1
            self._cluster, self._term, self.revision = header.cluster_id, 0, 0
        self._term = max(self._term, header.raft_term)
        self.revision = max(self.revision, header.revision)

    def _next(self) -> Member:
        """The next member in turn that is not left out; if all are, the one that has
        been for the longest."""
        if self.closed:
            raise self._closed_error()
        self._turn += 1
        start = self._turn % len(self._members)
        in_turn = self._members[start:] + self._members[:start]
        now = time.monotonic()
        return min(in_turn, key=lambda member: max(member.free_at() - now, 0.0))

    def _metadata(self, token: str) -> Sequence[tuple[str, str]]:
        return (_REQUIRE_LEADER, ("token", token)) if token else (_REQUIRE_LEADER,)

    async def _current_token(self, deadline: float) -> str:
        """The token; empty without a user. Authenticates once for all who wait."""
        if not self._user or self._token:
            return self._token
        async with self._authenticating:
            if not self._token:
                request = pb.AuthenticateRequest(name=self._user, password=self._password)
                response = await self.call("Authenticate", request, deadline=deadline)
                self._token = response.token
                _log.debug("etcd_authenticated", user=self._user)
        return self._token

    def _closed_error(self) -> EtcdError:
        return EtcdError(Kind.CLOSED, "the store is closed")
