"""The stack of compose/compose.yaml, run by `docker compose` for a test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from compose.docker_host import run
from etcd_server import free_ports
from metric_names import fetch

DIRECTORY = Path(__file__).parents[2] / "compose"

SERVICES = ("etcd", "registry", "lease", "router", "prefill", "decode", "front")
"""Those whose images can be made here. Jaeger, Prometheus and Grafana have to be pulled."""

_READY = re.compile(r'^kvlease_ready{service="(registry|lease)"} 1.0$', re.MULTILINE)

_PORTS = ("KVLEASE_HTTP_PORT", "KVLEASE_REGISTRY_PORT", "KVLEASE_LEASE_PORT", "KVLEASE_ROUTER_PORT")


class ComposeStack:
    """One project, on free ports of this machine."""

    def __init__(self, name: str, otlp_endpoint: str) -> None:
        ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        cores = sorted(os.sched_getaffinity(0))
        self.name = name
        self.http = f"http://127.0.0.1:{ports['KVLEASE_HTTP_PORT']}"
        self.registry = f"127.0.0.1:{ports['KVLEASE_REGISTRY_PORT']}"
        self.lease = f"127.0.0.1:{ports['KVLEASE_LEASE_PORT']}"
        self.router = f"127.0.0.1:{ports['KVLEASE_ROUTER_PORT']}"
        self.env = {
            **os.environ,
            **{variable: str(port) for variable, port in ports.items()},
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp_endpoint,
            "KVLEASE_PREFILL_CPUS": str(cores[0]),
            "KVLEASE_DECODE_CPUS": str(cores[-1]),
        }
        if "PIP_FIND_LINKS" in os.environ:
            self.env["TORCH_INDEX"] = ""  # the wheels are in the stand-in for the base image

    def compose(self, *arguments: str) -> str:
        """What `docker compose` prints. Raises AssertionError."""
        return run(*self._command, *arguments, env=self.env).stdout

    @property
    def _command(self) -> tuple[str, ...]:
        return ("docker", "compose", "-p", self.name, "-f", str(DIRECTORY / "compose.yaml"))

    def containers(self, service: str) -> list[str]:
        """Ids of those that run."""
        return self.compose("ps", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "inspect", container).stdout)
        return dict(found)

    def address(self, container: str) -> str:
        """Its IP address, which this machine reaches too."""
        (network,) = self.inspect(container)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def kill_one(self, service: str) -> None:
        """SIGKILL to one replica, which stays down."""
        run("docker", "kill", self.containers(service)[0])

    def restart(self, service: str) -> None:
        """Ends a service in order and starts it again; returns when it is healthy."""
        self.compose("restart", service)
        self.compose("up", "--no-build", "--detach", "--wait", service)

    def targets(self) -> list[str]:
        """The URLs of /metrics that Prometheus would scrape: each replica of the services
        that are named in its configuration."""
        jobs = yaml.safe_load((DIRECTORY / "prometheus/prometheus.yml").read_text())
        found = [found for job in jobs["scrape_configs"] for found in job["dns_sd_configs"]]
        return [
            f"http://{self.address(container)}:{each['port']}/metrics"
            for each in found
            for service in each["names"]
            for container in self.containers(service)
        ]

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Until registry and lease service have their store."""
        replicas = [*self.containers("registry"), *self.containers("lease")]
        urls = [f"http://{self.address(container)}:9464/metrics" for container in replicas]
        deadline = time.monotonic() + timeout_s
        while not all(_READY.search(fetch(url)[0]) for url in urls):
            assert time.monotonic() < deadline, f"not ready within {timeout_s} s"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of all containers."""
        return self.compose("logs", "--no-color", "--tail", "30")

    def down(self) -> tuple[float, dict[str, int]]:
        """How many seconds `docker compose down` took, and container → exit code of all
        that ran."""
        listed = run(*self._ps, "--no-trunc").stdout.splitlines()
        running = dict(line.split() for line in listed)
        codes: dict[str, int] = {}
        with _deaths(self.name) as deaths:
            started = time.monotonic()
            self.compose("down", "--volumes")
            seconds = time.monotonic() - started
            while len(codes) < len(running):
                event = json.loads(deaths.readline())
                codes[running[event["id"]]] = int(event["Actor"]["Attributes"]["exitCode"])
        return seconds, codes

    @property
    def _ps(self) -> tuple[str, ...]:
        label = f"label=com.docker.compose.project={self.name}"
        return ("docker", "ps", "--filter", label, "--format", "{{.ID}} {{.Names}}")


@contextlib.contextmanager
def _deaths(project: str) -> Iterator[Any]:
    """A line of JSON for each container of the project that ends. (`docker compose down`
    removes them, and with them their exit codes.)"""
    label = f"label=com.docker.compose.project={project}"
    command = ["docker", "events", "--filter", label, "--filter", "event=die"]
    # From a moment ago on: it takes a while until this process listens.
    command += ["--since", "1s", "--format", "{{json .}}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout
        finally:
            process.terminate()
