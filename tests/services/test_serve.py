"""``kvlease serve`` as a process: ready, stopped in order, wrong in one sentence."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd_server import Etcd, free_ports
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease import rpc
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

LISTEN = ("registry_listen", "lease_listen", "router_listen", "router_grpc_listen")
DEADLINE_S = 20.0


def arguments(service: str, **settings: object) -> list[str]:
    values = {**dict.fromkeys(LISTEN, "127.0.0.1:0"), "log_format": "json", **settings}
    sets = [f"--set={name}={value}" for name, value in values.items()]
    return [sys.executable, "-m", "kvlease.cli", "serve", service, *sets]


class Served:
    """A running process and the events it has logged."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(process.stderr,))
        self._reader.start()
        self.events: list[dict[str, Any]] = []

    def _read(self, lines: Any) -> None:
        for line in lines:
            self._lines.put(line)

    def wait_for(self, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            found: dict[str, Any] = json.loads(line)  # every line is one event
            self.events.append(found)
            if found["event"] == event:
                return found

    def end(self, how: int = signal.SIGTERM) -> tuple[int, float]:
        """Exit code, and how long it took."""
        started = time.monotonic()
        self.process.send_signal(how)
        code = self.process.wait(timeout=DEADLINE_S)
        self._reader.join()
        return code, time.monotonic() - started


@contextmanager
def serving(service: str, **settings: object) -> Iterator[Served]:
    process = subprocess.Popen(
        arguments(service, **settings), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    served = Served(process)
    try:
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        served._reader.join()
        assert process.stderr is not None
        process.stderr.close()


def failed(service: str, **settings: object) -> str:
    """What a process that cannot start says."""
    ended = subprocess.run(
        arguments(service, **settings),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("kvlease: ")
    return last


def health(address: str) -> int:
    with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)


def test_all_is_ready_with_its_addresses_and_stops_in_order() -> None:
    with serving("all") as served:
        ready = served.wait_for("ready")
        assert health(ready["registry"]) == health_pb2.HealthCheckResponse.SERVING
        assert health(ready["lease"]) == health_pb2.HealthCheckResponse.SERVING
        with rpc.channel(ready["registry"]) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            answer = stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5)
            assert not answer.engines
        with urllib.request.urlopen(f"http://{ready['router_http']}/health", timeout=5) as page:
            assert page.status == 200
        code, seconds = served.end()
        assert code == 0
        assert seconds < 10
        assert [event["event"] for event in served.events].count("ready") == 1


def test_a_watch_that_is_open_does_not_hold_up_the_end() -> None:
    with serving("all") as served:
        ready = served.wait_for("ready")
        with rpc.channel(ready["lease"]) as channel:
            stub = lease_pb2_grpc.LeaseServiceStub(channel)
            events: Any = stub.WatchLeases(lease_pb2.WatchLeasesRequest(), timeout=30)
            next(events)
            code, seconds = served.end(signal.SIGINT)
            assert (code, list(events)) == (0, [])
            assert seconds < 5


@pytest.mark.etcd
def test_each_service_is_a_process_of_its_own_with_etcd(shared_etcd: Etcd) -> None:
    etcd = {"etcd_endpoints": shared_etcd.endpoint, "etcd_prefix": "/test/serve"}
    with serving("registry", **etcd) as registry, serving("lease", **etcd) as lease:
        registry_at = registry.wait_for("ready")["registry"]
        lease_at = lease.wait_for("ready")["lease"]
        endpoints = {"registry_endpoint": registry_at, "lease_endpoint": lease_at}
        with serving("router", **endpoints) as router:
            ready = router.wait_for("ready")
            assert ready["router_http"]
            assert health(lease_at) == health_pb2.HealthCheckResponse.SERVING
            assert router.end()[0] == 0
        assert lease.end()[0] == 0
        assert registry.end()[0] == 0


def test_metrics_are_served_where_asked() -> None:
    (port,) = free_ports(1)
    with serving("all", metrics_listen=f"127.0.0.1:{port}") as served:
        served.wait_for("ready")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
        assert 'kvlease_claim_seconds_count{outcome="hit"} 0.0' in text
        assert 'kvlease_engines{role="decode",state="serving"} 0.0' in text
        assert 'kvlease_ready{service="registry"} 1.0' in text
        assert 'kvlease_ready{service="lease"} 1.0' in text
        assert served.end()[0] == 0


# What is wrong is told in one sentence


@pytest.mark.parametrize(
    "setting",
    ["registry_listen", "lease_listen", "router_listen", "router_grpc_listen", "metrics_listen"],
)
def test_a_taken_port(setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = failed("all", **{setting: address})
    assert said == (
        f"kvlease: {setting}: cannot listen on {address}: the port is taken: stop what uses it, "
        f"or set {setting} to another"
    )


@pytest.mark.parametrize("setting", ["lease_listen", "router_listen"])
def test_an_address_of_another_machine(setting: str) -> None:
    said = failed("all", **{setting: "192.0.2.1:0"})  # RFC 5737: nobody's
    assert said.startswith(f"kvlease: {setting}: cannot listen on 192.0.2.1:0: the host is not")


def test_an_etcd_that_is_not_there() -> None:
    (port,) = free_ports(1)
    started = time.monotonic()
    said = failed("lease", etcd_endpoints=f"127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in said
    assert said.endswith("start it, or correct etcd_endpoints")
    assert said.count("etcd_endpoints") == 1
    assert time.monotonic() - started < 12


@pytest.mark.parametrize("service", ["registry", "lease"])
def test_a_service_without_a_store_to_share(service: str) -> None:
    said = failed(service)
    assert "set etcd_endpoints, or run `kvlease serve all`" in said


def test_a_setting_that_there_is_not() -> None:
    assert "did you mean claim_grace?" in failed("all", claim_grce=1)


def test_settings_that_contradict_each_other() -> None:
    said = failed("all", retention_ttl=5, session_ttl=10)
    assert "raise retention_ttl or lower session_ttl" in said


def test_a_configuration_file_that_is_not_there(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*arguments("all"), "--config", str(tmp_path / "none.toml")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "cannot be read: No such file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_client_that_comes_too_early_is_told_so_by_health() -> None:
    """A lease service that waits for etcd does not listen yet: nothing looks ready."""
    (etcd_port,) = free_ports(1)
    (port,) = free_ports(1)
    settings = {"etcd_endpoints": f"127.0.0.1:{etcd_port}", "lease_listen": f"127.0.0.1:{port}"}
    with serving("lease", **settings) as served:
        served.wait_for("waiting for the store")
        with pytest.raises(grpc.RpcError):
            health(f"127.0.0.1:{port}")
        assert served.end()[0] == 0  # a signal while it waits ends it at once
