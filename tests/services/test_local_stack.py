"""`kvlease up` and `kvlease down` with real processes: etcd and the services. Engines are in
tests/engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from etcd_server import etcd_binary

from kvlease.cli import processes, ready
from kvlease.cli import stack as local
from kvlease.cli.main import cli
from kvlease.cli.parts import Options
from kvlease.config import ConfigError

DEADLINE_S = 60.0


def options(directory: Path, **changes: object) -> Options:
    return Options(directory=directory, engines="none", **changes)  # type: ignore[arg-type]


def kvlease(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlease.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def pids(endpoints: dict[str, object]) -> list[int]:
    services = endpoints["services"]
    assert isinstance(services, list)
    return [service["pid"] for service in services]


def runs(pid: int) -> bool:
    try:
        return processes.is_alive(processes.identify(pid))
    except ProcessLookupError:
        return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[local.Stack]:
    etcd_binary()
    directory = tmp_path_factory.mktemp("stack")
    with local.Stack(options(directory, routers=2, lease_replicas=2)) as started:
        yield started


def test_its_endpoints_are_written_and_answer(stack: local.Stack) -> None:
    endpoints = json.loads((stack.options.directory / "endpoints.json").read_text())
    assert endpoints == stack.endpoints
    assert endpoints["prefill"] == endpoints["decode"] == []
    assert ready.etcd_healthy(endpoints["etcd"])
    assert ready.grpc_serving(endpoints["registry_grpc"])
    assert endpoints["lease_grpc"] == endpoints["lease_replicas_grpc"][0]
    assert all(map(ready.grpc_serving, endpoints["lease_replicas_grpc"]))
    assert endpoints["router_http"] == endpoints["routers_http"][0]
    assert all(ready.http_ok(f"{url}/health") for url in endpoints["routers_http"])
    assert all(map(ready.accepts, endpoints["routers_grpc"]))
    names = [service["name"] for service in endpoints["services"]]
    assert names == ["etcd", "registry", "lease-0", "lease-1", "router-0", "router-1"]
    assert all(map(runs, pids(endpoints)))
    assert all(Path(service["log"]).exists() for service in endpoints["services"])


def test_people_can_look_into_it(stack: local.Stack) -> None:
    directory = str(stack.options.directory)
    for command in ("engines", "leases"):
        result = CliRunner().invoke(cli, [command, "--json", "--dir", directory])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output) == []
        result = CliRunner().invoke(cli, [command, "--dir", directory])
        assert f"0 {command}" in result.output
    result = CliRunner().invoke(cli, ["end", "chat-1", "--model", "m", "--dir", directory])
    assert "chat-1 is ended; it held no lease" in result.output
    result = CliRunner().invoke(cli, ["drain", "decode-0", "--dir", directory])
    assert "there is no engine 'decode-0'; there are: none" in result.output


def test_a_second_stack_in_its_directory_is_refused(stack: local.Stack) -> None:
    other = local.Stack(options(stack.options.directory))
    with pytest.raises(ConfigError, match=r"a stack runs in .*kvlease down"):
        other.start()
    assert all(map(runs, pids(stack.endpoints)))


@pytest.mark.parametrize("name", ["registry", "lease-1", "router-1", "etcd"])
def test_a_killed_part_comes_back_at_the_same_address(stack: local.Stack, name: str) -> None:
    before = stack.endpoints
    pid = stack.pid(name)
    stack.kill(name)
    assert not runs(pid)
    assert name not in stack.running
    stack.start_part(name)
    after = stack.endpoints
    assert stack.pid(name) != pid
    assert runs(stack.pid(name))
    assert {**after, "services": ()} == {**before, "services": ()}
    assert json.loads((stack.options.directory / "endpoints.json").read_text()) == after


def test_etcd_keeps_its_data_when_it_is_killed(stack: local.Stack) -> None:
    def etcdctl(*arguments: str) -> str:
        return subprocess.run(
            ["etcdctl", f"--endpoints={stack.endpoints['etcd']}", *arguments],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout

    etcdctl("put", "/test/key", "value")
    stack.restart("etcd")
    assert etcdctl("get", "--print-value-only", "/test/key").strip() == "value"


def test_a_stopped_part_does_not_answer_until_it_is_continued(stack: local.Stack) -> None:
    address = stack.endpoints["lease_replicas_grpc"][1]
    stack.send("lease-1", signal.SIGSTOP)
    try:
        assert not ready.grpc_serving(address)
    finally:
        stack.send("lease-1", signal.SIGCONT)
    stack.wait_part("lease-1", 10)


def test_a_part_that_does_not_exist_is_named_with_those_that_do(stack: local.Stack) -> None:
    with pytest.raises(KeyError, match="lease-7: the stack has etcd, registry, lease-0"):
        stack.kill("lease-7")


def test_detached_it_outlives_the_command_and_down_ends_exactly_it(tmp_path: Path) -> None:
    bystander, identity = processes.spawn(["sleep", "60"], os.environ, tmp_path / "bystander")
    directory = tmp_path / "stack"
    try:
        result = kvlease(
            *("up", "--store", "memory", "--engines", "none", "--detach", "--dir", str(directory))
        )
        assert result.returncode == 0, result.stderr
        assert "up: ready after" in result.stdout
        endpoints = json.loads((directory / "endpoints.json").read_text())
        assert endpoints["etcd"] is None
        assert all(map(runs, pids(endpoints)))
        none_yet = kvlease("trace", "last", "--dir", str(directory))
        assert f"there is no such turn at {endpoints['traces']} yet" in none_yet.stderr
        ended = kvlease("down", "--json", "--dir", str(directory))
        assert sorted(json.loads(ended.stdout)) == ["services", "traces"]
        assert not any(map(runs, pids(endpoints)))
        assert not (directory / "endpoints.json").exists()
        assert processes.is_alive(identity)
        again = kvlease("down", "--dir", str(directory))
        assert again.returncode == 0
        assert "nothing runs" in again.stdout
    finally:
        kvlease("down", "--dir", str(directory))
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "down"])
def test_in_the_foreground_whatever_ends_it_ends_all_of_it(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "stack"
    log = tmp_path / "up.log"
    command = ["up", "--store", "memory", "--engines", "none", "--dir", str(directory)]
    process, identity = processes.spawn(
        [sys.executable, "-m", "kvlease.cli", *command],
        {**os.environ, "PYTHONUNBUFFERED": "1"},
        log,
    )
    try:
        _wait_for_text(log, "Ctrl-C ends it")
        started = pids(json.loads((directory / "endpoints.json").read_text()))
        if how == "down":
            assert kvlease("down", "--dir", str(directory)).returncode == 0
        else:
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
        assert not any(map(runs, started))
        assert not (directory / "endpoints.json").exists()
    finally:
        processes.end([identity], grace_s=10, reap=process.poll)
        kvlease("down", "--dir", str(directory))


def test_down_ends_what_a_killed_up_has_left(tmp_path: Path) -> None:
    directory = tmp_path / "stack"
    log = tmp_path / "up.log"
    command = ["up", "--store", "memory", "--engines", "none", "--dir", str(directory)]
    process, _ = processes.spawn(
        [sys.executable, "-m", "kvlease.cli", *command],
        {**os.environ, "PYTHONUNBUFFERED": "1"},
        log,
    )
    _wait_for_text(log, "Ctrl-C ends it")
    started = pids(json.loads((directory / "endpoints.json").read_text()))
    process.kill()
    process.wait()
    assert all(map(runs, started))
    assert kvlease("down", "--dir", str(directory)).returncode == 0
    assert not any(map(runs, started))


def test_a_part_that_fails_is_named_with_the_end_of_its_log_and_the_rest_is_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "etcd"
    broken.write_text("#!/bin/sh\necho no space left for the log\nexit 3\n")
    broken.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    stack = local.Stack(options(tmp_path / "stack", env=environment))
    with pytest.raises(local.StackError) as error:
        stack.start()
    assert "etcd ended with exit code 3" in str(error.value)
    assert "no space left for the log" in str(error.value)
    assert stack.running == []
    assert local.down(tmp_path / "stack") == []


def _wait_for_text(log: Path, text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
