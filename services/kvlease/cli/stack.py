"""A local stack: etcd, services and engines as processes of this machine.

``kvlease up`` and ``kvlease down`` are thin layers over this; tests use it directly, to
end, stop and restart single parts, which keep their addresses.

    with Stack(Options(directory=path, engines="none")) as stack:
        stack.kill("lease-0")
        stack.start_part("lease-0")
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvlease.cli import processes, ready, records
from kvlease.cli.parts import ENGINES, Kind, Options, Part, Plan, make
from kvlease.cli.tiny_model import make_model
from kvlease.config import ConfigError

__all__ = ["Options", "Stack", "StackError", "down"]

# An engine on two busy cores: 40 to 55 s were measured; four of them take longer.
START_TIMEOUT_S = 300.0
_PROGRESS_EVERY_S = 5.0
_POLL_S = 0.2

# Who goes first, and how long after SIGTERM it is killed. Engines say goodbye to the
# registry, so they end before it.
_STOP_ORDER: Sequence[tuple[tuple[Kind, ...], float]] = (
    (("prefill", "decode"), 20.0),
    (("router", "lease", "registry", "all"), 8.0),
    (("etcd", "traces"), 5.0),
)


class StackError(Exception):
    """A part of the stack did not start, or did not end. The message names it, and shows
    the end of its log."""


class Stack:
    """A stack that this process started. Not for use by several threads at once."""

    def __init__(
        self,
        options: Options,
        *,
        progress: Callable[[str], None] = lambda line: None,
        owner: bool = False,
    ) -> None:
        """``owner``: ``kvlease down`` ends this process too. Raises
        :class:`ConfigError` for what cannot be started."""
        self.options = options
        self.plan: Plan = make(options)
        self._progress = progress
        self._owner = owner
        self._running: dict[str, tuple[subprocess.Popen[bytes], records.Record]] = {}
        self._incarnations: dict[str, str] = {}
        self._lock_file: int | None = None

    # The whole stack

    def start(self, timeout_s: float = START_TIMEOUT_S, *, without: Collection[str] = ()) -> None:
        """Starts everything, except for the parts named in ``without`` (for
        :meth:`start_part`, later), and returns when turns would be answered.

        Raises :class:`ConfigError` for what the user can mend, :class:`StackError` when a
        part fails; either way nothing is left running.
        """
        try:
            self._prepare()
            started = time.monotonic()
            deadline = started + timeout_s
            stages: Sequence[tuple[Kind, ...]] = (
                ("etcd",),
                ("traces", "registry", "lease", "router", "all"),
                ENGINES,
            )
            for kinds in stages:
                parts = [part for part in self.plan.of(*kinds) if part.name not in without]
                for part in parts:
                    self._spawn(part)
                self._wait(parts, deadline, started)
            if self.plan.of(*ENGINES):
                self._wait_routers_ready(deadline)
        except BaseException:
            self.stop()
            raise
        self._save_endpoints()

    def stop(self, *, at_once: bool = False) -> None:
        """Ends everything that runs; ``at_once``: by SIGKILL. Does nothing where that is
        done. Raises :class:`StackError` if a process cannot be ended."""
        if self._lock_file is None:
            return
        stuck: list[str] = []
        for kinds, grace_s in _STOP_ORDER:
            names = [n for n, (_, record) in self._running.items() if record.kind in kinds]
            if names:
                self._progress(f"ending {', '.join(names)}")
                stuck += self._end(names, 0 if at_once else grace_s)
        if stuck:
            raise StackError(f"{', '.join(stuck)} cannot be ended: stuck in the kernel")
        records.clear(self.options.directory)
        self._unlock()

    def leave(self) -> None:
        """Lets the stack run on without this process; ``down`` ends it."""
        self._owner = False
        self._save_state()
        self._running.clear()
        self._unlock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # Single parts, by name: "etcd", "registry", "lease-0", "router-0", "prefill-0", ...
    # ("services" instead of the first four with the embedded store)

    def kill(self, name: str) -> None:
        """SIGKILL to the part and its children; returns when they are gone."""
        record = self._record(name)
        processes.send(record.identity, signal.SIGKILL)
        self._end([name], 0)

    def stop_part(self, name: str) -> None:
        """Asks the part to end, as an orderly shutdown does, and waits for it."""
        record = self._record(name)
        grace_s = next(grace for kinds, grace in _STOP_ORDER if record.kind in kinds)
        if self._end([name], grace_s):
            raise StackError(f"{name} cannot be ended: stuck in the kernel")

    def start_part(
        self, name: str, *, wait: bool = True, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Starts a part that does not run, at its old addresses; an engine with a new
        incarnation, etcd with its data. With ``wait``: returns when it does its work."""
        part = self.plan.part(name)
        if name in self._running and processes.members(self._record(name).identity):
            raise StackError(f"{name} runs already")
        self._spawn(part)
        if wait:
            self._wait([part], time.monotonic() + timeout_s)
        self._save_endpoints()

    def wait_part(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when a part that was started does its work."""
        self._wait([self.plan.part(name)], time.monotonic() + timeout_s)

    def restart(self, name: str) -> None:
        """:meth:`kill`, then :meth:`start_part`."""
        self.kill(name)
        self.start_part(name)

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal to the part and its children (SIGSTOP, SIGCONT)."""
        processes.send(self._record(name).identity, number)

    def pid(self, name: str) -> int:
        """The pid of the part's first process."""
        return self.identity(name).pid

    def identity(self, name: str) -> processes.Identity:
        """The part's first process; also when it has ended unasked."""
        return self._record(name).identity

    def incarnation(self, engine_id: str) -> str:
        """That of the engine's last start."""
        return self._incarnations[engine_id]

    def log(self, name: str) -> Path:
        """Where the part's output goes."""
        return records.log_path(self.options.directory, self.plan.part(name).name)

    def ended(self) -> list[str]:
        """Names of parts that ended without being asked to; each is named once."""
        gone = [
            name
            for name, (process, record) in self._running.items()
            if process.poll() is not None and not processes.members(record.identity)
        ]
        for name in gone:
            del self._running[name]
        return gone

    @property
    def running(self) -> list[str]:
        """Names of the parts that were started and not ended."""
        return list(self._running)

    @property
    def endpoints(self) -> dict[str, Any]:
        """What ``endpoints.json`` holds."""
        pids = {name: record.identity.pid for name, (_, record) in self._running.items()}
        return records.endpoints(self.plan, pids, self.options.directory)

    # How

    def _prepare(self) -> None:
        directory = self.options.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock(directory)
            shutil.rmtree(directory / "logs", ignore_errors=True)
            shutil.rmtree(directory / "etcd", ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be used: {error.strerror}") from None
        if self.options.etcd and not any(map(ready.accepts, self.options.etcd.split(","))):
            raise ConfigError(
                f"no etcd answers at {self.options.etcd}: start it, or leave --etcd out to "
                "have one started"
            )
        if self.plan.of(*ENGINES) and self.options.model is None:
            make_model(self.options.model_directory)
        self._save_state()

    def _lock(self, directory: Path) -> None:
        in_use = ConfigError(
            f"a stack runs in {directory}: end it with `kvlease down --dir {directory}`, or "
            "choose another --dir"
        )
        lock_file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(processes.members(r.identity) for r in records.load(directory).records):
                raise in_use
        except BlockingIOError:
            os.close(lock_file)
            raise in_use from None
        except ConfigError:
            os.close(lock_file)
            raise
        self._lock_file = lock_file

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _spawn(self, part: Part) -> None:
        command = part.launch()
        log = self.log(part.name)
        try:
            process, identity = processes.spawn(command.argv, command.env, log, command.cpus)
        except OSError as error:
            raise StackError(
                f"{part.name} cannot be started: {command.argv[0]}: {error.strerror}"
            ) from None
        self._running[part.name] = (process, records.Record(part.name, part.kind, identity))
        self._incarnations[part.name] = command.incarnation
        self._save_state()

    def _wait(self, parts: Sequence[Part], deadline: float, since: float | None = None) -> None:
        """``since``: the start of what progress tells the seconds of."""
        pending = list(parts)
        said = time.monotonic()
        started = said if since is None else since
        while pending:
            for part in list(pending):
                self._check_runs(part)
                if ready.is_ready(part, self.plan, self._incarnations[part.name]):
                    pending.remove(part)
                    self._progress(f"{part.name} is ready ({time.monotonic() - started:.1f} s)")
            now = time.monotonic()
            if pending and now > deadline:
                raise self._failure(pending[0], "is not ready in time")
            if pending and now - said >= _PROGRESS_EVERY_S:
                said = now
                names = ", ".join(part.name for part in pending)
                self._progress(f"waiting for {names} ({now - started:.0f} s)")
            if pending:
                time.sleep(_POLL_S)

    def _wait_routers_ready(self, deadline: float) -> None:
        for part in self.plan.of("router", "all"):
            while not ready.http_ok(f"http://{part.http}/ready"):
                self._check_runs(part)
                if time.monotonic() > deadline:
                    raise self._failure(part, "does not see the engines")
                time.sleep(_POLL_S)

    def _check_runs(self, part: Part) -> None:
        process, _ = self._running[part.name]
        code = process.poll()
        if code is not None:
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise self._failure(part, how)

    def _failure(self, part: Part, how: str) -> StackError:
        log = self.log(part.name)
        return StackError(f"{part.name} {how}; the last lines of {log}:\n{records.tail(log)}")

    def _end(self, names: Sequence[str], grace_s: float) -> list[str]:
        """Ends parts; returns the names of those that could not be ended."""
        identities = {self._running[name][1].identity: name for name in names}
        popens = [self._running[name][0] for name in names]

        def reap() -> None:
            for process in popens:
                process.poll()

        stuck = processes.end(list(identities), grace_s=grace_s, reap=reap)
        stuck_names = [identities[identity] for identity in stuck]
        for name in names:
            if name not in stuck_names:
                self._running[name][0].wait()
                del self._running[name]
        self._save_state()
        return stuck_names

    def _record(self, name: str) -> records.Record:
        if name not in self._running:
            self.plan.part(name)  # a KeyError that names all parts
            raise StackError(f"{name} does not run")
        return self._running[name][1]

    def _save_state(self) -> None:
        owner = processes.identify(os.getpid()) if self._owner else None
        records.save(
            self.options.directory,
            records.State(tuple(record for _, record in self._running.values()), owner),
        )

    def _save_endpoints(self) -> None:
        records.save_endpoints(self.options.directory, self.endpoints)


def down(directory: Path, *, progress: Callable[[str], None] = lambda line: None) -> list[str]:
    """Ends every process that was started in ``directory`` and is still there, whoever
    started it; returns the parts' names. Calling it again does nothing.

    Raises :class:`StackError` if a process cannot be ended, :class:`ConfigError` if the
    directory's record cannot be read.
    """
    state = records.load(directory)
    ended: list[str] = []
    if state.owner is not None and processes.is_alive(state.owner):
        # It ends its own, and starts nothing more.
        progress("asking `kvlease up` to end")
        os.kill(state.owner.pid, signal.SIGTERM)
        ended = [r.name for r in state.records if processes.members(r.identity)]
        _wait_for(state.owner, 60.0)
        state = records.load(directory)
    for kinds, grace_s in _STOP_ORDER:
        left = {
            record.identity: record.name
            for record in state.records
            if record.kind in kinds and processes.members(record.identity)
        }
        if left:
            progress(f"ending {', '.join(left.values())}")
            ended += [name for name in left.values() if name not in ended]
            stuck = processes.end(list(left), grace_s=grace_s)
            if stuck:
                names = ", ".join(left[identity] for identity in stuck)
                raise StackError(f"{names} cannot be ended: stuck in the kernel")
    records.clear(directory)
    return ended


def _wait_for(identity: processes.Identity, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while processes.is_alive(identity) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
