"""What retention costs the requests that run, on a decode engine with few KV blocks.

    python bench/pressure.py [--conversations 50] [--turns 3] [--rounds 3]

Five conversations fill half of the engine's blocks; fifty come and go, with pauses. The
same load runs in turns with

    on     blocks are retained, and read by the next turn
    kept   blocks are retained, and never read: what retention costs, without its gain
    off    nothing is retained

on the same engines (small model, CPU). Prints the medians of throughput and of time to
first token, and writes all runs to build/pressure.json. Ends with 1 if, with retention,
throughput or the 99th percentile of TTFT is more than 10 % worse than without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from kvlease import rpc
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.cli.tiny_model import make_model
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

BLOCK = 128
FIRST_CHARS, NEXT_CHARS = 280, 60
MAX_RUNNING = 8

MODES = ("on", "kept", "off")
TOLERANCE = 0.10
PRINTABLE = list(range(0x20, 0x7F))
WORDS = ("lease", "block", "prefix", "engine", "decode", "turn", "claim", "grant", "router")


@dataclass
class Run:
    """One load, from its first request to its last answer."""

    mode: str
    seconds: float = 0.0
    tokens: int = 0
    errors: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    retained_peak: int = 0
    retained_mean: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def ttft_s(self, part: float) -> float:
        """A quantile (the value at or above it, so p99 of 150 is the second largest)."""
        values = sorted(self.ttfts_s)
        return values[min(len(values) - 1, math.ceil(part * len(values)) - 1)]

    def report(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_s": self.tokens_per_s,
            "ttft_p50_s": self.ttft_s(0.5),
            "ttft_p99_s": self.ttft_s(0.99),
        }


@dataclass(frozen=True)
class Load:
    """The same conversations, words and pauses each time, whatever the mode."""

    conversations: int
    turns: int
    pause_s: float
    """Median; pauses are log-normal."""
    ramp_s: float
    """New conversations come evenly over so long."""
    answer_tokens: int

    async def run(self, stack: Stack, mode: str, number: int) -> Run:
        run = Run(mode)
        url = stack.endpoints["router_http"] + "/v1/chat/completions"
        before = await asyncio.to_thread(preemptions, stack)
        watch = asyncio.create_task(_watch(stack, run))
        began = time.perf_counter()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(
                *(
                    self._talk(session, url, run, f"{mode}-{number}-{index}", index)
                    for index in range(self.conversations)
                )
            )
        run.seconds = time.perf_counter() - began
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        run.preemptions = await asyncio.to_thread(preemptions, stack) - before
        return run

    async def _talk(
        self, session: aiohttp.ClientSession, url: str, run: Run, name: str, index: int
    ) -> None:
        chance = random.Random(index)
        await asyncio.sleep(index * self.ramp_s / self.conversations)
        messages: list[dict[str, str]] = []
        for turn in range(self.turns):
            if turn:
                await asyncio.sleep(self.pause_s * chance.lognormvariate(0.0, 0.7))
            said = _text(chance, NEXT_CHARS if turn else FIRST_CHARS)
            messages.append({"role": "user", "content": said})
            answer = await self._ask(session, url, run, name, messages)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        url: str,
        run: Run,
        name: str,
        messages: Sequence[Mapping[str, str]],
    ) -> str | None:
        """One streamed turn; its answer, None if it failed."""
        body = {
            "messages": messages,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": PRINTABLE,
            "stream": True,
        }
        # Without a conversation nothing is claimed and nothing is retained.
        headers = {} if run.mode == "off" else {"X-Conversation-ID": name}
        if run.mode == "kept":
            headers["x-kvlease-reuse"] = "off"
        began = time.perf_counter()
        words: list[str] = []
        try:
            async with session.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    raise aiohttp.ClientError(f"status {response.status}: {await response.text()}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    delta = json.loads(line[6:])["choices"][0]["delta"].get("content")
                    if delta:
                        if not words:
                            run.ttfts_s.append(time.perf_counter() - began)
                        words.append(delta)
            run.outcomes[response.headers["x-kvlease-outcome"]] += 1
        except (aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            print(f"pressure: a turn of {name} failed: {error}", file=sys.stderr)
            run.errors += 1
            return None
        run.tokens += self.answer_tokens
        return "".join(words)


def _text(chance: random.Random, num_chars: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < num_chars:
        words.append(chance.choice(WORDS))
    return " ".join(words)[:num_chars]


async def _watch(stack: Stack, run: Run) -> None:
    """Notes what the decode engine retains, until cancelled."""
    samples: list[int] = []
    async with rpc.aio_channel(stack.plan.registry_grpc) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        while True:
            answer = await stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5)
            samples += [
                engine.usage.retained_blocks
                for engine in answer.engines
                if engine.role == registry_pb2.ENGINE_ROLE_DECODE
            ]
            run.retained_peak, run.retained_mean = max(samples), statistics.fmean(samples)
            await asyncio.sleep(0.5)


def preemptions(stack: Stack) -> int:
    """vLLM's own count, on the decode engine."""
    url = stack.endpoints["decode"][0]["http"] + "/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = "vllm:num_preemptions_total"
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))


def until_empty(stack: Stack) -> None:
    """Ends what the run before has left."""
    with grpc.insecure_channel(stack.plan.lease_grpc[0]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        for lease in stub.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000)).leases:
            stub.EndConversation(lease_pb2.EndConversationRequest(conversation=lease.conversation))
    time.sleep(1.0)


def table(runs: Sequence[Run], total_blocks: int) -> str:
    """Medians over the rounds, and how they compare with ``off``."""
    lines = [
        "| retention | tokens/s | TTFT p50 | TTFT p99 | hits | preempted | retained, mean "
        "(peak) | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode in MODES:
        some = [run for run in runs if run.mode == mode]
        if not some:
            continue
        turns = statistics.median(sum(run.outcomes.values()) for run in some)
        lines.append(
            f"| {mode} | {_median(some, 'tokens_per_s'):.0f} | {_median(some, 'ttft_p50_s'):.2f} s "
            f"| {_median(some, 'ttft_p99_s'):.2f} s "
            f"| {statistics.median(run.outcomes['hit'] for run in some):.0f} of {turns:.0f} "
            f"| {statistics.median(run.preemptions for run in some):.0f} "
            f"| {statistics.median(run.retained_mean for run in some):.0f} "
            f"({max(run.retained_peak for run in some)}) of {total_blocks} "
            f"| {sum(run.errors for run in some)} |"
        )
    return "\n".join(lines)


def _median(runs: Sequence[Run], name: str) -> float:
    return statistics.median(run.report()[name] for run in runs)


def ratios(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Medians with retention over medians without."""
    off = [run for run in runs if run.mode == "off"]
    found = {}
    for mode in MODES:
        some = [run for run in runs if run.mode == mode]
        if some and off and mode != "off":
            found[mode] = {
                name: _median(some, name) / _median(off, name)
                for name in ("tokens_per_s", "ttft_p50_s", "ttft_p99_s")
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=10.0, help="median pause, in seconds")
    parser.add_argument("--ramp", type=float, default=60.0, help="seconds until all have come")
    parser.add_argument("--answer", type=int, default=80, help="tokens of each answer")
    parser.add_argument(
        "--blocks",
        type=int,
        default=44,
        help="the decode engine's; a conversation has 4.3 on average, so that five take half",
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, default=Path("build/pressure.json"))
    given = parser.parse_args()
    load = Load(given.conversations, given.turns, given.pause, given.ramp, given.answer)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model")
        options = Options(
            directory=Path(directory) / "stack",
            model=Path(directory) / "model",
            assignments=("pull_policy=threshold",),
            engine_arguments=("--max-model-len", "2048", "--max-num-seqs", str(MAX_RUNNING)),
            decode_arguments=("--num-gpu-blocks-override", str(given.blocks + 1)),
            prefill_prefix_cache=False,
        )
        with Stack(options, progress=lambda line: print(f"pressure: {line}")) as stack:
            warm_up = Load(6, 2, 1.0, 2.0, given.answer)
            asyncio.run(warm_up.run(stack, "off", -1))
            for number in range(given.rounds):
                for mode in given.modes.split(","):
                    until_empty(stack)
                    run = asyncio.run(load.run(stack, mode, number))
                    runs.append(run)
                    print(f"pressure: round {number + 1}, {mode}: {_line(run)}", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    compared = ratios(runs)
    results = {"runs": [run.report() for run in runs], "compared_with_off": compared}
    given.out.write_text(json.dumps(results, indent=2))
    print(table(runs, given.blocks))
    for mode, values in compared.items():
        print(f"{mode}/off: " + ", ".join(f"{k} {v:.2f}" for k, v in values.items()))
    worse = [
        mode
        for mode, values in compared.items()
        if values["tokens_per_s"] < 1 - TOLERANCE or values["ttft_p99_s"] > 1 + TOLERANCE
    ]
    sys.exit(f"pressure: more than 10 % worse with retention: {', '.join(worse)}" if worse else 0)


def _line(run: Run) -> str:
    return (
        f"{run.seconds:.0f} s, {run.tokens_per_s:.0f} tokens/s, "
        f"TTFT p50 {run.ttft_s(0.5):.2f} p99 {run.ttft_s(0.99):.2f} s, {dict(run.outcomes)}, "
        f"{run.preemptions} preempted, retained {run.retained_mean:.0f} ({run.retained_peak})"
    )


if __name__ == "__main__":
    main()
