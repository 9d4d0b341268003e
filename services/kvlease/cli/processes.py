"""Processes that were started here, told apart from all others, and ended for certain.

A process is known by its pid, its start time and the machine's boot: the kernel gives a
pid to another process later. Each is started as the leader of a session of its own, so
that its children (vLLM's engine core and workers) are found by the session's number even
when the leader is dead. Linux only: this reads /proc (proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


@dataclass(frozen=True)
class Identity:
    """One process, for ever."""

    pid: int
    start_time: int
    """Clock ticks since boot."""
    boot_id: str


@dataclass(frozen=True)
class _Stat:
    pid: int
    state: str
    session: int
    start_time: int


def boot_id() -> str:
    """Changes with every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity:
    """The process that has ``pid`` now. Raises ProcessLookupError if none has."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return Identity(pid, stat.start_time, boot_id())


def spawn(
    argv: Sequence[str], env: Mapping[str, str], log: Path, cpus: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], Identity]:
    """Starts a process in a session of its own, with nothing on stdin and both outputs
    appended to ``log``; on ``cpus`` only, if there are any. Raises OSError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # A child inherits the affinity of the thread that starts it, so it never runs on
    # another core, not even for its first instructions.
    before = os.sched_getaffinity(0)
    with log.open("ab") as output:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
    # It is our child and not waited for, so it is there, if only as a zombie.
    return process, identify(process.pid)


def is_alive(identity: Identity) -> bool:
    """Whether the process itself runs (a zombie does not)."""
    stat = _stat(identity.pid)
    return (
        stat is not None
        and stat.state not in "ZX"
        and stat.start_time == identity.start_time
        and identity.boot_id == boot_id()
    )


def members(identity: Identity) -> list[int]:
    """Pids of all living processes of the session that ``identity`` leads or led."""
    if identity.boot_id != boot_id():
        return []
    leader = _stat(identity.pid)
    if leader is not None and leader.start_time != identity.start_time:
        # Another process has the pid. The kernel gives no pid away that still names a
        # session, so nothing is left of ours.
        return []
    return [
        stat.pid
        for stat in _all_stats()
        if stat.session == identity.pid
        and stat.state not in "ZX"
        and stat.start_time >= identity.start_time
    ]


def send(identity: Identity, number: signal.Signals) -> None:
    """Sends a signal to the process and all its children in the session."""
    for pid in members(identity):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(
    identities: Sequence[Identity],
    *,
    grace_s: float,
    reap: Callable[[], object] = lambda: None,
    wait_s: float = 10.0,
) -> list[Identity]:
    """Ends processes and their children: SIGTERM to each leader, after ``grace_s``
    SIGKILL to whatever is left. ``reap`` is called while waiting (a parent waits for its
    children in it). Returns those that outlived SIGKILL for ``wait_s``: stuck in the
    kernel.
    """
    asked = [identity for identity in identities if is_alive(identity)]
    for identity in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity.pid, signal.SIGTERM)
            os.kill(identity.pid, signal.SIGCONT)  # a stopped one would never see it
    _wait_gone(asked, lambda i: bool(members(i)), grace_s, reap)
    remaining = [identity for identity in identities if members(identity)]
    for identity in remaining:
        send(identity, signal.SIGKILL)
    return _wait_gone(remaining, lambda i: bool(members(i)), wait_s, reap)


def _wait_gone(
    identities: Sequence[Identity],
    there: Callable[[Identity], bool],
    timeout_s: float,
    reap: Callable[[], object],
) -> list[Identity]:
    deadline = time.monotonic() + timeout_s
    left = list(identities)
    while True:
        reap()
        left = [identity for identity in left if there(identity)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field, the command in parentheses, may hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(pid=pid, state=fields[0], session=int(fields[3]), start_time=int(fields[19]))


def _all_stats() -> list[_Stat]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [stat for stat in map(_stat, pids) if stat is not None]
