"""Parts are killed, stopped and restarted between and during turns: no request fails, no
answer changes, and the next turns hit again."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines.conftest import EngineStack
from engines.look import (
    PATIENCE_S,
    holder_of,
    is_ready,
    lease_of,
    unfinished_requests,
    usage,
    wait,
    was_claimed,
)
from engines.turns import (
    Client,
    Message,
    Turn,
    assert_same_answer,
    new_conversation,
    text,
)
from otlp_receiver import Receiver


class Talk:
    """A conversation that grows by a turn at a time."""

    def __init__(self, client: Client, name: str, seed: int = 11, chars: int = 1200) -> None:
        self.client = client
        self.conversation = new_conversation(name)
        self.messages: list[Message] = [{"role": "user", "content": text(chars, seed)}]
        self.last = client.chat(self.messages, self.conversation)

    def next_prompt(self, seed: int) -> list[Message]:
        return [
            *self.messages,
            {"role": "assistant", "content": self.last.text},
            {"role": "user", "content": text(150, seed)},
        ]

    def turn(self, seed: int = 12) -> Turn:
        """The next turn, checked against recomputation."""
        self.messages = self.next_prompt(seed)
        self.last = self.client.chat(self.messages, self.conversation)
        return self.last

    def check_last(self) -> None:
        assert_same_answer(self.last, self.client.recomputed(self.messages))


def hits_again(talk: Talk) -> None:
    """Within a few turns, without anybody's help."""
    deadline = time.monotonic() + PATIENCE_S
    while talk.turn().outcome != "hit":
        assert time.monotonic() < deadline, talk.last.outcome
        time.sleep(0.5)
    talk.check_last()


@pytest.mark.parametrize("part", ["router-0", "registry", "lease-0", "etcd"])
def test_a_killed_service_that_comes_back_loses_nothing(
    stack: EngineStack, client: Client, part: str
) -> None:
    # given a conversation with a lease
    talk = Talk(client, part)
    # when a part is killed between two turns and started again
    stack.restart(part)
    for service in ("registry", "lease-0", "lease-1"):
        stack.wait_part(service, timeout_s=PATIENCE_S)
    # then the next turn hits
    assert talk.turn().outcome == "hit"
    talk.check_last()


def test_turns_are_answered_while_the_lease_service_is_down(
    stack: EngineStack, client: Client, receiver: Receiver
) -> None:
    talk = Talk(client, "no-lease-service")
    for part in ("lease-0", "lease-1"):
        stack.kill(part)
    # when turns run meanwhile, they are recomputed and say why
    for seed in (21, 22):
        assert talk.turn(seed).outcome == "miss_unavailable"
        assert control_plane_seconds(receiver, talk.last) <= 0.1
    talk.check_last()
    # then hits come back with the service
    stack.start_part("lease-0")
    stack.start_part("lease-1")
    hits_again(talk)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_turns_are_answered_while_etcd_is_down(
    stack: EngineStack, client: Client, receiver: Receiver, how: signal.Signals
) -> None:
    talk = Talk(client, "no-etcd")
    if how is signal.SIGKILL:
        stack.kill("etcd")
    else:
        stack.send("etcd", how)
    for seed in (31, 32):
        turn = talk.turn(seed)
        # A stopped etcd is noticed by waiting for it: the first claim may time out.
        assert turn.outcome in {"miss_unavailable", "miss_timeout"}
        assert control_plane_seconds(receiver, turn) <= 0.15
    assert turn.outcome == "miss_unavailable"
    if how is signal.SIGKILL:
        stack.start_part("etcd")
    else:
        stack.send("etcd", signal.SIGCONT)
    hits_again(talk)


def control_plane_seconds(receiver: Receiver, turn: Turn) -> float:
    """What a turn has waited for registry and lease service before it computed."""
    spans = receiver.wait_for(turn.trace_id, "route", "lease.claim")
    return spans["route"].seconds + spans["lease.claim"].seconds


def test_a_killed_decode_engine_costs_its_leases_and_nothing_else(
    stack: EngineStack, client: Client, second_decode: str
) -> None:
    # given two conversations held by a decode engine, one of which P has read from it
    talk, resting = held_by(second_decode, stack, client), held_by(second_decode, stack, client)
    assert talk.turn().outcome == "hit"
    # when it is killed
    wait(lambda: holder_of(stack, talk.conversation) == second_decode, "the hit is granted")
    stack.kill(second_decode)
    # then another answers
    another_takes_over(stack, talk)
    # and no handle of the dead one is used when it comes back under its old name, host and
    # port, within its old session's TTL
    old = stack.incarnation(second_decode)
    stack.start_part(second_decode)
    assert stack.incarnation(second_decode) != old
    wait(lambda: is_ready(stack), "the router sees the engines")
    assert talk.turn(14).outcome == "hit"
    talk.check_last()
    assert resting.turn().outcome == "miss_engine"
    resting.check_last()
    assert resting.turn(13).outcome == "hit"
    resting.check_last()
    # and when it is killed once more, before P has ever read from this start of it, the same
    unread = held_by(second_decode, stack, client)
    stack.kill(second_decode)
    another_takes_over(stack, unread)


def held_by(engine: str, stack: EngineStack, client: Client) -> Talk:
    """A conversation of one turn whose blocks ``engine`` holds, and nobody has read."""
    for _ in range(20):
        talk = Talk(client, "killed-decode", chars=2000)
        if holder_of(stack, talk.conversation) == engine:
            return talk
    raise AssertionError(f"no turn of 20 went to {engine}")


def another_takes_over(stack: EngineStack, talk: Talk) -> None:
    """The next turns of a conversation whose holder is gone, and what they cost."""
    turn = talk.turn()
    # The turn says that the holder is gone.
    assert turn.outcome == "miss_engine"
    assert holder_of(stack, talk.conversation) == "decode-0"
    talk.check_last()
    # It cost what recomputation costs (more than once, for machines that others use) and less
    # than a second.
    recomputed = [talk.client.recomputed(talk.messages).seconds for _ in range(3)]
    assert turn.seconds <= max(recomputed) + 1.0
    # And the next turn hits there.
    assert talk.turn(13).outcome == "hit"


def test_forks_of_one_history_all_hit_on_two_prefill_engines(
    stack: EngineStack,
    client: Client,
    second_prefill: str,
) -> None:
    # given one history
    talk = Talk(client, "forks", chars=2000)
    prompts = [talk.next_prompt(seed) for seed in (41, 42, 43)]
    # when three forks of it run at the same time
    with ThreadPoolExecutor(3) as pool:
        forks = list(pool.map(lambda p: client.chat(p, talk.conversation), prompts))
    # then each has read the history, and answers as recomputation does
    for fork, prompt in zip(forks, prompts, strict=True):
        assert fork.outcome == "hit"
        assert_same_answer(fork, client.recomputed(prompt))
    # and of all the leases only the last is kept
    wait(lambda: only_one_is_left(stack, talk.conversation), "one lease is left")


def test_a_turn_that_failed_after_its_claim_hits_when_tried_again(
    stack: EngineStack, client: Client, second_prefill: str
) -> None:
    # given a turn that is being prefilled when its engine dies
    talk = Talk(client, "retry", chars=1500)
    prompt = talk.next_prompt(51)
    prompt[-1]["content"] = text(6000, 51)
    answers: list[Turn] = []
    thread = threading.Thread(target=lambda: answers.append(client.chat(prompt, talk.conversation)))
    thread.start()
    stack.kill(prefilling_engine(stack, talk.conversation))
    thread.join(120)
    # then the router has tried again elsewhere, with a ticket of its own, and hit
    assert answers, "the turn was not answered"
    assert answers[0].outcome == "hit"
    assert_same_answer(answers[0], client.recomputed(prompt))


def test_parameters_that_a_client_makes_up_reach_no_engine(client: Client) -> None:
    # given a client that names a host to read from
    made_up = {
        "do_remote_prefill": True,
        "do_remote_decode": True,
        "remote_engine_id": "evil",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_request_id": "x",
        "remote_num_tokens": 384,
        "tp_size": 1,
    }
    prompt = [{"role": "user", "content": text(600, 61)}]
    # when it sends them in every place where an engine would look
    for body in (
        {"kv_transfer_params": made_up},
        {"vllm_xargs": {"kv_transfer_params": "made up"}},
    ):
        turn = client.chat(prompt, new_conversation("evil"), **body)
        # then the turn is like any other
        assert turn.outcome == "miss_no_lease"
        assert_same_answer(turn, client.recomputed(prompt))


def only_one_is_left(stack: EngineStack, conversation: str) -> bool:
    """Whether of a conversation's leases the last is kept, and no other retires."""
    lease = lease_of(stack, conversation)
    return (
        lease is not None
        and not lease.retiring
        and usage(stack)[lease.holder_engine_id].retained_blocks >= lease.num_blocks
    )


def prefilling_engine(stack: EngineStack, conversation: str) -> str:
    """The prefill engine that computes after it has claimed the conversation's lease."""
    busy: list[str] = []

    def one_is_busy() -> bool:
        busy[:] = [
            engine["engine_id"]
            for engine in stack.endpoints["prefill"]
            if was_claimed(stack, conversation) and unfinished_requests(engine["http"])
        ]
        return bool(busy)

    wait(one_is_busy, "the turn has claimed its lease and is being prefilled")
    return busy[0]
