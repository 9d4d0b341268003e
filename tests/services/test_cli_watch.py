"""`kvlease leases --watch` and `kvlease engines --watch` through an outage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from etcd_server import free_ports
from test_serve import serving


@contextmanager
def watching(command: str, setting: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlease.cli", command, "--watch", "--json", f"--set={setting}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("command", "service"), [("leases", "lease"), ("engines", "registry")])
def test_a_watch_says_that_there_is_an_outage_and_goes_on(command: str, service: str) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    listen = {f"{service}_listen": address}
    with serving("all", **listen) as first:
        first.wait_for("ready")
        with watching(command, f"{service}_endpoint={address}") as watch:
            assert watch.stdout is not None
            assert watch.stderr is not None
            assert json.loads(watch.stdout.readline()) == []

            first.end()
            said = watch.stderr.readline()
            assert f"answers at {address}: start it" in said
            assert said.endswith("; asking again every second\n")

            with serving("all", **listen):
                # What was printed before the outage is at most a few lines.
                assert {watch.stdout.readline() for _ in range(5)} == {"[]\n"}
