"""What an engine costs that only holds blocks: a decode engine for leases, a prefill engine
for decode engines that have not fetched them yet.

    python bench/idle.py [--rounds 2] [--held 20] [--seconds 10] [--requests 15]

Two engines (small model, CPU), each on a core of its own, hold the blocks of twenty prompts
and hold nothing, in turns (A B A B). Each time the processor time of all processes of each
engine is measured while nobody asks them anything, and then how long a request of one
prompt token and one answer token takes that comes to the engine directly, more than a
second after the one before. Prints both, with medians over all rounds; writes everything to
build/idle.json. Ends with 1 if an engine that holds blocks costs 10 % of a core or more, or
if the median request takes 5 ms longer than at the same engine without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from kvlease.cli import processes
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.router import handoff
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

CORE_LIMIT = 0.10
DELAY_LIMIT_S = 0.005
PROMPT_CHARS = 600
HANDOFF_TTL_S = 75.0
"""Long enough for one measurement, short enough to wait for."""

APART_S = 0.8
"""Between requests. The engines take turns, so each has had twice this to fall asleep."""

TIMEOUT_S = 60.0
ENGINES = ("decode-0", "prefill-0")


@dataclass(frozen=True)
class Sample:
    """One engine in one state, once."""

    engine: str
    holding: bool
    held_blocks: int
    core: float
    """Of one core, by all of the engine's processes together, while it idled."""
    request_s: list[float]


class Bench:
    """A stack of two engines."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._model = get(stack.endpoints["router_http"] + "/v1/models")["data"][0]["id"]
        self._prompts = 0

    def fill(self, count: int) -> None:
        """Has the decode engine hold leases, and the prefill engine prompts that nobody
        fetches."""
        nobody = handoff.TurnInfo(tenant="default", conversation_id="", turn=0)
        params = handoff.prefill_params(nobody, reuse=False, readers=1, traceparent="")
        for _ in range(count):
            body = {"model": self._model, "prompt": self._prompt(), "max_tokens": 2}
            conversation = {"X-Conversation-ID": f"idle-{self._prompts}"}
            self._post(self._stack.endpoints["router_http"], body, conversation)
        for _ in range(count):
            body = {"model": self._model, "prompt": self._prompt(), "max_tokens": 1}
            self._post(self._http("prefill-0"), {**body, "kv_transfer_params": params})

    def empty(self) -> None:
        """Ends all leases, and waits until no prompt is kept any more."""
        with grpc.insecure_channel(self._stack.plan.lease_grpc[0]) as channel:
            stub = lease_pb2_grpc.LeaseServiceStub(channel)
            for lease in stub.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000)).leases:
                stub.EndConversation(
                    lease_pb2.EndConversationRequest(conversation=lease.conversation)
                )
        deadline = time.monotonic() + HANDOFF_TTL_S + 5
        while any(self.held_blocks(engine) for engine in ENGINES):
            if time.monotonic() > deadline:
                sys.exit("idle: blocks stay that nobody holds any more")
            time.sleep(0.5)

    def measure(self, *, holding: bool, seconds: float, requests: int) -> list[Sample]:
        """Of each engine one sample."""
        time.sleep(2.0)  # a worker looks for more work for a second
        before, began = {name: self._cpu_s(name) for name in ENGINES}, time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        core = {name: (self._cpu_s(name) - before[name]) / took for name in ENGINES}
        request_s: dict[str, list[float]] = {name: [] for name in ENGINES}
        for _ in range(requests):
            for name in ENGINES:
                time.sleep(APART_S)
                body = {"model": self._model, "prompt": [65], "max_tokens": 1}
                started = time.perf_counter()
                self._post(self._http(name), body)
                request_s[name].append(time.perf_counter() - started)
        held = {name: self.held_blocks(name) for name in ENGINES}
        for name in ENGINES:
            if holding != bool(held[name]):
                sys.exit(f"idle: {name} holds {held[name]} blocks at the end of a measurement")
        return [Sample(name, holding, held[name], core[name], request_s[name]) for name in ENGINES]

    def held_blocks(self, engine_id: str) -> int:
        with grpc.insecure_channel(self._stack.plan.registry_grpc) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            engines = stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5).engines
        (usage,) = (engine.usage for engine in engines if engine.engine_id == engine_id)
        return int(usage.retained_blocks)

    def _prompt(self) -> str:
        self._prompts += 1
        return f"{self._prompts} blocks are held for nobody. ".ljust(PROMPT_CHARS, "x")

    def _http(self, name: str) -> str:
        return f"http://{self._stack.plan.part(name).http}"

    def _cpu_s(self, name: str) -> float:
        """Processor time of all processes of an engine, since they started (proc(5))."""
        ticks = 0
        for pid in processes.members(self._stack.identity(name)):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _post(self, base: str, body: Any, headers: Mapping[str, str] | None = None) -> None:
        request = urllib.request.Request(
            base + "/v1/completions",
            json.dumps({"temperature": 0, "ignore_eos": True, **body}).encode(),
            {"content-type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            response.read()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        return json.loads(response.read())


def report(samples: Sequence[Sample]) -> list[str]:
    """Prints the table; returns what does not hold."""
    wrong = []
    print("| engine | holds | of a core, each round | request, median | p90 |")
    print("|---|---|---|---|---|")
    for engine in ENGINES:
        medians = {}
        for holding in (False, True):
            some = [s for s in samples if s.engine == engine and s.holding == holding]
            took = sorted(value for sample in some for value in sample.request_s)
            medians[holding] = statistics.median(took)
            cores = ", ".join(f"{100 * sample.core:.1f} %" for sample in some)
            print(
                f"| {engine} | {some[-1].held_blocks} blocks | {cores} "
                f"| {1000 * medians[holding]:.1f} ms | {1000 * took[len(took) * 9 // 10]:.1f} ms |"
            )
            core = statistics.median(sample.core for sample in some)
            if holding and core >= CORE_LIMIT:
                wrong.append(f"{engine} costs {100 * core:.1f} % of a core")
        if medians[True] > medians[False] + DELAY_LIMIT_S:
            late_ms = 1000 * (medians[True] - medians[False])
            wrong.append(f"a request to {engine} takes {late_ms:.1f} ms longer")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--held", type=int, default=20, help="prompts that each engine holds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of idling, each time")
    parser.add_argument("--requests", type=int, default=15, help="to each engine, each time")
    parser.add_argument("--json", type=Path, default=Path("build/idle.json"))
    given = parser.parse_args()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as directory:
        options = Options(
            directory=Path(directory),
            assignments=(f"handoff_ttl={HANDOFF_TTL_S}", "retention_ttl=600"),
            prefill_prefix_cache=False,
        )
        with Stack(options, progress=lambda line: print(f"idle: {line}", flush=True)) as stack:
            bench = Bench(stack)
            bench.fill(2)  # warm up: engines, handshake
            for number in range(given.rounds):
                for holding in (True, False):
                    if holding:
                        bench.fill(given.held)
                    else:
                        bench.empty()
                    found = bench.measure(
                        holding=holding, seconds=given.seconds, requests=given.requests
                    )
                    samples += found
                    for one in found:
                        print(
                            f"idle: round {number + 1}, {one.engine}, {one.held_blocks} blocks: "
                            f"{100 * one.core:.1f} % of a core, request "
                            f"{1000 * statistics.median(one.request_s):.1f} ms",
                            flush=True,
                        )
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
    wrong = report(samples)
    for problem in wrong:
        print(f"idle: {problem}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
