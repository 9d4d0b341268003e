"""TLS files and endpoints of etcd, checked before they are used: gRPC itself reports a
wrong file only as a connection that fails."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvlease.config import ConfigError, Settings
from kvlease.tls import read_ca, read_pair


def endpoints_of(settings: Settings) -> Sequence[str]:
    """``host:port`` of each member. ``http://`` and ``https://`` in front, as etcd's own
    tools write it, is taken off. Raises :class:`ConfigError`."""
    scheme = "https" if settings.etcd_ca else "http"
    found: list[str] = []
    for part in settings.etcd_endpoints.split(","):
        if not part.strip():
            continue
        given, separator, endpoint = part.strip().rpartition("://")
        if separator and given != scheme:
            raise ConfigError(
                f"the etcd endpoint {part.strip()!r} contradicts etcd_ca, which turns TLS on: "
                + (
                    "set etcd_ca"
                    if given == "https"
                    else f"write {endpoint} or leave etcd_ca empty"
                )
            )
        host, _, port = endpoint.rstrip("/").rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"the etcd endpoint {part.strip()!r} is not of the form host:port")
        found.append(f"{host}:{port}")
    if not found:
        raise ConfigError("etcd_endpoints names no endpoint: give host:port")
    return list(dict.fromkeys(found))


def credentials_of(settings: Settings) -> grpc.ChannelCredentials | None:
    """None without TLS. Raises :class:`ConfigError` for files that cannot be used."""
    if not settings.etcd_ca:
        return None
    ca = read_ca("etcd_ca", settings.etcd_ca, "that signed etcd's certificate")
    if not settings.etcd_cert:
        return grpc.ssl_channel_credentials(ca)
    cert, key = read_pair("etcd", settings.etcd_cert, settings.etcd_key)
    return grpc.ssl_channel_credentials(ca, key, cert)
