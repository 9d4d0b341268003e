"""Real engines for tests: one stack for all of them, because engines take a minute to
start. What a test has killed or stopped runs again when the next one begins."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines.look import MODEL
from engines.report import FAULT_TABLE
from engines.turns import Client
from etcd_server import etcd_binary
from otlp_receiver import Receiver, receiving
from required import unavailable

from kvlease.cli import launch, processes
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.cli.tiny_model import make_model
from kvlease.config import ConfigError

EXTRA = ("prefill-1", "decode-1")
"""Engines that only some tests need: see second_prefill and second_decode."""

# A test may be the one for which the engines are started, and restart some by itself.
_TIMEOUT_S = 600


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FAULT_TABLE:
        terminalreporter.section("faults")
        for line in FAULT_TABLE:
            terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


class EngineStack(Stack):
    """A stack that knows what should run, and can make it so."""

    wanted: set[str]

    def repair(self) -> None:
        """Continues what is stopped and starts what does not run."""
        missing = []
        for name in [part.name for part in self.plan.parts if part.name in self.wanted]:
            if name in self.running and processes.members(self.identity(name)):
                self.send(name, signal.SIGCONT)
            else:
                missing.append(name)
        self.ended()
        for name in missing:
            if name in self.running:
                self.kill(name)
            self.start_part(name, wait=False)
        for name in missing:
            self.wait_part(name)

    def add(self, name: str) -> None:
        """Starts one of :data:`EXTRA`, and from now on keeps it running."""
        self.wanted.add(name)
        self.repair()

    def remove(self, name: str) -> None:
        """Undoes :meth:`add`."""
        self.wanted.discard(name)
        if name in self.running:
            self.stop_part(name)


@pytest.fixture(scope="session")
def needs_engines() -> None:
    """For tests that start engines by themselves: skipped, or failed, where none can run."""
    require_engines()


def require_engines() -> None:
    try:
        launch.check_vllm()
    except ConfigError as error:
        unavailable(str(error))
    etcd_binary()


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Receives the spans of everything in the stack."""
    with receiving() as started:
        yield started


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's directory."""
    directory = tmp_path_factory.mktemp("models") / MODEL
    make_model(directory)
    return directory


@pytest.fixture(scope="session")
def engine_stack(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, model: Path
) -> Iterator[EngineStack]:
    """One stack for all tests: etcd, the services, a prefill and a decode engine, and
    addresses for a second one of each. Use ``stack`` instead: that one is in order."""
    require_engines()
    stack = EngineStack(
        Options(
            directory=tmp_path_factory.mktemp("stack"),
            model=model,
            prefill=2,
            decode=2,
            lease_replicas=2,
            # Longer than an engine takes to start: one that comes back does so while its
            # earlier incarnation's session still lives.
            assignments=("session_ttl=100",),
            # What is read must come from a decode engine, not from P's own cache.
            prefill_prefix_cache=False,
            # Spans go to the stack's own receiver, which passes them on to this one.
            traces=True,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint},
        ),
        progress=lambda line: print(f"stack: {line}", file=sys.__stderr__, flush=True),
    )
    stack.wanted = {part.name for part in stack.plan.parts} - set(EXTRA)
    try:
        stack.start(without=EXTRA)
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def stack(engine_stack: EngineStack) -> EngineStack:
    """The stack, with everything running that should."""
    engine_stack.repair()
    return engine_stack


@pytest.fixture
def client(stack: EngineStack) -> Client:
    """Sends turns to the router."""
    return Client(stack.endpoints["router_http"], MODEL)


@pytest.fixture(scope="module")
def second_prefill(engine_stack: EngineStack) -> Iterator[str]:
    """The name of a second prefill engine, which runs as long as the module's tests."""
    engine_stack.add("prefill-1")
    yield "prefill-1"
    engine_stack.remove("prefill-1")


@pytest.fixture
def second_decode(engine_stack: EngineStack) -> Iterator[str]:
    """The name of a second decode engine, which runs as long as the test."""
    engine_stack.add("decode-1")
    yield "decode-1"
    engine_stack.remove("decode-1")


@pytest.fixture
def start_stack(tmp_path: Path, model: Path) -> Iterator[Callable[..., Stack]]:
    """Starts a stack of the test's own, with :class:`Options`' arguments."""
    require_engines()
    started: list[Stack] = []

    def start(**options: object) -> Stack:
        values: dict[str, object] = {
            "directory": tmp_path / f"stack-{len(started)}",
            "model": model,
            "prefill_prefix_cache": False,
            **options,
        }
        stack = Stack(Options(**values))  # type: ignore[arg-type]
        started.append(stack)
        stack.start()
        return stack

    yield start
    for stack in started:
        stack.stop()
