"""What every gRPC server and client of kvlease shares: addresses, errors, and the
reflection, health and channelz services that make a server easy to look into."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, descriptor_pool
from google.protobuf.descriptor import EnumDescriptor, FileDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvlease import listening
from kvlease.config import ConfigError
from kvlease.tls import Tls

ERROR_DOMAIN = "kvlease"

_DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata that carries google.rpc.Status (gRPC's richer error model)."""

Answer = TypeVar("Answer")

Context = grpc.aio.ServicerContext[Any, Any]
"""What a handler gets to know about its call."""


class Refused(Exception):
    """A call ends with a canonical status, a google.rpc.ErrorInfo reason and a sentence
    that says what to do. Rules raise it; :func:`answer` sends it."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message


def check_enum(
    enum: EnumDescriptor, value: int, field: str, reason: str, *, required: bool = False
) -> None:
    """Raises INVALID_ARGUMENT, naming the choices, unless ``value`` is one of ``enum``;
    with ``required``, other than its zero."""
    if value not in enum.values_by_number or (required and not value):
        *names, last = [choice.name for choice in enum.values if choice.number]
        message = f"{field} is {value}: give {', '.join(names)} or {last}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, reason, message)


_CLIENT_OPTIONS: Sequence[tuple[str, int | str]] = (
    # Reconnect fast: a restarted service should be used again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name this is how long one attempt to connect may take (gRPC core,
    # subchannel.cc): 100 ms were too short on a busy host.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Services are in one network; a web proxy in the environment is not for them.
    ("grpc.enable_http_proxy", 0),
    # Look a name up again soon: a replica that was replaced has another address.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Notice a peer that has vanished without closing its connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Spread calls over all replicas; skip one that is down.
    ("grpc.lb_policy_name", "round_robin"),
    # Another process's channel to the same address must not lend us its backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

_SERVER_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second owner
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def target(endpoints: str) -> str:
    """A gRPC target for ``host:port[,host:port...]``; names are resolved by DNS."""
    parts = [part.strip() for part in endpoints.split(",") if part.strip()]
    if not parts:
        raise ConfigError("an endpoint is empty: give host:port")
    for part in parts:
        host, separator, port = part.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise ConfigError(f"the endpoint {part!r} is not of the form host:port")
    if len(parts) == 1:
        return f"dns:///{parts[0]}"
    # gRPC resolves one DNS name a channel, but any number of addresses.
    addresses = [address for part in parts for address in _resolve(part)]
    if not addresses:
        raise ConfigError(f"none of the hosts in {endpoints!r} can be resolved")
    return "ipv4:" + ",".join(dict.fromkeys(addresses))


def _resolve(endpoint: str) -> Iterable[str]:
    """The IPv4 addresses of a ``host:port``; none if the name is unknown, so that one
    unknown replica does not hide the others."""
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [f"{item[4][0]!s}:{item[4][1]!s}" for item in found]


def aio_channel(endpoints: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to all replicas at ``endpoints``, for asyncio. Without ``tls``: plaintext.
    Raises :class:`ConfigError`."""
    if tls is None:
        return grpc.aio.insecure_channel(target(endpoints), options=list(_CLIENT_OPTIONS))
    return grpc.aio.secure_channel(
        target(endpoints), tls.channel_credentials(), options=_tls_options(endpoints, tls)
    )


def channel(endpoints: str, tls: Tls | None = None) -> grpc.Channel:
    """A channel to all replicas at ``endpoints``, for threads. Without ``tls``: plaintext.
    Raises :class:`ConfigError`."""
    if tls is None:
        return grpc.insecure_channel(target(endpoints), options=list(_CLIENT_OPTIONS))
    return grpc.secure_channel(
        target(endpoints), tls.channel_credentials(), options=_tls_options(endpoints, tls)
    )


def _tls_options(endpoints: str, tls: Tls) -> list[tuple[str, int | str]]:
    """gRPC looks for one name in the certificates behind a channel, however many there are."""
    hosts = {part.strip().rpartition(":")[0].strip("[]") for part in endpoints.split(",")}
    if not tls.server_name and len(hosts) > 1:
        raise ConfigError(
            f"with TLS the hosts in {endpoints} must share a name: put one into the certificates "
            'of all (`kvlease ca` puts "kvlease") and set tls_server_name to it'
        )
    return [*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name or hosts.pop())]


class _Descriptors:
    """The default pool, for reflection. protobuf's own finds no file by a method's name
    (upb knows messages, fields, enums and services by name, not methods), so that
    ``grpcurl describe package.Service.Method`` would say that there is no such thing."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, name: str) -> FileDescriptor:
        """Raises KeyError."""
        try:
            found: FileDescriptor = self._pool.FindFileContainingSymbol(name)
        except KeyError:
            found = self._pool.FindMethodByName(name).containing_service.file
        return found


class Server:
    """A gRPC server with reflection, channelz and health (overall, and per service).

    Services are added to :attr:`grpc` before :meth:`start`.
    """

    def __init__(self, service_names: Sequence[str], tls: Tls | None = None) -> None:
        """Without ``tls``: plaintext."""
        self.grpc = grpc.aio.server(options=list(_SERVER_OPTIONS))
        self._tls = tls
        self._names = (*service_names, "")
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # in no stub
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        channelz.add_channelz_servicer(self.grpc)  # type: ignore[arg-type]  # takes both kinds
        reflection.enable_server_reflection(
            (
                *service_names,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
                "grpc.channelz.v1.Channelz",
            ),
            self.grpc,
            pool=_Descriptors(),  # type: ignore[arg-type]  # all of a pool that it calls
        )

    async def start(self, listen: str, setting: str = "the address") -> int:
        """Listens and reports NOT_SERVING until :meth:`set_ready`. Returns the port.

        Raises :class:`ConfigError`, which names ``setting``, if the address cannot be
        listened on.
        """
        await self.set_ready(False)
        try:
            if self._tls is None:
                port = self.grpc.add_insecure_port(listen)
            else:
                port = self.grpc.add_secure_port(listen, self._tls.server_credentials())
        except RuntimeError:
            port = 0
        if not port:
            raise listening.refused(setting, listen)
        await self.grpc.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tells health checks whether the services can do their work."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Reports NOT_SERVING, lets running calls end within ``grace_s``, stops."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


async def answer(context: Context, work: Awaitable[Answer]) -> Answer:
    """The result of ``work``; what it raises as :class:`Refused` ends the call."""
    try:
        return await work
    except Refused as refused:
        return await abort(context, refused.code, refused.reason, refused.message)


async def abort(
    context: Context,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    metadata: Mapping[str, str] | None = None,
) -> NoReturn:
    """Ends a call with a canonical status and a google.rpc.ErrorInfo."""
    info = any_pb2.Any()
    info.Pack(
        error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata or {})
    )
    status = status_pb2.Status(code=code.value[0], message=message, details=[info])
    trailing = rpc_status.to_status(status).trailing_metadata
    await context.abort(code, message, trailing)


def reason_of(error: grpc.RpcError) -> str:
    """The ErrorInfo reason of a failed call; empty if it carries none."""
    # Errors from threads and from asyncio share this method, but no type that says so.
    trailing: Any = getattr(error, "trailing_metadata", tuple)() or ()
    for key, value in trailing:
        if key == _DETAILS_KEY:
            return _reason_in(status_pb2.Status.FromString(value))
    return ""


def _reason_in(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return str(info.reason)
    return ""
