"""Why an address cannot be listened on, in a sentence that names its setting."""

from __future__ import annotations

import errno
import socket

from kvlease.config import ConfigError


def refused(setting: str, listen: str, error: OSError | None = None) -> ConfigError:
    """For a ``listen`` (host:port) that could not be bound. Without ``error``, which gRPC
    keeps to itself, it is found out by another try."""
    error = error or _try(listen)
    match error.errno if error else None:
        case errno.EADDRINUSE:
            why = "the port is taken: stop what uses it, or set {} to another"
        case errno.EADDRNOTAVAIL:
            why = "the host is not an address of this machine: set {} to one of its own, or 0.0.0.0"
        case errno.EACCES:
            why = "ports below 1024 need root: set {} to a higher one"
        case _ if isinstance(error, socket.gaierror):
            why = "the host's name cannot be resolved: correct {}"
        case _:
            strerror = (error.strerror if error else None) or "it did not work"
            why = f"{strerror[0].lower()}{strerror[1:]}: set {{}} to another address"
    return ConfigError(f"{setting}: cannot listen on {listen}: {why.format(setting)}")


def _try(listen: str) -> OSError | None:
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None
