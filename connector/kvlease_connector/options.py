"""What the connector is told in ``kv_connector_extra_config["kvlease"]``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvlease.config import ConfigError, Settings, load

CPU_PROGRESS_DELAY_US = 1000
"""NIXL's progress thread polls without a pause by default and so takes a whole core,
which a host without a GPU needs for the model. With 1 ms an idle agent costs 5 % of a
core and a 16 MB read takes the same 20 ms."""


@dataclass(frozen=True, slots=True)
class Options:
    """One engine's identity, and the settings it shares with the services."""

    settings: Settings
    engine_id: str
    """The name that stays the same over restarts."""
    incarnation: str
    """New at every start."""
    http_address: str = ""
    """Base URL of the engine's OpenAI server; empty: the engine does not register."""
    weights_version: str = ""
    progress_thread_delay_us: int | None = None
    """Pause of NIXL's progress thread. None: 1000 on CPU hosts, NIXL's own (0) on others."""

    @property
    def transfer_engine_id(self) -> str:
        """The engine id that NIXL peers see. It differs for each incarnation, so that a
        peer never uses what it cached about an earlier one."""
        if self.incarnation in self.engine_id:
            return self.engine_id
        return f"{self.engine_id}-{self.incarnation}"


@dataclass(frozen=True)
class _Raw:
    engine_id: str = ""
    http_address: str = ""
    incarnation: str = ""
    weights_version: str = ""
    progress_thread_delay_us: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def parse(
    extra_config: Mapping[str, Any], *, default_engine_id: str, default_incarnation: str
) -> Options:
    """Options from vLLM's extra config. Raises :class:`ConfigError`.

    ``default_engine_id`` and ``default_incarnation`` are vLLM's own: they must be the
    same in all processes of one engine.
    """
    given = extra_config.get("kvlease", {})
    if not isinstance(given, Mapping):
        raise ConfigError('kv_connector_extra_config["kvlease"] must be an object')
    known = [item.name for item in fields(_Raw)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f'kv_connector_extra_config["kvlease"] has no {name!r}; {hint}')
    raw = _Raw(**given)
    return Options(
        settings=load(overrides=raw.settings),
        engine_id=raw.engine_id or default_engine_id,
        incarnation=raw.incarnation or default_incarnation,
        http_address=raw.http_address.rstrip("/"),
        weights_version=raw.weights_version,
        progress_thread_delay_us=raw.progress_thread_delay_us,
    )
