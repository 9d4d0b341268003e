"""What a local stack is made of: its parts, their addresses and commands. Nothing is
started here; :mod:`kvlease.cli.stack` does."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import socket
import sys
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvlease import config, telemetry
from kvlease.cli import launch
from kvlease.config import ConfigError, Settings

Kind = Literal["etcd", "traces", "registry", "lease", "router", "all", "prefill", "decode"]

ENGINES: tuple[Kind, ...] = ("prefill", "decode")

# Below the kernel's usual range for outgoing connections (32768 and up): a port that was
# free when it was chosen is still free when its part starts, and again when it restarts.
_PORTS = range(15_000, 32_000)

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """What ``kvlease up`` is asked for."""

    directory: Path
    store: Literal["etcd", "memory"] = "etcd"
    etcd: str = ""
    """Endpoints of an etcd that runs already; empty: the stack starts its own."""
    prefill: int = 1
    decode: int = 1
    routers: int = 1
    lease_replicas: int = 1
    engines: Literal["cpu", "none"] = "cpu"
    model: Path | None = None
    """None: the small model, made in ``directory``."""
    assignments: tuple[str, ...] = ()
    """Settings, as ``name=value``."""
    engine_arguments: tuple[str, ...] = ()
    """More arguments for vLLM, on all engines."""
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    prefill_prefix_cache: bool = True
    """Whether prefill engines keep prompts in a cache of their own, too."""
    traces: bool = False
    """Whether the stack keeps its latest traces, for ``kvlease trace``. They are passed on
    to the receiver that ``env`` names, which gets them directly otherwise."""
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def model_directory(self) -> Path:
        return self.model or self.directory / "model"


@dataclass(frozen=True)
class Part:
    """One process of the stack, and where it is reached. It keeps its name and its
    addresses over restarts."""

    name: str
    kind: Kind
    http: str = ""
    """host:port; empty: none."""
    grpc: str = ""
    """host:port of the first gRPC service; empty: none."""
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    engine: launch.Engine | None = None
    cpus: tuple[int, ...] = ()
    metrics: str = ""
    """host:port where Prometheus scrapes ``/metrics``; empty: nowhere."""

    def launch(self) -> launch.Launch:
        """What one start needs; an engine gets a new incarnation each time."""
        if self.engine is None:
            return launch.Launch(self.argv, self.env)
        engine = dataclasses.replace(self.engine, incarnation=uuid.uuid4().hex)
        built = launch.build(engine, env=self.env, cpus=self.cpus)
        return dataclasses.replace(built, env={**self.env, **built.env})


@dataclass(frozen=True)
class Plan:
    """All parts of a stack, in the order in which they are started."""

    options: Options
    settings: Settings
    """What the services are told: the user's settings and the stack's addresses."""
    parts: tuple[Part, ...]
    etcd: str | None
    """Endpoints of the store; None: the embedded one."""
    registry_grpc: str
    lease_grpc: tuple[str, ...]
    router_http: tuple[str, ...]
    router_grpc: tuple[str, ...]
    traces: str | None = None
    """Where traces are asked for; None: they are not kept."""

    def of(self, *kinds: Kind) -> list[Part]:
        return [part for part in self.parts if part.kind in kinds]

    def part(self, name: str) -> Part:
        """Raises KeyError, naming those that there are."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"{name}: the stack has {', '.join(part.name for part in self.parts)}")


def make(options: Options) -> Plan:
    """Plans a stack on free ports of 127.0.0.1. Raises :class:`ConfigError`."""
    _check(options)
    ports = _Ports()
    etcd = options.etcd or (f"{HOST}:{ports.take()}" if options.store == "etcd" else None)
    registry = f"{HOST}:{ports.take()}"
    leases = tuple(f"{HOST}:{ports.take()}" for _ in range(options.lease_replicas))
    routers_http = tuple(f"{HOST}:{ports.take()}" for _ in range(options.routers))
    routers_grpc = tuple(f"{HOST}:{ports.take()}" for _ in range(options.routers))
    addresses = {
        "etcd_endpoints": etcd or "",
        "registry_listen": registry,
        "lease_listen": leases[0],
        "router_listen": routers_http[0],
        "router_grpc_listen": routers_grpc[0],
        "metrics_listen": "",  # each part its own, routers at their HTTP address
        "registry_endpoint": registry,
        "lease_endpoint": ",".join(leases),
    }
    if options.traces:
        addresses |= {
            "traces_listen": f"{HOST}:{ports.take()}",
            "traces_http_listen": f"{HOST}:{ports.take()}",
            "traces_forward": options.env.get(telemetry.ENDPOINT_ENV, ""),
        }
    wanted = config.load(options.assignments, env=options.env)
    _check_settings(options, wanted, addresses)
    settings = config.load(
        [*options.assignments, *(f"{name}={value}" for name, value in addresses.items())],
        env=options.env,
    )
    parts: list[Part] = []
    if etcd and not options.etcd:
        parts.append(_etcd(options, etcd, f"{HOST}:{ports.take()}"))
    env = _service_env(options, settings)
    if options.traces:
        http, otlp = settings.traces_http_listen, settings.traces_listen
        own = {**_inherited(options), **_set(settings)}
        parts.append(Part("traces", "traces", http, otlp, _serve("traces"), own))
    if options.store == "memory":
        http = routers_http[0]
        parts.append(Part("services", "all", http, registry, _serve("all"), env, metrics=http))
    else:

        def service(kind: Kind, name: str, http: str, grpc: str, **own: str) -> Part:
            metrics = http or f"{HOST}:{ports.take()}"
            listen = {} if http else {"KVLEASE_METRICS_LISTEN": metrics}
            argv, variables = _serve(kind), {**env, **own, **listen}
            return Part(name, kind, http, grpc, argv, variables, metrics=metrics)

        parts.append(service("registry", "registry", "", registry))
        for index, address in enumerate(leases):
            own = {"KVLEASE_LEASE_LISTEN": address}
            parts.append(service("lease", f"lease-{index}", "", address, **own))
        for index, (http, grpc) in enumerate(zip(routers_http, routers_grpc, strict=True)):
            own = {"KVLEASE_ROUTER_LISTEN": http, "KVLEASE_ROUTER_GRPC_LISTEN": grpc}
            parts.append(service("router", f"router-{index}", http, grpc, **own))
    parts += _engines(options, settings, ports)
    traces = f"http://{settings.traces_http_listen}" if options.traces else None
    return Plan(
        *(options, settings, tuple(parts), etcd, registry, leases, routers_http, routers_grpc),
        traces=traces,
    )


def _check(options: Options) -> None:
    if options.store == "memory":
        if options.etcd:
            raise ConfigError("--etcd goes with --store etcd")
        if options.routers > 1 or options.lease_replicas > 1:
            raise ConfigError(
                "more than one router or lease replica needs a store that they share: "
                "use --store etcd"
            )
    elif not options.etcd and shutil.which("etcd", path=options.env.get("PATH")) is None:
        raise ConfigError(
            "there is no etcd in PATH: install it (on Debian and Ubuntu: apt-get install "
            "etcd-server), name one that runs with --etcd HOST:PORT, or use --store memory"
        )
    if options.engines == "cpu":
        launch.check_vllm()
        if options.model is not None:
            launch.check_model(str(options.model), cpu=True)


def _check_settings(options: Options, wanted: Settings, own: Collection[str]) -> None:
    """Raises :class:`ConfigError` for a setting that would have no effect, wherever it
    comes from: ``own`` are the stack's to set."""
    defaults = Settings()
    for name in (*own, "router_tls_cert", *(() if options.etcd else ("etcd_ca", "etcd_user"))):
        if getattr(wanted, name) == getattr(defaults, name):
            continue
        if name.startswith("etcd"):
            advice = "name an etcd that runs already with --etcd HOST:PORT"
        elif name == "traces_forward":
            advice = f"set {telemetry.ENDPOINT_ENV}"
        else:
            advice = "the stack is on free ports of 127.0.0.1, in plain HTTP, and prints them"
        raise ConfigError(f"{name} has no effect on a local stack; leave it out: {advice}")


def _serve(service: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "kvlease.cli", "serve", service)


def _etcd(options: Options, client: str, peer: str) -> Part:
    argv = (
        shutil.which("etcd", path=options.env.get("PATH")) or "etcd",
        *("--name", "kvlease"),
        *("--data-dir", str(options.directory.absolute() / "etcd")),
        *("--listen-client-urls", f"http://{client}"),
        *("--advertise-client-urls", f"http://{client}"),
        *("--listen-peer-urls", f"http://{peer}"),
        *("--initial-advertise-peer-urls", f"http://{peer}"),
        *("--initial-cluster", f"kvlease=http://{peer}"),
        *("--logger", "zap", "--log-level", "warn"),
    )
    # Variables named ETCD_* set flags of etcd, also those of somebody else's cluster.
    env = {name: value for name, value in options.env.items() if not name.startswith("ETCD_")}
    return Part("etcd", "etcd", http=client, argv=argv, env=env, metrics=client)


def _service_env(options: Options, settings: Settings) -> dict[str, str]:
    """Of services and engines. Their spans go to the stack's own receiver, if it has one."""
    env = {**_inherited(options), **_set(settings)}
    if not options.traces:
        return env
    # Where else to, and with which headers, is that receiver's business.
    env = {name: value for name, value in env.items() if not name.startswith(_OTLP)}
    # Spans are batched; vLLM's would come after five seconds.
    env.setdefault("OTEL_BSP_SCHEDULE_DELAY", "1000")
    return {**env, telemetry.ENDPOINT_ENV: f"http://{settings.traces_listen}"}


_OTLP = "OTEL_EXPORTER_OTLP_"


def _set(settings: Settings) -> dict[str, str]:
    """Settings go to the services in their environment, which other users of the machine
    cannot read: etcd_password is one of them."""
    defaults = Settings()
    changed = {
        config.ENV_PREFIX + name.upper(): str(value)
        for name, value in settings.model_dump().items()
        if value != getattr(defaults, name)
    }
    return {**changed, "PYTHONUNBUFFERED": "1"}


def _inherited(options: Options) -> dict[str, str]:
    return {
        name: value
        for name, value in options.env.items()
        # Everything they said is among the settings now.
        if name != config.CONFIG_FILE_ENV
        and name.removeprefix(config.ENV_PREFIX).lower() not in Settings.model_fields
    }


def _engines(options: Options, settings: Settings, ports: _Ports) -> list[Part]:
    if options.engines == "none":
        return []
    # Alternating, so that the first prefill and the first decode engine, which work at
    # the same time, never share a core.
    names: list[tuple[launch.Role, int]] = []
    for index in range(max(options.prefill, options.decode)):
        if index < options.prefill:
            names.append(("prefill", index))
        if index < options.decode:
            names.append(("decode", index))
    cores = sorted(os.sched_getaffinity(0))
    env = _service_env(options, settings)
    parts = []
    for position, (role, index) in enumerate(names):
        engine = launch.Engine(
            role=role,
            model=str(options.model_directory.absolute()),
            engine_id=f"{role}-{index}",
            incarnation="",
            port=ports.take(),
            side_channel_port=ports.take(),
            cpu=True,
            settings=settings,
            vllm_arguments=_vllm_arguments(options, role),
        )
        parts.append(
            Part(
                engine.engine_id,
                role,
                http=f"{HOST}:{engine.port}",
                metrics=f"{HOST}:{engine.port}",
                env=env,
                engine=engine,
                cpus=(cores[position % len(cores)],),
            )
        )
    return parts


def _vllm_arguments(options: Options, role: launch.Role) -> tuple[str, ...]:
    if role == "decode":
        return (*options.engine_arguments, *options.decode_arguments)
    cache = () if options.prefill_prefix_cache else ("--no-enable-prefix-caching",)
    return (*cache, *options.engine_arguments, *options.prefill_arguments)


class _Ports:
    """Free ports, each given once."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self) -> int:
        for _ in range(1000):
            port = random.choice(_PORTS)
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port
        raise ConfigError(
            f"no free port was found between {_PORTS.start} and {_PORTS.stop}: "
            "end some of what listens there"
        )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
