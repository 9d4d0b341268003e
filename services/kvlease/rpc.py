"""What every gRPC server and client of kvlease shares: addresses, errors, and the
reflection, health and channelz services that make a server easy to look into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from kvlease.config import ConfigError

ERROR_DOMAIN = "kvlease"

_CLIENT_OPTIONS: Sequence[tuple[str, int | str]] = (
    # Reconnect fast: a restarted service should be used again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
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
    import socket

    addresses = []
    for part in parts:
        host, _, port = part.rpartition(":")
        try:
            info = socket.getaddrinfo(
                host.strip("[]"), int(port), socket.AF_INET, socket.SOCK_STREAM
            )
        except OSError:
            continue
        addresses += [f"{item[4][0]}:{item[4][1]}" for item in info]
    if not addresses:
        raise ConfigError(f"none of the hosts in {endpoints!r} can be resolved")
    return "ipv4:" + ",".join(dict.fromkeys(addresses))


def aio_channel(endpoints: str) -> grpc.aio.Channel:
    """A channel to all replicas at ``endpoints``, for asyncio."""
    return grpc.aio.insecure_channel(target(endpoints), options=list(_CLIENT_OPTIONS))


def channel(endpoints: str) -> grpc.Channel:
    """A channel to all replicas at ``endpoints``, for threads."""
    return grpc.insecure_channel(target(endpoints), options=list(_CLIENT_OPTIONS))


class Server:
    """A gRPC server with reflection, channelz and health (overall, and per service).

    Services are added to :attr:`grpc` before :meth:`start`.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self.grpc = grpc.aio.server(options=list(_SERVER_OPTIONS))
        self._names = (*service_names, "")
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        channelz.add_channelz_servicer(self.grpc)
        reflection.enable_server_reflection(
            (
                *service_names,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
                "grpc.channelz.v1.Channelz",
            ),
            self.grpc,
        )

    async def start(self, listen: str) -> int:
        """Listens and reports NOT_SERVING until :meth:`set_ready`. Returns the port.

        Raises :class:`ConfigError` if the address cannot be listened on.
        """
        await self.set_ready(False)
        try:
            port = self.grpc.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(
                f"cannot listen on {listen}: the port is taken or the address is not this "
                "machine's; stop what uses it or choose another address"
            )
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


async def abort(
    context: grpc.aio.ServicerContext[object, object],
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
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("unreachable: abort raises")


def reason_of(error: grpc.RpcError) -> str:
    """The ErrorInfo reason of a failed call; empty if it carries none."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, NotImplementedError, AttributeError):
        status = _from_aio(error)
    if status is None:
        return ""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return str(info.reason)
    return ""


def _from_aio(error: grpc.RpcError) -> status_pb2.Status | None:
    if isinstance(error, grpc.aio.AioRpcError):
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                return status_pb2.Status.FromString(value)
    return None
