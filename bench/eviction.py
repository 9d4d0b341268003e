"""How often conversations hit when the budget holds only some of them, by what goes first.

    python bench/eviction.py            # a simulation, a few seconds

Fifty conversations at a time, ten leases in the budget; a conversation ends after each
turn with probability 0.1, and another one comes. Its pauses are log-normal around a median
of its own. All leases are of one size.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from kvlease_connector.value import Pauses

RETENTION_S = 480.0
TURN_S = 2.0

Policy = Callable[[Pauses, int, float, float], float]
"""The value of a lease, from its conversation, its age and a random number."""


@dataclass(frozen=True)
class Workload:
    """``spread``: of ln(pause) in a conversation; ``variety``: of ln(median) among them."""

    spread: float
    variety: float
    median_s: float = 30.0
    conversations: int = 50
    in_all: int = 300
    leaves: float = 0.1


def chance(pauses: Pauses, name: int, age_s: float, _: float) -> float:
    """As a decode engine does it."""
    return pauses.belief(name).chance(age_s, RETENTION_S - age_s)


def ever(pauses: Pauses, name: int, age_s: float, _: float) -> float:
    """The chance that the turn comes before the retention is over, however late."""
    belief = pauses.belief(name)
    still, never = belief.lasts(age_s), belief.lasts(RETENTION_S)
    return belief.returns * (still - never) / (belief.returns * still + 1 - belief.returns)


POLICIES: dict[str, Policy] = {
    "oldest first": lambda _, __, age_s, ___: -age_s,
    "at random": lambda _, __, ___, luck: luck,
    "least chance, however late": ever,
    "least chance soon (kvlease)": chance,
}


def hits(workload: Workload, policy: Policy, *, budget: int, seed: int) -> float:
    """The part of all turns after a conversation's first that hit."""
    luck = random.Random(seed)
    pauses = Pauses()
    held: dict[int, float] = {}
    medians: list[float] = []
    turns: list[tuple[float, int, bool]] = []
    outcomes: list[bool] = []

    def arrive(now: float) -> None:
        medians.append(workload.median_s * luck.lognormvariate(0, workload.variety))
        heapq.heappush(turns, (now + luck.uniform(0, 60), len(medians) - 1, False))

    for _ in range(workload.conversations):
        arrive(0.0)
    while turns:
        now, name, follows = heapq.heappop(turns)
        pauses.give_up(now)
        for other in [key for key, began in held.items() if began + RETENTION_S < now]:
            del held[other]
        if follows:
            outcomes.append(name in held)
        pauses.ended(name, now)
        end = now + TURN_S
        pauses.began(name, end, RETENTION_S)
        held[name] = end
        if len(held) > budget:
            values = {key: policy(pauses, key, end - held[key], luck.random()) for key in held}
            del held[min(values, key=values.__getitem__)]
        if luck.random() < workload.leaves:
            if len(medians) < workload.in_all:
                arrive(end)
        else:
            pause_s = medians[name] * luck.lognormvariate(0, workload.spread)
            heapq.heappush(turns, (end + pause_s, name, True))
    return sum(outcomes) / len(outcomes)


def main() -> None:
    workloads = {
        "pauses of one kind": Workload(spread=0.7, variety=0.0),
        "regular pauses of one kind": Workload(spread=0.3, variety=0.0),
        "wild pauses of one kind": Workload(spread=1.3, variety=0.0),
        "agents and people": Workload(spread=0.5, variety=1.5),
    }
    print("| hits, of all turns that follow one | " + " | ".join(POLICIES) + " |")
    print("|---" * (len(POLICIES) + 1) + "|")
    for name, workload in workloads.items():
        found = [
            statistics.fmean(hits(workload, policy, budget=10, seed=seed) for seed in range(5))
            for policy in POLICIES.values()
        ]
        print(f"| {name} | " + " | ".join(f"{part:.0%}" for part in found) + " |")


if __name__ == "__main__":
    main()
