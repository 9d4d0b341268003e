"""The files of a local stack's directory: which processes belong to it (``stack.json``,
for ``kvlease down``) and where it is reached (``endpoints.json``, for everybody)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlease.cli import processes
from kvlease.cli.parts import ENGINES, Kind, Part, Plan
from kvlease.config import ConfigError

ENDPOINTS = "endpoints.json"
_STATE = "stack.json"


@dataclass(frozen=True)
class Record:
    """A process that was started for a part."""

    name: str
    kind: str
    identity: processes.Identity


@dataclass(frozen=True)
class State:
    """Everything that was started in a directory."""

    records: tuple[Record, ...]
    owner: processes.Identity | None = None
    """A ``kvlease up`` that is in the foreground, or still starting things."""


def log_path(directory: Path, name: str) -> Path:
    """Where a part's output goes."""
    return directory / "logs" / f"{name}.log"


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, indented; at most 64 KB are looked at."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return "  (no output)"
    kept = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"  {line}" for line in kept) or "  (no output)"


def save(directory: Path, state: State) -> None:
    """Replaces ``stack.json``."""
    _write(directory / _STATE, asdict(state))


def load(directory: Path) -> State:
    """What ``stack.json`` says; nothing where there is none. Raises
    :class:`ConfigError` if it cannot be read."""
    path = directory / _STATE
    try:
        value = json.loads(path.read_text())
        return State(
            records=tuple(
                Record(item["name"], item["kind"], processes.Identity(**item["identity"]))
                for item in value["records"]
            ),
            owner=processes.Identity(**value["owner"]) if value["owner"] else None,
        )
    except (FileNotFoundError, NotADirectoryError):
        return State(())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): remove it by hand") from None


def clear(directory: Path) -> None:
    """Removes both files."""
    for name in (ENDPOINTS, _STATE):
        (directory / name).unlink(missing_ok=True)


def endpoints(plan: Plan, pids: Mapping[str, int], directory: Path) -> dict[str, Any]:
    """The content of ``endpoints.json``. Where there are several of a kind, the plain
    name stands for the first, and a list holds all."""

    def process(part: Part) -> dict[str, Any]:
        log = str(log_path(directory, part.name).absolute())
        return {"pid": pids.get(part.name), "log": log}

    def engines(kind: Kind) -> list[dict[str, Any]]:
        return [
            {"engine_id": part.name, "http": f"http://{part.http}", **process(part)}
            for part in plan.of(kind)
        ]

    return {
        "router_http": f"http://{plan.router_http[0]}",
        "router_grpc": plan.router_grpc[0],
        "lease_grpc": plan.lease_grpc[0],
        "registry_grpc": plan.registry_grpc,
        "etcd": plan.etcd,
        "traces": plan.traces,
        "prefill": engines("prefill"),
        "decode": engines("decode"),
        "routers_http": [f"http://{address}" for address in plan.router_http],
        "routers_grpc": list(plan.router_grpc),
        "lease_replicas_grpc": list(plan.lease_grpc),
        "metrics": {
            part.name: f"http://{part.metrics}/metrics" for part in plan.parts if part.metrics
        },
        "services": [
            {"name": part.name, **process(part)} for part in plan.parts if part.kind not in ENGINES
        ],
    }


def save_endpoints(directory: Path, endpoints: Mapping[str, Any]) -> None:
    """Replaces ``endpoints.json``."""
    _write(directory / ENDPOINTS, endpoints)


def load_endpoints(directory: Path) -> dict[str, Any]:
    """Raises :class:`ConfigError` where no stack runs."""
    path = directory / ENDPOINTS
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"no stack runs in {directory}: start one with `kvlease up --dir {directory}`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    assert isinstance(value, dict)
    return value


def _write(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    scratch.write_text(json.dumps(value, indent=2) + "\n")
    scratch.replace(path)
