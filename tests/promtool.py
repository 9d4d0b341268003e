"""The real promtool for tests: from PATH, else out of Debian's package ``prometheus``, whose
server is neither installed nor started; kept under build/tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from required import unavailable

_CACHED = Path(__file__).parent.parent / "build" / "tools" / "promtool"


def promtool(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it. Where it cannot be had the test is skipped, or fails where engines are
    required."""
    return subprocess.run(
        [_binary(), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def _binary() -> str:
    installed = shutil.which("promtool")
    if installed is not None:
        return installed
    if not _CACHED.exists():
        problem = _fetch()
        if problem:
            unavailable(f"this test needs promtool (Prometheus) in PATH: {problem}")
    return str(_CACHED)


def _fetch() -> str:
    """Puts the binary into the cache; the reason if that did not work."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return "there is no apt-get to download its package with"
    with tempfile.TemporaryDirectory() as directory:
        # Indexes may be missing or old; only root can fetch new ones.
        for command in (["apt-get", "download"], ["apt-get", "update"], ["apt-get", "download"]):
            package = ["prometheus"] if command[1] == "download" else []
            ended = _run([*command, "-q", *package], directory)
            if command[1] == "download" and ended.returncode == 0:
                break
        else:
            return f"apt-get could not download prometheus: {ended.stderr.strip()[-200:]}"
        (package_file,) = Path(directory).glob("*.deb")
        unpacked = _run(["dpkg", "-x", str(package_file), "unpacked"], directory)
        if unpacked.returncode:
            return f"dpkg could not unpack prometheus: {unpacked.stderr.strip()[-200:]}"
        _CACHED.parent.mkdir(parents=True, exist_ok=True)
        # Several test processes may do this at once: the last rename wins.
        partial = _CACHED.with_suffix(f".{os.getpid()}")
        shutil.copy(Path(directory) / "unpacked/usr/bin/promtool", partial)
    partial.rename(_CACHED)
    return ""


def _run(command: list[str], directory: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=150, check=False
    )
