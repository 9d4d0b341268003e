"""Every setting of kvlease, in one place.

A setting comes from, in falling order of precedence: ``--set name=value``, an
environment variable ``KVLEASE_<NAME>``, a TOML file named by ``KVLEASE_CONFIG`` or
``--config``, the default. Durations are seconds. What does not fit is a
:class:`ConfigError`, one sentence that says what to change.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

ENV_PREFIX = "KVLEASE_"

CONFIG_FILE_ENV = "KVLEASE_CONFIG"

_NOT_SETTINGS = re.compile(
    ENV_PREFIX + r"(CONFIG"
    r"|REQUIRE_\w+|MODEL_EXAMPLES"  # the tests'
    r"|HTTP_PORT|MODEL|\w+_(CPUS|GPU|ENGINES|MEMORY)"  # the compose files'
    r"|(\w+_)?(PORT|SERVICE)(_\w+)?)"  # Kubernetes', for services named kvlease-...
)
"""Variables with our prefix that are not for :func:`load`."""


_LISTEN = (
    "registry_listen",
    "lease_listen",
    "router_listen",
    "router_grpc_listen",
    "metrics_listen",
    "traces_listen",
    "traces_http_listen",
)
_ENDPOINTS = ("registry_endpoint", "lease_endpoint")
# (etcd_endpoints are looked at by the store, which also takes URLs.)


class ConfigError(Exception):
    """The configuration cannot be used; the message says what to change."""


class Settings(BaseModel):
    """All settings. Services, CLI and connector share it, so that one file configures a
    whole deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Store
    etcd_endpoints: str = Field(
        "", description="etcd members, host:port separated by commas; empty: the embedded store"
    )
    etcd_prefix: str = Field(
        "/kvlease/v1", description="put before every key; gives each cluster its own"
    )
    etcd_user: str = Field("", description="etcd user; empty: no authentication")
    etcd_password: str = Field("", description="password of etcd_user", repr=False)
    etcd_ca: str = Field("", description="CA certificate (PEM file); turns TLS to etcd on")
    etcd_cert: str = Field("", description="client certificate (PEM file) for TLS to etcd")
    etcd_key: str = Field("", description="private key (PEM file) of etcd_cert")
    etcd_timeout: float = Field(2.0, gt=0, description="deadline of one etcd request")

    # Addresses that services listen on
    registry_listen: str = Field("127.0.0.1:7401", description="where the registry takes gRPC")
    lease_listen: str = Field("127.0.0.1:7402", description="where the lease service takes gRPC")
    router_listen: str = Field("127.0.0.1:7480", description="where the router takes HTTP")
    router_grpc_listen: str = Field("127.0.0.1:7403", description="where the router takes gRPC")
    metrics_listen: str = Field(
        "", description="where a service serves Prometheus metrics over HTTP; empty: nowhere"
    )

    # Addresses of services, for their clients
    registry_endpoint: str = Field(
        "127.0.0.1:7401", description="registry replicas, host:port separated by commas"
    )
    lease_endpoint: str = Field(
        "127.0.0.1:7402", description="lease service replicas, host:port separated by commas"
    )

    # TLS between all parts
    tls_ca: str = Field(
        "",
        description="CA certificate (PEM file) of all parts of the deployment; turns mutual TLS "
        "on for all gRPC",
    )
    tls_cert: str = Field(
        "", description="certificate (PEM file) that this process shows, as server and as client"
    )
    tls_key: str = Field("", description="private key (PEM file) of tls_cert")
    tls_server_name: str = Field(
        "", description="name to look for in servers' certificates; empty: the endpoint's host"
    )
    router_tls_cert: str = Field(
        "", description="certificate (PEM file) for the router's HTTP; empty: plaintext"
    )
    router_tls_key: str = Field("", description="private key (PEM file) of router_tls_cert")

    # The life of a lease
    session_ttl: int = Field(
        15, ge=2, description="an engine without a keep-alive for so long is gone"
    )
    claim_grace: float = Field(
        30.0,
        gt=0,
        description="a ticket's life; what a decode engine keeps blocks for beyond its session",
    )
    retention_ttl: float = Field(480.0, gt=0, description="how long blocks are kept after a turn")
    max_retention: float = Field(
        3600.0, gt=0, description="the longest retention that can be asked for"
    )
    max_readers: int = Field(64, ge=1, description="open tickets a lease may have")
    claim_margin: float = Field(
        1.0, ge=0, description="a lease with less time left than this is not claimed"
    )
    clock_tolerance: float = Field(
        40.0,
        ge=0,
        description="lease service replicas' clocks differ by at most so much; what is over is "
        "tidied up so much later",
    )
    conversation_ttl: int = Field(
        7200, ge=60, description="how long a conversation's turn counter outlives its last turn"
    )

    # Retention on engines
    max_retained_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="part of its KV blocks that a decode engine may keep for leases",
    )
    min_free_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="below this part of free blocks a decode engine gives leases up",
    )
    handoff_ttl: float = Field(
        60.0,
        gt=0,
        description="how long a prefill engine keeps a prompt's blocks for the decode engine",
    )

    # Pulling
    pull_policy: Literal["adaptive", "threshold", "always", "never"] = Field(
        "adaptive",
        description="when proven tokens are read: adaptive (if that is faster than computing "
        "them, by what was measured), threshold (from min_pull_tokens on), always, never",
    )
    min_pull_tokens: int = Field(
        64, ge=1, description="fewer reusable tokens than this are recomputed, unless always"
    )
    claim_timeout: float = Field(
        0.05, gt=0, description="a claim without an answer by then is a miss_timeout"
    )
    pull_timeout: float = Field(2.0, gt=0, description="a read that lasts longer is given up")
    connect_timeout: float = Field(
        0.5, gt=0, description="a holder whose side channel does not answer by then is gone"
    )

    # Router
    api_keys_file: str = Field(
        "",
        description='JSON file {"<api key>": "<tenant>"}; empty: every request is tenant "default"',
    )
    ui: Literal["auto", "on", "off"] = Field(
        "auto",
        description="the page /ui, which shows every tenant's conversations without a key: on, "
        "off, or auto (on where there is no api_keys_file)",
    )
    jaeger_url: str = Field(
        "",
        description="base URL of Jaeger's pages, as browsers reach it: /ui links to traces there; "
        "empty: nowhere",
    )
    start_turn_timeout: float = Field(
        0.04, gt=0, description="a turn is routed without the lease service's answer after that"
    )
    prefill_timeout: float = Field(
        300.0, gt=0, description="the prefill half of a turn may take so long"
    )
    connect_engine_timeout: float = Field(
        1.0, gt=0, description="an engine that does not accept a connection by then is skipped"
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="a larger request body is refused")

    # Traces that `kvlease serve traces` keeps
    traces_listen: str = Field(
        "127.0.0.1:4317", description="where `kvlease serve traces` takes spans: OTLP over gRPC"
    )
    traces_http_listen: str = Field(
        "127.0.0.1:16686", description="where it is asked for traces, as Jaeger is, over HTTP"
    )
    traces_kept: int = Field(
        1000, ge=1, description="traces that it keeps, the latest, in at most 64 MiB"
    )
    traces_forward: str = Field(
        "",
        description="URL of an OTLP gRPC receiver that gets its spans too, with the headers and "
        "the certificate that OpenTelemetry's variables name; empty: none",
    )

    # Logs
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level logged"
    )
    log_format: Literal["console", "json"] = Field("console", description="how log lines look")

    @field_validator(*_LISTEN, *_ENDPOINTS)
    @classmethod
    def _addresses(cls, value: str, info: ValidationInfo) -> str:
        several = info.field_name in _ENDPOINTS
        for part in value.split(",") if several else [value]:
            if "/" in part:
                raise ValueError(
                    "write host:port without a scheme or a path, as in "
                    f"{cls.model_fields[info.field_name or ''].default or '127.0.0.1:9100'}"
                )
            host, _, port = part.strip().rpartition(":")
            if value and not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
                raise ValueError(f"{part.strip()!r} is not host:port with a port up to 65535")
        return value

    @field_validator("jaeger_url")
    @classmethod
    def _web_address(cls, value: str) -> str:
        if value and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
            raise ValueError("it must look like http://host:16686 or https://host/path")
        return value.rstrip("/")

    @field_validator("etcd_prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if not re.fullmatch(r"(/[^/\s]+)+/?", value):
            raise ValueError("it must look like /name or /name/name, without spaces")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.retention_ttl < self.session_ttl:
            raise ValueError(
                f"retention_ttl ({self.retention_ttl:g} s) is below session_ttl "
                f"({self.session_ttl} s): raise retention_ttl or lower session_ttl"
            )
        if self.max_retention < self.retention_ttl:
            raise ValueError(
                f"max_retention ({self.max_retention:g} s) is below retention_ttl "
                f"({self.retention_ttl:g} s): raise max_retention or lower retention_ttl"
            )
        if self.claim_margin >= self.claim_grace:
            raise ValueError(
                f"claim_margin ({self.claim_margin:g} s) must be below claim_grace "
                f"({self.claim_grace:g} s)"
            )
        if bool(self.etcd_cert) != bool(self.etcd_key):
            raise ValueError("etcd_cert and etcd_key must be set together")
        if self.etcd_cert and not self.etcd_ca:
            raise ValueError("etcd_cert needs etcd_ca: set the CA that signed etcd's certificate")
        tls = {name: getattr(self, name) for name in ("tls_ca", "tls_cert", "tls_key")}
        if any(tls.values()) and not all(tls.values()):
            missing = next(name for name, value in tls.items() if not value)
            raise ValueError(f"{missing} is missing: tls_ca, tls_cert and tls_key are set together")
        if self.tls_server_name and not self.tls_ca:
            raise ValueError("tls_server_name needs tls_ca, tls_cert and tls_key")
        if bool(self.router_tls_cert) != bool(self.router_tls_key):
            raise ValueError("router_tls_cert and router_tls_key must be set together")
        if self.etcd_password and not self.etcd_user:
            raise ValueError("etcd_password needs etcd_user")
        return self

    @property
    def effective_handoff_ttl(self) -> float:
        """No block outlives the retention TTL, on a prefill engine neither."""
        return min(self.handoff_ttl, self.retention_ttl)


def load(
    assignments: Iterable[str] = (),
    *,
    overrides: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Settings:
    """Settings from file, environment, ``overrides`` (already typed values, as in vLLM's
    extra config) and ``assignments`` ("name=value", as from ``--set``).

    Raises :class:`ConfigError`.
    """
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    path = config_file or env.get(CONFIG_FILE_ENV)
    if path:
        values.update(_read_file(path))
    for key, value in env.items():
        if key.startswith(ENV_PREFIX) and not _NOT_SETTINGS.fullmatch(key):
            values[_known_variable(key)] = value
    for name, value in (overrides or {}).items():
        values[_known(name, "the connector's kvlease settings")] = value
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment} is not of the form name=value")
        values[_known(name.strip(), "--set")] = value.strip()
    try:
        return Settings(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error.strerror}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from None
    return {_known(name, path): value for name, value in content.items()}


def _known_variable(key: str) -> str:
    name = key.removeprefix(ENV_PREFIX).lower()
    if name in Settings.model_fields and key.isupper():
        return name
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {ENV_PREFIX}{near[0].upper()}?" if near else "unset it"
    raise ConfigError(f"the environment variable {key} is not a setting; {hint}")


def _known(name: str, where: str) -> str:
    if name in Settings.model_fields:
        return name
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "`kvlease settings` lists them all"
    raise ConfigError(f"{where}: there is no setting {name!r}; {hint}")


def _sentence(error: ValidationError) -> str:
    """The first problem in words; the others follow once it is mended."""
    problem = error.errors()[0]
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][0])
    detail = str(problem["msg"]).removeprefix("Value error, ")
    detail = detail[0].lower() + detail[1:]
    field = Settings.model_fields.get(name)
    # A secret may have been mistyped, too.
    value = repr(problem["input"]) if field is None or field.repr else "..."
    return f"the setting {name}={value} cannot be used: {detail}"
