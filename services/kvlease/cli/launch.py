"""How an engine is started: a vLLM command with its environment and the
``--kv-transfer-config`` that nobody should write by hand. Pure, but for
:func:`check` and :func:`execute`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from kvlease import telemetry
from kvlease.config import ConfigError, Settings
from kvlease_connector import compat
from kvlease_connector.options import CPU_PROGRESS_DELAY_US

Role = Literal["prefill", "decode"]

# Settings that no engine reads: the services' own store, addresses and keys. They stay
# out of an engine's command line, which every user of a machine can read.
_NOT_FOR_ENGINES = re.compile(r"etcd_\w+|\w+_listen|traces_\w+|api_keys_file|router_tls_\w+")

_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}

# A variable that is set already is left as it is.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; vLLM takes half of the memory otherwise
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # --cpuset binds; vLLM would bind to all cores
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "1",  # an idle OpenMP thread spins no longer than 1 ms
    # Without it the first request for logprobs has a function compiled, and where there is no
    # C++ compiler, it ends the engine.
    "TORCH_COMPILE_DISABLE": "1",
    "UCX_TLS": "all",  # shared memory between engines of one host: 10 times as fast as TCP
}
_CPU_MAX_MODEL_LEN = 16384


@dataclass(frozen=True)
class Engine:
    """What the user asks for."""

    role: Role
    model: str
    """A directory, or (not with ``cpu``) a name on a model hub."""
    engine_id: str
    incarnation: str
    port: int
    side_channel_port: int
    name: str = ""
    """The model as clients name it; empty: the directory's or the hub's name."""
    host: str = "127.0.0.1"
    """Where it listens."""
    advertise: str = ""
    """The host that routers and readers reach it at; empty: ``host``."""
    cpu: bool = False
    nixl_backends: tuple[str, ...] = ("UCX",)
    weights_version: str = ""
    settings: Settings = field(default_factory=lambda: Settings())
    vllm_arguments: tuple[str, ...] = ()

    @property
    def served_name(self) -> str:
        path = Path(self.model)
        return self.name or (path.resolve().name if path.is_dir() else self.model)

    @property
    def advertised_host(self) -> str:
        if self.advertise:
            return self.advertise
        # Nobody else can connect to a wildcard address.
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host

    @property
    def http_address(self) -> str:
        """Base URL of the engine's HTTP server."""
        host = self.advertised_host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Launch:
    """A command and the variables it needs on top of the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    """Cores it may run on; empty: all."""
    incarnation: str = ""


def build(engine: Engine, *, env: Mapping[str, str], cpus: Sequence[int] = ()) -> Launch:
    """The command that starts ``engine``, given the environment ``env`` it will inherit."""
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", engine.model),
        *("--served-model-name", engine.served_name),
        *("--host", engine.host),
        *("--port", str(engine.port)),
    ]
    # vLLM kills its engine core at once by default; in this time it says goodbye to the
    # registry, and running requests end.
    argv += ["--shutdown-timeout", "5"]
    if engine.cpu:
        argv += ["--dtype", "float32", "--max-model-len", str(_cpu_max_model_len(engine.model))]
        argv += ["--max-num-seqs", "8", "--enforce-eager"]
    endpoint = env.get(telemetry.ENDPOINT_ENV)
    if endpoint:
        argv += ["--otlp-traces-endpoint", endpoint]
    argv += ["--kv-transfer-config", json.dumps(transfer_config(engine), separators=(",", ":"))]
    # Last, so that the user's own arguments win over ours.
    argv += engine.vllm_arguments
    return Launch(tuple(argv), _environment(engine, env), tuple(cpus), engine.incarnation)


def transfer_config(engine: Engine) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``; ``kv_connector_extra_config.kvlease`` is what
    kvlease_connector reads."""
    settings = engine.settings
    config: dict[str, Any] = {
        "kv_connector": "KvLeaseConnector",
        "kv_connector_module_path": "kvlease_connector",
        "kv_role": _ROLE[engine.role],
        "engine_id": f"{engine.engine_id}-{engine.incarnation}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backends": list(engine.nixl_backends),
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": settings.min_pull_tokens,
            "decoder_kv_blocks_ttl": max(1, round(settings.retention_ttl)),
            "kvlease": {
                "engine_id": engine.engine_id,
                "http_address": engine.http_address,
                "incarnation": engine.incarnation,
                "weights_version": engine.weights_version,
                # NIXL's own default of 0 spins on a whole core.
                "progress_thread_delay_us": CPU_PROGRESS_DELAY_US if engine.cpu else 0,
                "settings": _settings_for_engines(settings),
            },
        },
    }
    if engine.cpu:
        config["kv_buffer_device"] = "cpu"
    return config


def _settings_for_engines(settings: Settings) -> dict[str, Any]:
    defaults = Settings()
    return {
        name: value
        for name, value in settings.model_dump().items()
        if value != getattr(defaults, name) and not _NOT_FOR_ENGINES.fullmatch(name)
    }


def _environment(engine: Engine, env: Mapping[str, str]) -> dict[str, str]:
    wanted = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(engine.model).is_dir():
        wanted["HF_HUB_OFFLINE"] = "1"
    if engine.cpu:
        wanted |= _CPU_ENVIRONMENT
    if env.get(telemetry.ENDPOINT_ENV):
        wanted["OTEL_SERVICE_NAME"] = f"vllm-{engine.role}"
        wanted["OTEL_RESOURCE_ATTRIBUTES"] = _resource(engine, env)
        # kvlease's own spans go over gRPC; vLLM reads only this variable for its.
        wanted["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "grpc"
    set_by_user = {
        name: env[name] for name in wanted if name in env and name != "OTEL_RESOURCE_ATTRIBUTES"
    }
    return (
        wanted
        | set_by_user
        | {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": engine.advertised_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.side_channel_port),
        }
    )


def _resource(engine: Engine, env: Mapping[str, str]) -> str:
    """Who vLLM's own spans come from; what the user says of it wins."""
    ours = {
        "service.namespace": "kvlease",
        "service.version": compat.installed_vllm() or "unknown",
        "service.instance.id": f"{engine.engine_id}/{engine.incarnation}",
    }
    said = env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return ",".join([*(f"{name}={value}" for name, value in ours.items()), *filter(None, [said])])


def _cpu_max_model_len(model: str) -> int:
    try:
        limit = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
        return min(_CPU_MAX_MODEL_LEN, int(limit))
    except (OSError, ValueError, KeyError, TypeError):
        return _CPU_MAX_MODEL_LEN


def shell_command(launch: Launch) -> str:
    """The launch as lines to paste into a shell. The incarnation is made anew each time
    they run: two starts must never share one."""
    parts = ["env", *(f"{name}={value}" for name, value in sorted(launch.env.items()))]
    if launch.cpus:
        parts += ["taskset", "-c", ",".join(map(str, launch.cpus))]
    command = " ".join(_quote(part, launch.incarnation) for part in [*parts, *launch.argv])
    return f"INCARNATION=$(tr -d - < /proc/sys/kernel/random/uuid)\n{command}"


def _quote(part: str, incarnation: str) -> str:
    if not incarnation or incarnation not in part:
        return shlex.quote(part)
    return '"$INCARNATION"'.join(shlex.quote(piece) for piece in part.split(incarnation))


def check(engine: Engine, *, cpus: Sequence[int] = ()) -> None:
    """Raises :class:`ConfigError` for what would make the start fail: no model, no vLLM
    or an unsupported one, a port that is taken, a core that is not there."""
    check_model(engine.model, cpu=engine.cpu)
    check_vllm()
    check_port(engine.host, engine.port, "--port")
    check_port(engine.advertised_host, engine.side_channel_port, "--side-channel-port")
    missing = sorted(set(cpus) - os.sched_getaffinity(0))
    if missing:
        raise ConfigError(
            f"core {missing[0]} is not one this process may use "
            f"({', '.join(map(str, sorted(os.sched_getaffinity(0))))}): choose another --cpuset"
        )


def check_model(model: str, *, cpu: bool) -> None:
    """Raises :class:`ConfigError` unless ``model`` is a model's directory or, without
    ``cpu``, looks like a name on a hub (``org/name``)."""
    path = Path(model)
    if (path / "config.json").is_file():
        return
    if path.exists():
        raise ConfigError(f"{model} is not a model: it has no config.json")
    organisation, slash, name = model.partition("/")
    looks_like_hub = slash and organisation and name and "/" not in name and model[0] not in ".~/"
    if not looks_like_hub or cpu or Path(organisation).exists():
        raise ConfigError(
            f"there is no model in {model}: name its directory, or make a small one with "
            f"`kvlease model make {shlex.quote(model)}`"
        )


def check_vllm() -> None:
    """Raises :class:`ConfigError` unless a supported vLLM is installed."""
    try:
        compat.require_supported_vllm()
    except compat.UnsupportedVllm as error:
        raise ConfigError(
            f"{error} (its CPU build: `make install` in kvlease's repository)"
        ) from None


def check_port(host: str, port: int, option: str) -> None:
    """Raises :class:`ConfigError` if ``port`` is in use on ``host``."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"the host {host!r} cannot be resolved: {error.strerror}") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is taken: stop what uses it or choose another {option}"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"port {port} on {host} needs root: choose {option} above 1023"
                ) from None
            # EADDRNOTAVAIL: an advertised host need not be an address of this machine.


def execute(launch: Launch) -> NoReturn:
    """Becomes the engine."""
    if launch.cpus:
        os.sched_setaffinity(0, launch.cpus)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(launch.argv[0], launch.argv, {**os.environ, **launch.env})
