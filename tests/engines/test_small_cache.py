"""A decode engine with few KV blocks: retained ones never stand in the way of a request,
and clients say when they are not needed any more."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from engines.conftest import MODEL
from engines.turns import Client, Message, Turn, assert_same_answer, new_conversation, text

from kvlease import times
from kvlease.cli.main import cli
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

BLOCK = 128
TOTAL = 40
BUDGET = 20
"""Half of them."""


@pytest.fixture(scope="module")
def small(
    needs_engines: None, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Stack]:
    """A decode engine with 40 blocks for requests, 20 for leases, and no free reserve: so
    blocks are missed when they are needed, not before."""
    stack = Stack(
        Options(
            directory=tmp_path_factory.mktemp("small"),
            model=model,
            assignments=("min_free_fraction=0", "pull_policy=always"),
            engine_arguments=("--max-model-len", "4608"),
            # One more is the pool's null block.
            decode_arguments=("--num-gpu-blocks-override", str(TOTAL + 1)),
            prefill_prefix_cache=False,
        )
    )
    with stack:
        yield stack


@pytest.fixture
def client(small: Stack) -> Iterator[Client]:
    """Sends turns to the router; begins and ends with nothing retained."""
    made = Client(small.endpoints["router_http"], MODEL)
    forget_all(small)
    preempted = preemptions(small)
    yield made
    assert preemptions(small) == preempted, "a request was preempted"
    forget_all(small)


# --- what the stack says ----------------------------------------------------------------


def usage(stack: Stack) -> registry_pb2.BlockUsage:
    """The decode engine's blocks."""
    with grpc.insecure_channel(stack.plan.registry_grpc) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        engines = stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5).engines
        return next(item.usage for item in engines if item.engine_id == "decode-0")


def leases(stack: Stack) -> dict[str, lease_pb2.Lease]:
    """By conversation."""
    with grpc.insecure_channel(stack.plan.lease_grpc[0]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        found = stub.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000), timeout=5).leases
        return {lease.conversation.conversation_id: lease for lease in found}


def forget_all(stack: Stack) -> None:
    for name in leases(stack):
        end_by_grpc(stack, name)
    wait(lambda: usage(stack).retained_blocks == 0, "nothing is retained", 5.0)


def preemptions(stack: Stack) -> float:
    """vLLM's own count, on the decode engine."""
    url = stack.endpoints["decode"][0]["http"] + "/metrics"
    with urllib.request.urlopen(url, timeout=5) as response:
        lines = response.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:num_preemptions_total")]
    assert counts, "vLLM counts no preemptions any more"
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


def wait(condition: Callable[[], bool], what: str, patience_s: float = 20.0) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + patience_s, f"not within {patience_s} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


def fill(stack: Stack, client: Client, count: int = 4) -> dict[str, list[Message]]:
    """Conversations of five blocks each, retained; four fill the budget."""
    talks = {}
    for index in range(count):
        name = new_conversation(f"kept-{index}")
        talks[name] = [{"role": "user", "content": text(520, seed=index)}]
        client.chat(talks[name], name, max_tokens=24)
    wait(lambda: set(talks) <= set(leases(stack)), "all are leased")
    wait(lambda: usage(stack).retained_blocks == 5 * count, "their blocks are retained")
    return talks


def go_on(client: Client, name: str, messages: list[Message], last: str) -> Turn:
    """The next turn."""
    history = [
        *messages,
        {"role": "assistant", "content": last},
        {"role": "user", "content": "go on"},
    ]
    return client.chat(history, name)


# --- the budget -------------------------------------------------------------------------


def test_conversations_hit_while_the_budget_has_room(small: Stack, client: Client) -> None:
    talks = fill(small, client, 3)
    for name, messages in talks.items():
        assert go_on(client, name, messages, "well").outcome == "hit"
    assert len(leases(small)) == 3


def test_a_full_budget_keeps_the_newest_conversations(small: Stack, client: Client) -> None:
    talks = fill(small, client)

    name = new_conversation("newest")
    client.chat([{"role": "user", "content": text(520, seed=50)}], name)

    wait(lambda: usage(small).retained_blocks <= BUDGET, "the budget is kept", 2.0)
    assert set(leases(small)) == {*list(talks)[1:], name}


def test_a_request_that_is_larger_than_what_is_free_gets_the_retained_blocks(
    small: Stack, client: Client
) -> None:
    # given 20 of 40 blocks retained
    fill(small, client)
    # when a request comes that needs 32
    prompt: list[Message] = [{"role": "user", "content": text(4000, seed=60)}]
    alone = client.recomputed(prompt)
    assert usage(small).retained_blocks <= 8, "the first one has made room"
    forget_all(small)
    fill(small, client)
    crowded = client.recomputed(prompt)
    # then it runs as if nothing were retained
    assert_same_answer(crowded, alone)
    assert crowded.seconds < alone.seconds + 2.0
    assert usage(small).retained_blocks <= 8


def test_several_requests_at_once_run_and_retained_blocks_go(small: Stack, client: Client) -> None:
    fill(small, client)
    prompts: list[list[Message]] = [
        [{"role": "user", "content": text(1000, seed=70 + index)}] for index in range(3)
    ]

    with ThreadPoolExecutor(3) as pool:
        crowded = list(pool.map(lambda prompt: client.recomputed(prompt, max_tokens=200), prompts))

    assert usage(small).retained_blocks < BUDGET
    for turn, prompt in zip(crowded, prompts, strict=True):
        assert_same_answer(turn, client.recomputed(prompt))


def test_answers_that_grow_get_retained_blocks_before_anybody_is_preempted(
    small: Stack, client: Client
) -> None:
    # given 20 of 40 blocks retained
    fill(small, client)

    # when two answers grow to 13 blocks each, with not even a reserve kept free
    def grow(seed: int) -> Turn:
        prompt: list[Message] = [{"role": "user", "content": text(520, seed)}]
        return client.recomputed(prompt, max_tokens=1100, ignore_eos=True)

    with ThreadPoolExecutor(2) as pool:
        grown = list(pool.map(grow, (80, 81)))

    # then nobody is preempted (see ``client``) and leases have gone
    assert [len(turn.answer_ids) for turn in grown] == [1100, 1100]
    assert usage(small).retained_blocks <= 15


def test_several_answers_leave_nothing_behind(small: Stack, client: Client) -> None:
    name = new_conversation("answers")
    prompt: list[Message] = [{"role": "user", "content": text(520, seed=90)}]

    turn = client.chat(prompt, name, n=3, temperature=1.0, seed=1)

    assert len(turn.body["choices"]) == 3
    time.sleep(1.0)  # a grant would be there by now, and published
    assert leases(small) == {}
    assert usage(small).retained_blocks == 0
    assert usage(small).free_blocks == TOTAL


# --- the end ----------------------------------------------------------------------------


def conversation(name: str) -> common_pb2.Conversation:
    return common_pb2.Conversation(tenant="default", model=MODEL, conversation_id=name)


def end_by_grpc(stack: Stack, name: str) -> None:
    with grpc.insecure_channel(stack.plan.lease_grpc[0]) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        request = lease_pb2.EndConversationRequest(conversation=conversation(name))
        stub.EndConversation(request, timeout=5)


def end_by_http(stack: Stack, name: str) -> None:
    url = f"{stack.endpoints['router_http']}/v1/conversations/{name}"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=5):
        pass


def end_by_command(stack: Stack, name: str) -> None:
    directory = str(stack.options.directory)
    result = CliRunner().invoke(cli, ["end", name, "--dir", directory])
    assert f"the lease of {name} is ended" in result.output


def end_by_last_turn(stack: Stack, name: str) -> None:
    client = Client(stack.endpoints["router_http"], MODEL)
    messages: list[Message] = [{"role": "user", "content": text(520, seed=0)}]
    turn = client.chat(messages, name, headers={"x-kvlease-end": "true"})
    assert turn.outcome == "hit", "the last turn, too, uses what is kept"


@pytest.mark.parametrize("end", [end_by_grpc, end_by_http, end_by_command, end_by_last_turn])
def test_an_end_frees_the_blocks_of_an_idle_engine_within_a_second(
    small: Stack, client: Client, end: Callable[[Stack, str], None]
) -> None:
    (name,) = fill(small, client, 1)

    end(small, name)

    wait(lambda: usage(small).retained_blocks == 0, "nothing is retained", 1.0)
    assert usage(small).free_blocks == TOTAL
    assert leases(small) == {}
    # and they are there for the next request: it needs nearly all
    client.recomputed([{"role": "user", "content": text(4400, seed=95)}])


# --- the retention ----------------------------------------------------------------------


def test_a_turn_says_how_long_its_blocks_stay(small: Stack, client: Client) -> None:
    name = new_conversation("long")
    prompt: list[Message] = [{"role": "user", "content": text(520, seed=100)}]

    client.chat(prompt, name, headers={"x-kvlease-retain": "1200"})

    wait(lambda: name in leases(small), "it is leased")
    lease = leases(small)[name]
    kept_s = times.moment(lease.expire_time) - times.moment(lease.grant_time)
    assert kept_s == pytest.approx(1200, abs=0.1)


def test_blocks_stay_as_long_as_was_said_and_longer_if_renewed(
    small: Stack, client: Client
) -> None:
    # given two conversations whose blocks stay for two seconds
    prompt: list[Message] = [{"role": "user", "content": text(520, seed=110)}]
    names = [new_conversation("short"), new_conversation("renewed")]
    for name in names:
        client.chat(prompt, name, headers={"x-kvlease-retain": "2"})
        wait(lambda: name in leases(small), "it is leased")  # noqa: B023
        # when one of them is renewed
        if name == names[1]:
            directory = str(small.options.directory)
            result = CliRunner().invoke(cli, ["renew", name, "--for", "60", "--dir", directory])
            assert "keeps the blocks" in result.output
    time.sleep(2.5)
    # then the other one's are gone, and this one's are there
    wait(lambda: set(leases(small)) == {names[1]}, "the short one has ended", 2.0)
    wait(lambda: usage(small).retained_blocks == 5, "its blocks are free", 2.0)
    assert client.chat(prompt, names[1]).outcome == "hit"
