"""Processes are ended exactly, with all their children, and no others."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease.cli import processes

# A child that ignores SIGTERM, as a hung worker does; "up" is printed by it.
_PARENT_WITH_STUBBORN_CHILD = """
import signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", '''
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
'''])
time.sleep(60)
"""


class Started:
    """A process of the test's own, killed at its end whatever happens."""

    def __init__(self, directory: Path, code: str, *, cpus: tuple[int, ...] = ()) -> None:
        self.log = directory / "log"
        self.popen, self.identity = processes.spawn(
            [sys.executable, "-c", code], os.environ, self.log, cpus
        )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 10
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in its output"
            time.sleep(0.01)

    def end(self, grace_s: float) -> list[processes.Identity]:
        return processes.end([self.identity], grace_s=grace_s, reap=self.popen.poll)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path, _PARENT_WITH_STUBBORN_CHILD)
    try:
        started.wait_for("up")
        yield started
    finally:
        processes.send(started.identity, signal.SIGKILL)
        started.popen.wait()


def test_a_child_that_ignores_sigterm_is_ended_with_its_parent(parent: Started) -> None:
    assert len(processes.members(parent.identity)) == 2
    assert parent.end(grace_s=0.2) == []
    assert processes.members(parent.identity) == []


def test_children_are_found_when_their_parent_is_dead(parent: Started) -> None:
    os.kill(parent.identity.pid, signal.SIGKILL)
    parent.popen.wait()
    assert not processes.is_alive(parent.identity)
    assert len(processes.members(parent.identity)) == 1
    assert parent.end(grace_s=0.2) == []
    assert processes.members(parent.identity) == []


def test_another_process_with_the_same_pid_is_left_alone(parent: Started) -> None:
    earlier = dataclasses.replace(parent.identity, start_time=parent.identity.start_time - 1)
    assert not processes.is_alive(earlier)
    assert processes.end([earlier], grace_s=0) == []
    assert len(processes.members(parent.identity)) == 2


def test_a_process_of_an_earlier_boot_is_left_alone(parent: Started) -> None:
    earlier = dataclasses.replace(parent.identity, boot_id="another")
    assert processes.end([earlier], grace_s=0) == []
    assert len(processes.members(parent.identity)) == 2


def test_a_stopped_process_is_ended_in_order(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("goodbye", flush=True), sys.exit()))
print("up", flush=True)
time.sleep(60)
"""
    started = Started(tmp_path, code)
    started.wait_for("up")
    processes.send(started.identity, signal.SIGSTOP)
    assert started.end(grace_s=10) == []
    assert "goodbye" in started.log.read_text()


def test_an_ended_process_that_nobody_waited_for_is_not_alive(tmp_path: Path) -> None:
    started = Started(tmp_path, "")
    deadline = time.monotonic() + 10
    while processes.is_alive(started.identity):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started.popen.wait()


def test_a_process_runs_on_its_cores_from_the_start(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    started = Started(
        tmp_path, "import os; print(sorted(os.sched_getaffinity(0)), flush=True)", cpus=(core,)
    )
    started.popen.wait()
    assert started.log.read_text().strip() == f"[{core}]"
    assert os.sched_getaffinity(0) == before
