"""Real faults on real processes, each with the same questions: was a request failed that
recomputation could have answered, was an answer wrong, does anything stay behind, and do
turns hit again without a human? The rows are printed as a table at the end.

Reads go over TCP here (two engines of one host would read through shared memory, which a
stopped engine does not hinder).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import network_namespace
import pytest
from engines import elsewhere
from engines.conftest import require_engines
from engines.look import (
    MODEL,
    has_open_ticket,
    holder_of,
    is_ready,
    unfinished_requests,
    usage,
    used_blocks,
    wait,
    was_claimed,
)
from engines.report import FAULT_TABLE
from engines.turns import Client, Message, Turn, new_conversation, text
from etcd_server import EtcdCluster
from network_namespace import NetworkNamespace

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.v1 import lease_pb2, lease_pb2_grpc

SESSION_TTL_S, CLAIM_GRACE_S = 3.0, 5.0
SETTINGS = (
    f"session_ttl={SESSION_TTL_S}",
    f"claim_grace={CLAIM_GRACE_S}",
    "retention_ttl=60",
    "handoff_ttl=10",
)
RECOVERY_S = 90.0
"""Turns must hit again within this time after the fault is over, which is one or two turns
that are recomputed."""

LEAK_S = 20.0
"""Blocks of ended conversations must be free by then; the claim grace and some slack."""

AWAY = "decode-1"
"""The engine that has a host of its own, where such can be made."""


@dataclass
class Row:
    """What was seen of one fault."""

    fault: str
    turns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked_blocks: int = 0
    first_hit_s: float | None = None


@dataclass
class Plant:
    """The stack under test and its etcd."""

    stack: Stack
    etcd: EtcdCluster
    host: NetworkNamespace | None
    """That of :data:`AWAY`."""
    rows: list[Row] = field(default_factory=list)

    @property
    def client(self) -> Client:
        return Client(self.stack.endpoints["router_http"], MODEL)


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Plant]:
    require_engines()
    with contextlib.ExitStack() as last:
        host = None
        if not network_namespace.missing():
            host = NetworkNamespace(elsewhere.SERVICES, elsewhere.ENGINES)
            last.callback(host.remove)
        cluster = EtcdCluster(tmp_path_factory.mktemp("etcd-cluster"))
        last.callback(cluster.kill)
        cluster.start()
        stack = Stack(
            Options(
                directory=tmp_path_factory.mktemp("faults"),
                etcd=cluster.endpoints,
                model=model,
                decode=2,
                lease_replicas=2,
                prefill_prefix_cache=False,
                assignments=SETTINGS,
                env={**os.environ, "UCX_TLS": "tcp"},
            ),
            progress=lambda line: print(f"faults: {line}", file=sys.__stderr__, flush=True),
        )
        if host is not None:
            stack.plan = elsewhere.moved(stack.plan, AWAY, host)
        last.callback(stack.stop)
        stack.start()
        plant = Plant(stack, cluster, host)
        yield plant
        FAULT_TABLE.extend(table(plant.rows))


class Talk:
    """A conversation whose every answer is kept, to be checked when all runs again."""

    def __init__(self, plant: Plant, row: Row, seed: int, chars: int = 1200) -> None:
        self.plant, self.row = plant, row
        self.conversation = new_conversation(row.fault)
        self.messages: list[Message] = [{"role": "user", "content": text(chars, seed)}]
        self.answers: list[tuple[list[Message], Turn]] = []
        self.seed = seed
        self.send(self.messages)

    def send(self, messages: list[Message]) -> Turn | None:
        self.row.turns += 1
        try:
            turn = self.plant.client.chat(messages, self.conversation)
        except (AssertionError, OSError) as error:
            self.row.errors.append(str(error))
            return None
        self.messages = messages
        self.row.outcomes[turn.outcome] += 1
        self.answers.append((messages, turn))
        return turn

    def go_on(self) -> Turn | None:
        self.seed += 1
        last = self.answers[-1][1].text if self.answers else ""
        return self.send(
            [
                *self.messages,
                {"role": "assistant", "content": last},
                {"role": "user", "content": text(120, self.seed)},
            ]
        )

    def move_to(self, engine: str) -> None:
        """Goes on as a conversation whose blocks ``engine`` holds."""
        while holder_of(self.plant.stack, self.conversation) != engine:
            self.conversation = new_conversation(self.row.fault)
            self.send(self.messages)

    def check(self, first: int = 1) -> None:
        """Compares the answers from the ``first`` on with those of recomputation."""
        for messages, turn in self.answers[first:]:
            again = self.plant.client.recomputed(messages)
            pairs = zip(turn.first_logprobs, again.first_logprobs, strict=True)
            if turn.prompt_ids != again.prompt_ids or any(abs(a - b) > 1e-3 for a, b in pairs):
                self.row.wrong.append(f"turn {turn.number} ({turn.outcome})")


Fault = Callable[[Plant, Talk], Callable[[], None]]
"""Starts the fault; what it returns ends it."""


def etcd_leader_killed(plant: Plant, talk: Talk) -> Callable[[], None]:
    leader = plant.etcd.leader()
    leader.kill()
    return leader.start


def etcd_killed(plant: Plant, talk: Talk) -> Callable[[], None]:
    plant.etcd.kill()
    return plant.etcd.start


def etcd_paused(plant: Plant, talk: Talk) -> Callable[[], None]:
    for member in plant.etcd.members:
        member.pause()

    def resume() -> None:
        for member in plant.etcd.members:
            member.resume()

    return resume


def etcd_compacted(plant: Plant, talk: Talk) -> Callable[[], None]:
    # A watch that cannot go on where it was: its replica sleeps while history goes.
    plant.stack.send("lease-0", signal.SIGSTOP)
    talk.go_on()
    plant.etcd.members[0].compact()
    return lambda: plant.stack.send("lease-0", signal.SIGCONT)


def lease_service_killed_at_each_step(plant: Plant, talk: Talk) -> Callable[[], None]:
    # Somewhere between a turn's start, its claim and its grant.
    for delay_s in (0.01, 0.05, 0.4, 1.2):
        thread = threading.Thread(target=talk.go_on)
        thread.start()
        time.sleep(delay_s)
        for name in ("lease-0", "lease-1"):
            plant.stack.kill(name)
        thread.join()
        for name in ("lease-0", "lease-1"):
            plant.stack.start_part(name)
    return lambda: None


def registry_killed(plant: Plant, talk: Talk) -> Callable[[], None]:
    plant.stack.kill("registry")
    return lambda: plant.stack.start_part("registry")


def decode_paused(plant: Plant, talk: Talk) -> Callable[[], None]:
    holder = holder_of(plant.stack, talk.conversation)
    plant.stack.send(holder, signal.SIGSTOP)
    time.sleep(5)  # longer than its session lives
    return lambda: plant.stack.send(holder, signal.SIGCONT)


def decode_killed(plant: Plant, talk: Talk) -> Callable[[], None]:
    holder = holder_of(plant.stack, talk.conversation)
    plant.stack.kill(holder)
    return lambda: plant.stack.start_part(holder)


def decode_stopped_in_a_read(plant: Plant, talk: Talk) -> Callable[[], None]:
    # A long history, so that the read takes a while.
    for seed in (71, 72):
        talk.send([*talk.messages, {"role": "user", "content": text(2500, seed)}])
    holder = stopped_while_it_is_read(plant, talk)

    def resume() -> None:
        # The late bytes come while another prompt's blocks are in use beside theirs.
        others: list[Talk] = []
        thread = threading.Thread(
            target=lambda: others.append(Talk(plant, talk.row, seed=73, chars=4000))
        )
        thread.start()
        prefill = f"http://{plant.stack.plan.part('prefill-0').http}"
        wait(lambda: unfinished_requests(prefill) > 0, "another prompt is computed")
        plant.stack.send(holder, signal.SIGCONT)
        thread.join()
        wait(lambda: used_blocks(plant.stack, "prefill-0") == 0, "the blocks are free")
        others[0].check(first=0)

    return resume


def stopped_while_it_is_read(plant: Plant, talk: Talk) -> str:
    """The holder of the conversation, stopped in the middle of a read. The turn is answered,
    and the blocks that the hung read may still write stay out of use."""
    # After its claim a reader asks the holder once more, for some milliseconds, and reads.
    for delay_s in (0.03, 0.06, 0.1, 0.015, 0.0):
        holder = holder_of(plant.stack, talk.conversation)
        thread = threading.Thread(target=talk.go_on)
        thread.start()
        wait(
            lambda: has_open_ticket(plant.stack, talk.conversation) or not thread.is_alive(),  # noqa: B023
            "a claim",
        )
        time.sleep(delay_s)
        plant.stack.send(holder, signal.SIGSTOP)
        thread.join()
        wait(lambda: usage(plant.stack)["prefill-0"].retained_blocks == 0, "the prompt is fetched")
        if used_blocks(plant.stack, "prefill-0") > 0:
            assert talk.answers[-1][1].outcome == "miss_engine"
            return holder
        # The read was over by then, or had not begun.
        plant.stack.send(holder, signal.SIGCONT)
        wait(lambda: len(usage(plant.stack)) == 3, "all engines have a session")
        assert seconds_to_first_hit(talk) is not None
    raise AssertionError("no read was hung in five tries")


def engines_refuse_turns(plant: Plant, talk: Talk) -> Callable[[], None]:
    holder_of(plant.stack, talk.conversation)
    # The decode engine refuses what was computed for it, before it has read any of it; the
    # prefill engine a prompt that is too long.
    refused = {"top_logprobs": 1000}, {"messages": [{"role": "user", "content": text(30000, 1)}]}
    for what in refused:
        body = {
            "model": MODEL,
            "conversation_id": talk.conversation,
            "messages": talk.messages,
            "logprobs": True,
            **what,
        }
        status, _, answer = plant.client.post("/v1/chat/completions", body)
        assert status == 400, answer
    wait(lambda: not has_open_ticket(plant.stack, talk.conversation), "no ticket is left")
    assert was_claimed(plant.stack, talk.conversation)
    return lambda: None


def prefill_killed_after_its_claim(plant: Plant, talk: Talk) -> Callable[[], None]:
    holder_of(plant.stack, talk.conversation)
    long = [*talk.messages, {"role": "user", "content": text(3000, 81)}]
    thread = threading.Thread(target=lambda: talk.send(long))
    thread.start()
    wait(lambda: was_claimed(plant.stack, talk.conversation), "a claim")
    plant.stack.kill("prefill-0")
    thread.join()
    return lambda: plant.stack.start_part("prefill-0")


def all_engines_restarted(plant: Plant, talk: Talk) -> Callable[[], None]:
    names = ("prefill-0", "decode-0", "decode-1")
    for name in names:
        plant.stack.kill(name)
    for name in names:
        plant.stack.start_part(name, wait=False)
    for name in names:
        plant.stack.wait_part(name)
    return lambda: None


def decode_cut_off_from_the_services(plant: Plant, talk: Talk) -> Callable[[], None]:
    return cut_off(plant, talk, elsewhere.SERVICES)


def decode_cut_off_from_everybody(plant: Plant, talk: Talk) -> Callable[[], None]:
    return cut_off(plant, talk, elsewhere.SERVICES, elsewhere.ENGINES)


def cut_off(plant: Plant, talk: Talk, *links: str) -> Callable[[], None]:
    """Cuts links of the engine that holds the conversation, for longer than its session's
    TTL and the grace."""
    host = plant.host
    if host is None:
        network_namespace.require()
    assert host is not None
    talk.move_to(AWAY)
    assert used_blocks(plant.stack, AWAY) > 0
    for link in links:
        host.link(link).cut()
    cut_at = time.monotonic()
    talk.go_on()  # while its session may still be shown
    time.sleep(max(0.0, cut_at + SESSION_TTL_S + CLAIM_GRACE_S - time.monotonic()))
    if elsewhere.ENGINES not in links:
        # It has heard of no end. It frees what it holds all the same, by its own clock.
        wait(lambda: used_blocks(plant.stack, AWAY) == 0, "the blocks are free", LEAK_S)

    def mend() -> None:
        for link in links:
            host.link(link).mend()
        wait(lambda: AWAY in usage(plant.stack), f"{AWAY} has a session again")
        wait(lambda: is_ready(plant.stack), "the router sees the engines")
        talk.move_to(AWAY)

    return mend


FAULTS: list[tuple[Fault, int]] = [
    (etcd_leader_killed, 2),
    (etcd_killed, 2),
    (etcd_paused, 2),
    (etcd_compacted, 1),
    (lease_service_killed_at_each_step, 0),
    (registry_killed, 2),
    (decode_paused, 1),
    (decode_cut_off_from_the_services, 1),
    (decode_cut_off_from_everybody, 1),
    (decode_stopped_in_a_read, 0),
    (engines_refuse_turns, 0),
    (prefill_killed_after_its_claim, 1),
    (decode_killed, 2),
    (all_engines_restarted, 0),
]
"""Faults, and how many turns run while each lasts (besides those it runs itself)."""


@pytest.mark.parametrize(
    ("fault", "turns_meanwhile"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_fault_costs_recomputation_and_nothing_else(
    plant: Plant, fault: Fault, turns_meanwhile: int
) -> None:
    row = Row(fault.__name__)
    plant.rows.append(row)
    # given a conversation whose turns hit
    talk = Talk(plant, row, seed=hash_free_seed(fault.__name__))
    holder_of(plant.stack, talk.conversation)
    assert (turn := talk.go_on()) is not None
    assert turn.outcome == "hit"
    # when a fault comes, lasts for some turns, and goes
    end_fault = fault(plant, talk)
    for _ in range(turns_meanwhile):
        talk.go_on()
    end_fault()
    # then turns hit again, every answer is that of recomputation, and nothing stays behind
    row.first_hit_s = seconds_to_first_hit(talk)
    talk.check()
    row.leaked_blocks = blocks_left_after_the_end(plant)
    assert row.errors == []
    assert row.wrong == []
    assert row.leaked_blocks == 0
    assert row.first_hit_s is not None


def hash_free_seed(name: str) -> int:
    """The same in every process."""
    return sum(map(ord, name))


def seconds_to_first_hit(talk: Talk) -> float | None:
    started = time.monotonic()
    while time.monotonic() - started < RECOVERY_S:
        turn = talk.go_on()
        if turn is not None and turn.outcome == "hit":
            return time.monotonic() - started
        time.sleep(0.5)
    return None


def blocks_left_after_the_end(plant: Plant) -> int:
    """Blocks that engines still retain after all conversations were ended."""
    with grpc.insecure_channel(plant.stack.plan.lease_grpc[0]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        for lease in stub.ListLeases(lease_pb2.ListLeasesRequest(), timeout=5).leases:
            stub.EndConversation(
                lease_pb2.EndConversationRequest(conversation=lease.conversation), timeout=5
            )
    deadline = time.monotonic() + LEAK_S
    while time.monotonic() < deadline:
        engines = usage(plant.stack)
        left = sum(engine.retained_blocks for engine in engines.values())
        if left == 0 and len(engines) == 3:
            return 0
        time.sleep(0.2)
    return left or -1


def table(rows: list[Row]) -> list[str]:
    """Lines of text: a head, and a line for each fault."""
    lines = [
        f"{'fault':34} {'turns':>5} {'hits':>4} {'errors':>6} {'wrong':>5} {'leaked':>6} "
        f"{'first hit':>9}  misses"
    ]
    for row in rows:
        misses = ", ".join(f"{n} {w}" for w, n in sorted(row.outcomes.items()) if w != "hit")
        first = "never" if row.first_hit_s is None else f"{row.first_hit_s:.1f} s"
        lines.append(
            f"{row.fault:34} {row.turns:5} {row.outcomes['hit']:4} {len(row.errors):6} "
            f"{len(row.wrong):5} {row.leaked_blocks:6} {first:>9}  {misses}"
        )
    return lines
