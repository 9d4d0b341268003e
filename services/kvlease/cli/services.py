"""How the commands that look into running services reach them, and what they say when
they cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvlease import config, rpc, tls
from kvlease.cli import records
from kvlease.cli.text import clean
from kvlease.tls import Tls

TIMEOUT_S = 5.0
_LOCAL_STACK = Path(".kvlease")
_WIDE_INTEGERS = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}

# What gRPC's core says of a server that does not speak HTTP/2, or whose HTTP/2 is not gRPC.
_NO_GRPC = ("Failed parsing HTTP/2", "http1.x server")
_HTTP_STATUS = "http2 header with status"

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Service:
    """One service, as a command asks it."""

    name: str
    setting: str
    """The one with its address."""
    address: str
    tls: Tls | None

    @contextmanager
    def connection(self) -> Iterator[grpc.Channel]:
        """A channel to it. A call that fails inside ends the command with a sentence."""
        with rpc.channel(self.address, self.tls) as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                raise click.ClickException(self.sentence(error)) from None

    def sentence(self, error: grpc.RpcError) -> str:
        """Why a call has failed, and what to do."""
        if not isinstance(error, grpc.Call):
            return f"the {self.name} at {self.address} failed: {clean(str(error))}"
        details = clean(error.details() or error.code().name)
        if rpc.reason_of(error) == "STORE_UNAVAILABLE":
            return f"the {self.name} at {self.address} cannot reach its store: {details}"
        down = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        why = tls.explain(self.address, self.tls) if down else ""
        if why:
            return f"the {self.name} cannot be asked: {why}"
        if _is_another(error):
            default = config.Settings.model_fields[self.setting].default.rpartition(":")[2]
            return (
                f"what answers at {self.address} is not the {self.name}: name its gRPC address "
                f"with --set {self.setting}=HOST:PORT (its default port is {default})"
            )
        if down:
            return (
                f"no {self.name} answers at {self.address}: start it (`kvlease up`, "
                "`kvlease serve`), or name its address with --dir or --set"
            )
        return f"the {self.name} at {self.address} refuses: {details}"


def _is_another(error: grpc.Call) -> bool:
    """Whether some other server has answered: one of HTTP, or of other methods."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return any(word in details for word in _NO_GRPC)
    # (A proxy that lacks its backend is UNAVAILABLE, with a status of HTTP, too.)
    return error.code() is grpc.StatusCode.UNIMPLEMENTED or _HTTP_STATUS in details


@dataclass(frozen=True)
class Addresses:
    """host:port of each service, several separated by commas; and how to talk to them."""

    registry: str
    lease: str
    tls: Tls | None = None

    @property
    def registry_service(self) -> Service:
        """The registry."""
        return Service("registry", "registry_endpoint", self.registry, self.tls)

    @property
    def lease_service(self) -> Service:
        """The lease service."""
        return Service("lease service", "lease_endpoint", self.lease, self.tls)


def options(command: Callable[Concatenate[Addresses, _P], _R]) -> Callable[..., _R]:
    """Gives a command --dir, --set and --config, and as its first argument the
    :class:`Addresses` that they name."""

    @click.option(
        "--dir",
        "directory",
        type=click.Path(path_type=Path),
        help="The local stack in DIR (`kvlease up --dir`). "
        "[default: the settings' endpoints, or the stack in ./.kvlease]",
    )
    @click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting, such as lease_endpoint=10.0.0.5:7402.",
    )
    @click.option("--config", "config_file", metavar="FILE", help="Settings in a TOML file.")
    @functools.wraps(command)
    def with_addresses(
        *args: Any,
        directory: Path | None,
        assignments: tuple[str, ...],
        config_file: str | None,
        **kwargs: Any,
    ) -> _R:
        return command(addresses(directory, assignments, config_file), *args, **kwargs)

    return with_addresses


def addresses(
    directory: Path | None, assignments: tuple[str, ...], config_file: str | None
) -> Addresses:
    """Where the services are: in a stack's directory, else where the settings say, else
    (nothing said) in the stack of the current directory. Raises :class:`ConfigError`."""
    settings = config.load(assignments, config_file=config_file)
    said = Addresses(settings.registry_endpoint, settings.lease_endpoint, tls.of(settings))
    default = config.Settings()
    nothing_said = said == Addresses(default.registry_endpoint, default.lease_endpoint, said.tls)
    if directory is None and nothing_said and (_LOCAL_STACK / records.ENDPOINTS).exists():
        directory = _LOCAL_STACK
    if directory is None:
        return said
    endpoints = records.load_endpoints(directory)
    return Addresses(
        endpoints["registry_grpc"], ",".join(endpoints["lease_replicas_grpc"]), said.tls
    )


def as_dict(message: Message) -> dict[str, Any]:
    """protobuf's JSON form with the names of the .proto files, all fields present and in
    the order of their numbers, and 64-bit integers as numbers (all of ours are small
    enough for JSON)."""
    value = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _tidy(message, value)


def _tidy(message: Message, value: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        written = value.get(field.name)
        if written is None:
            continue
        content = getattr(message, field.name)
        if field.type in _WIDE_INTEGERS:
            written = content
        elif field.type == FieldDescriptor.TYPE_MESSAGE and _is_ours(field):
            if isinstance(content, Message):
                written = _tidy(content, written)
            else:
                written = [_tidy(*pair) for pair in zip(content, written, strict=True)]
        result[field.name] = written
    return result


def _is_ours(field: Any) -> bool:
    """Not a Timestamp or Duration, which are text in JSON."""
    return bool(field.message_type.full_name.startswith("kvlease."))
