"""A real etcd for tests: on free ports of 127.0.0.1, ended by its handle.

Tests act on it directly through etcd's JSON gateway, so that what they check does not
pass through the code under test. Everything here is synchronous: an asyncio test calls
what takes time through ``asyncio.to_thread``.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from required import unavailable

START_DEADLINE_S = 20.0

# Elections and expiry at half of etcd's default times: sessions may be as short as 1 s.
_PACE = ("--heartbeat-interval=50", "--election-timeout=500")


def etcd_binary() -> str:
    """etcd from PATH. Without one the test is skipped, or fails where engines are
    required."""
    binary = shutil.which("etcd")
    if binary is None:
        unavailable("this test needs a real etcd: run `apt-get install etcd-server`")
    return binary


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@dataclass(frozen=True)
class ServerTls:
    """PEM files for etcd's client port."""

    ca: Path
    cert: Path
    key: Path


class Etcd:
    """One etcd member and its data directory."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "etcd-0",
        flags: Sequence[str] = (),
        tls: ServerTls | None = None,
        ports: Sequence[int] | None = None,
        initial_cluster: str = "",
    ) -> None:
        self.binary = etcd_binary()
        self.name = name
        self.directory = directory
        self.tls = tls
        self.log = directory / f"{name}.log"
        self.flags = list(flags)
        self.port, self.peer_port, self.metrics_port = ports or free_ports(3)
        self._initial_cluster = initial_cluster
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self, *, wait: bool = True) -> None:
        """Starts it with the data that it has. With ``wait``, returns once it has a
        leader."""
        assert self._process is None, f"{self.name} runs already"
        client = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        command = [
            self.binary,
            f"--name={self.name}",
            f"--data-dir={self.directory / self.name}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self._initial_cluster or f'{self.name}={self.peer_url}'}",
            f"--listen-metrics-urls=http://127.0.0.1:{self.metrics_port}",
            "--logger=zap",
            *_PACE,
            *self.flags,
        ]
        if self.tls:
            command += [f"--cert-file={self.tls.cert}", f"--key-file={self.tls.key}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        if wait:
            self.wait_healthy()

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._healthy():
            if self._process is None or self._process.poll() is not None:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
                pytest.fail(f"{self.name} ended while it started:\n{tail}")
            if time.monotonic() > deadline:
                pytest.fail(f"{self.name} has no leader after {START_DEADLINE_S} s: {self.log}")
            time.sleep(0.02)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL. Its data stays."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, as an operator stops it. Its data stays."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Its threads stop one by one; until the last has, it may answer.
        while not self._stopped(self._process.pid):
            time.sleep(0.001)

    @staticmethod
    def _stopped(pid: int) -> bool:
        stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
        # proc(5): the state comes after the name, which is in brackets.
        return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kills it and starts it with its data."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Removes its data, while it does not run."""
        assert self._process is None, f"{self.name} runs"
        shutil.rmtree(self.directory / self.name)

    def call(self, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        """POST to the JSON gateway, for example ``/v3/kv/range``; bytes are base64."""
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            context.load_cert_chain(self.tls.cert, self.tls.key)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=5, context=context
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            headers = {"Authorization": token} if token else {}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"etcd answers {path} with {response.status}: {answer}")
        return answer

    def get(self, key: str) -> bytes | None:
        """The value of a full key, prefix and all; None where absent."""
        found = self.call("/v3/kv/range", {"key": b64(key)}).get("kvs")
        return base64.b64decode(found[0].get("value", "")) if found else None

    def put(self, key: str, value: bytes) -> None:
        self.call("/v3/kv/put", {"key": b64(key), "value": base64.b64encode(value).decode()})

    def delete(self, key: str) -> None:
        self.call("/v3/kv/deleterange", {"key": b64(key)})

    def revision(self) -> int:
        return int(self.call("/v3/kv/range", {"key": b64("/")})["header"]["revision"])

    def compact(self) -> None:
        """Forgets all history before now."""
        self.call("/v3/kv/compaction", {"revision": str(self.revision()), "physical": True})

    def requests(self, method: str) -> int:
        """How many gRPC calls of a method, for example ``Txn``, it has begun to handle."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=5)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        wanted = ("grpc_server_started_total", f'grpc_method="{method}"')
        return sum(int(float(line.split()[-1])) for line in lines if all(w in line for w in wanted))

    def is_leader(self) -> bool:
        status = self.call("/v3/maintenance/status", {})
        return bool(status["leader"] == status["header"]["member_id"])


class EtcdCluster:
    """Several members that form one cluster."""

    def __init__(self, directory: Path, size: int = 3) -> None:
        ports = [free_ports(3) for _ in range(size)]
        names = [f"etcd-{i}" for i in range(size)]
        initial = ",".join(
            f"{name}=http://127.0.0.1:{p[1]}" for name, p in zip(names, ports, strict=True)
        )
        self.members = [
            Etcd(directory, name=name, ports=p, initial_cluster=initial)
            for name, p in zip(names, ports, strict=True)
        ]

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait_healthy()

    def leader(self) -> Etcd:
        return next(member for member in self.members if member.is_leader())

    def kill(self) -> None:
        for member in self.members:
            member.kill()


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
