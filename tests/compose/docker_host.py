"""Docker for tests: the engine that runs, or one from Debian's packages that is started
here and ended again; images from their registry, or stand-ins where none is reached."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

STANDIN = Path(__file__).with_name("standin.sh")
BASE_IMAGES = {"etcd": "quay.io/coreos/etcd:v3.5.21", "python": "python:3.11-slim-bookworm"}

_START_S = 60.0
_STEP_S = 900.0


class NoDocker(Exception):
    """Docker cannot run here; the message says why."""


def run(
    *command: str, env: Mapping[str, str] | None = None, timeout_s: float = _STEP_S
) -> subprocess.CompletedProcess[str]:
    """Raises AssertionError with the end of its output if the command fails."""
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    output = (ended.stdout + ended.stderr).strip()[-3000:]
    assert ended.returncode == 0, f"`{' '.join(command)}` failed:\n{output}"
    return ended


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Tells the user of these tests what takes so long, and how long it took."""
    print(f"compose: {what} ...", file=sys.__stderr__, flush=True)
    started = time.monotonic()
    yield
    print(f"compose: {what}: {time.monotonic() - started:.1f} s", file=sys.__stderr__, flush=True)


@contextlib.contextmanager
def docker() -> Iterator[None]:
    """Inside, `docker` and `docker compose` work. Raises :class:`NoDocker`."""
    with contextlib.ExitStack() as stack:
        if not _succeeds("docker", "info"):
            if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
                raise NoDocker("Docker does not answer, and only root on Debian can install it")
            with timed("installing Docker"):
                run(str(STANDIN), "engine")
            stack.enter_context(_daemon())
        if not (_succeeds("docker", "compose", "version") and _succeeds("docker", "buildx")):
            if os.geteuid() != 0:
                raise NoDocker("`docker compose` or `docker buildx` is missing: install them")
            with timed("installing docker compose"):
                run(str(STANDIN), "plugins")
        yield


def have_base_images() -> None:
    """Those that compose.yaml's own images are made of."""
    for kind, image in BASE_IMAGES.items():
        if not _succeeds("docker", "image", "inspect", image) and not _pulled(image):
            with timed(f"making a stand-in for {image}"):
                run(str(STANDIN), kind, image)


def gateway() -> str:
    """The address under which containers reach this machine: the first of the network that
    Docker always has."""
    wanted = "{{(index .IPAM.Config 0).Subnet}}"
    subnet = run("docker", "network", "inspect", "bridge", "--format", wanted).stdout.strip()
    return str(ipaddress.ip_network(subnet)[1])


def _pulled(image: str) -> bool:
    with timed(f"pulling {image}"):
        return _succeeds("docker", "pull", "--quiet", image)


def _succeeds(*command: str) -> bool:
    try:
        return (
            subprocess.run(command, capture_output=True, timeout=_STEP_S, check=False).returncode
            == 0
        )
    except OSError:
        return False


@contextlib.contextmanager
def _daemon() -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["dockerd", "--log-level=warn"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            deadline = time.monotonic() + _START_S
            while not _succeeds("docker", "info"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise NoDocker(f"dockerd does not run here: {log.read()[-2000:].decode()}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)
