"""Time to first token of a turn of 300 new tokens on a history of given length, by where the
history's KV cache comes from:

    recompute   nowhere: the prefill engine computes all of it
    local       the prefill engine's own prefix cache
    reuse       the decode engine, claimed and pulled by the pull policy

    python bench/pull.py [--histories 2000,4000,8000] [--rounds 5] [--recompute-rounds 2]

Each round runs all three on the same engines (CPU; the small model unless --model), in the
order recompute (in the first rounds only: it takes long), reuse, local, with new tokens that
are new each time. Prints the medians, with the least and the most of the rounds,
and what the prefill engine expected of each pull beside what it took; writes all runs to
build/pull.json. Ends with 1 if, on the longest history, the median of reuse is above that
of local, or if a turn that should hit does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack

NEW_TOKENS = 300
ANSWER_TOKENS = 8
PRINTABLE = range(0x20, 0x7F)
OFF = {"x-kvlease-reuse": "off"}
TIMEOUT_S = 300.0
MODES = ("recompute", "reuse", "local")
COSTS = ("pull_seconds", "pull_predicted_seconds", "pull_predicted_compute_seconds")


@dataclass(frozen=True)
class Answer:
    """A streamed turn."""

    ttft_s: float
    outcome: str
    reused_tokens: int
    ids: list[int]


@dataclass(frozen=True)
class Run:
    """One measured turn."""

    history: int
    mode: str
    round: int
    ttft_s: float
    outcome: str
    reused_tokens: int
    costs: dict[str, float]
    """Of a pull: seconds it took, and what it and computing were expected to take."""


class Bench:
    """Turns through a stack's router."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._router = stack.endpoints["router_http"]
        self._prefill = stack.endpoints["prefill"][0]["http"]
        (self._model,) = {m["id"] for m in get(self._router + "/v1/models")["data"]}
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Ids of printable characters, which every tokenizer has."""
        return self._random.choices(PRINTABLE, k=count)

    def round(self, history: Sequence[int], number: int, *, recompute: bool = True) -> list[Run]:
        """All three modes (or two), once, in a conversation of their own."""
        conversation = f"pull-{len(history)}-{number}-{time.time_ns():x}"
        first = self.turn(history, conversation)
        told = [*history, *first.ids]

        def run(mode: str, **how: Any) -> Run:
            before = self.costs()
            answer = self.turn([*told, *self.tokens(NEW_TOKENS)], **how)
            after = self.costs()
            costs = {name: after[name] - before[name] for name in COSTS}
            return Run(
                *(len(history), mode, number, answer.ttft_s, answer.outcome),
                *(answer.reused_tokens, costs),
            )

        runs = []
        if recompute:
            self.forget()
            runs.append(run("recompute", headers=OFF))
        self.forget()
        runs.append(run("reuse", conversation=conversation, headers={"x-kvlease-end": "true"}))
        # Now the prefill engine has the history in its cache.
        runs.append(run("local", headers=OFF))
        return runs

    def turn(
        self,
        ids: Sequence[int],
        conversation: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **({"conversation_id": conversation} if conversation else {}),
        }
        request = post(self._router + "/v1/completions", body, headers or {})
        started = time.perf_counter()
        ttft_s = 0.0
        answered: list[int] = []
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                ttft_s = ttft_s or time.perf_counter() - started
                for choice in json.loads(line[6:])["choices"]:
                    answered += choice.get("token_ids") or []
            told = response.headers
        return Answer(
            ttft_s, told["x-kvlease-outcome"], int(told["x-kvlease-reused-tokens"]), answered
        )

    def forget(self) -> None:
        """Empties the prefill engine's own cache. Blocks that it keeps for the decode engine
        are in use until a step tells it that they were read."""
        for _ in range(50):
            body = {"model": self._model, "prompt": self.tokens(20), "max_tokens": 1}
            urllib.request.urlopen(post(self._prefill + "/v1/completions", body, {})).read()
            with urllib.request.urlopen(
                post(self._prefill + "/reset_prefix_cache", {}, {})
            ) as response:
                answer = response.read()
            if response.status == 200 and b"false" not in answer.lower():
                time.sleep(0.2)  # until both engines idle
                return
            time.sleep(0.1)
        sys.exit("pull: the prefill engine's cache cannot be emptied: blocks stay in use")

    def costs(self) -> dict[str, float]:
        """Sums over all pulls so far, as the router counts them."""
        sums = dict.fromkeys(COSTS, 0.0)
        with urllib.request.urlopen(self._router + "/metrics") as response:
            for line in response.read().decode().splitlines():
                for name in COSTS:
                    if line.startswith(f"kvlease_{name}_sum{{"):
                        sums[name] += float(line.rpartition(" ")[2])
        return sums


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        return json.loads(response.read())


def post(url: str, body: Any, headers: Mapping[str, str]) -> urllib.request.Request:
    return urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )


def report(runs: Sequence[Run], histories: Sequence[int]) -> list[str]:
    """Prints the table; returns what does not hold."""
    wrong = [
        f"round {run.round} on {run.history} tokens was {run.outcome}, not a hit"
        for run in runs
        if run.mode == "reuse" and run.outcome != "hit"
    ]
    columns = ("history", *MODES, "recompute/reuse", "reuse/local", "pull", "expected", "compute")
    print("".join(f"{column:>20}" for column in columns))
    for history in histories:
        of = {m: [r for r in runs if r.history == history and r.mode == m] for m in MODES}
        ttft = {mode: statistics.median(r.ttft_s for r in of[mode]) for mode in MODES}
        spread = {m: [round(f([r.ttft_s for r in of[m]]), 2) for f in (min, max)] for m in MODES}
        cells = [f"{history:,}"]
        cells += [f"{ttft[m]:.2f} s {spread[m][0]}-{spread[m][1]}" for m in MODES]
        cells += [
            f"{ttft['recompute'] / ttft['reuse']:.1f}",
            f"{ttft['reuse'] / ttft['local']:.2f}",
        ]
        for name in COSTS:
            known = [r.costs[name] for r in of["reuse"] if r.costs[name] > 0]
            cells.append(f"{statistics.median(known):.3f} s" if known else "-")
        print("".join(f"{cell:>20}" for cell in cells))
    longest = [r for r in runs if r.history == histories[-1]]
    reuse, local = (
        statistics.median(r.ttft_s for r in longest if r.mode == mode)
        for mode in ("reuse", "local")
    )
    if reuse > local:
        wrong.append(f"on {histories[-1]} tokens reuse took {reuse:.3f} s, local {local:.3f} s")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", default="2000,4000,8000", help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute-rounds", type=int, default=2, help="at least one")
    parser.add_argument("--model", type=Path, help="a model's directory")
    parser.add_argument("--json", type=Path, default=Path("build/pull.json"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    histories = sorted(int(text) for text in options.histories.split(","))
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as directory:
        stack_options = Options(
            directory=Path(directory),
            model=options.model,
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},  # /reset_prefix_cache
        )
        with Stack(
            stack_options, progress=lambda line: print(f"pull: {line}", flush=True)
        ) as stack:
            bench = Bench(stack, options.seed)
            bench.round(bench.tokens(1000), -2)  # warm up: engines, handshake, averages
            bench.round(bench.tokens(1000), -1)
            prompts = {size: bench.tokens(size) for size in histories}
            for size in histories:
                for number in range(options.rounds):
                    found = bench.round(
                        prompts[size], number, recompute=number < options.recompute_rounds
                    )
                    print(
                        f"pull: round {number}, {size} tokens: "
                        + ", ".join(f"{r.mode} {r.ttft_s:.3f} s ({r.outcome})" for r in found),
                        flush=True,
                    )
                    runs += found
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
    wrong = report(runs, histories)
    for problem in wrong:
        print(f"pull: {problem}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
