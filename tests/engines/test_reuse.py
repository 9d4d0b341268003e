"""What is reused is right: real vLLM, real NIXL, float32, against recomputation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines.turns import (
    Client,
    Message,
    Turn,
    assert_same_answer,
    expected_reuse,
    leased_ids,
    new_conversation,
    text,
)
from otlp_receiver import Receiver

CHUNK_TOKENS = 256
"""Two of the CPU build's KV blocks of 128 tokens."""

pytestmark = pytest.mark.engines

SYSTEM = {"role": "system", "content": "You keep the books of a small library."}


def first_prompt() -> list[Message]:
    return [SYSTEM, {"role": "user", "content": text(1400, seed=1)}]


def unchanged(history: list[Message]) -> list[Message]:
    return history


def replaced_in_the_middle(history: list[Message]) -> list[Message]:
    content = history[1]["content"]
    edited = content[:700] + text(300, seed=99) + content[1000:]
    return [history[0], {**history[1], "content": edited}, *history[2:]]


def answer_stripped(history: list[Message]) -> list[Message]:
    answer = history[2]["content"]
    return [*history[:2], {**history[2], "content": answer[len(answer) // 2 :]}, *history[3:]]


def cut_to_the_first_half(history: list[Message]) -> list[Message]:
    content = history[1]["content"]
    return [history[0], {**history[1], "content": content[: len(content) // 2]}]


def system_prompt_in_front(history: list[Message]) -> list[Message]:
    return [{"role": "system", "content": "Answer in French."}, *history]


Change = Callable[[list[Message]], list[Message]]


@pytest.mark.parametrize(
    "change",
    [
        unchanged,
        replaced_in_the_middle,
        answer_stripped,
        cut_to_the_first_half,
        system_prompt_in_front,
    ],
)
def test_a_second_turn_answers_as_if_recomputed(client: Client, change: Change) -> None:
    # given a first turn, whose answer the client sends back, as it is or changed
    conversation = new_conversation(change.__name__)
    prompt = first_prompt()
    first = client.chat(prompt, conversation, max_tokens=120)
    history = change([*prompt, {"role": "assistant", "content": first.text}])
    second_prompt = [*history, {"role": "user", "content": text(200, seed=2)}]

    # when the second turn runs with reuse, and without
    second = client.chat(second_prompt, conversation)
    again = client.recomputed(second_prompt)

    # then the answer is the same, and exactly what matches was reused
    assert_same_answer(second, again)
    check_reuse(first, second)


def check_reuse(first: Turn, second: Turn) -> None:
    expected = expected_reuse(leased_ids(first), second.prompt_ids, CHUNK_TOKENS)
    assert second.reused_tokens == expected
    assert second.outcome == ("hit" if expected else "miss_prefix")


def test_an_unchanged_history_is_reused_to_its_last_token(client: Client) -> None:
    # given a history of token ids, which come back exactly
    conversation = new_conversation("exact")
    ids = [ord(c) % 256 for c in text(900, seed=3)]
    first = complete(client, ids, conversation, max_tokens=50)
    leased = (ids + first["ids"])[:-1]
    # when the next turn continues it
    second = complete(client, ids + first["ids"] + ids[:100], conversation)
    again = complete(client, ids + first["ids"] + ids[:100], None)
    # then all of it is reused, the half-filled last chunk included
    assert second["reused"] == len(leased)
    assert len(leased) % CHUNK_TOKENS != 0
    assert second["logprobs"] == pytest.approx(again["logprobs"], abs=1e-3)


def test_the_last_message_rewritten_reuses_what_came_before_it(client: Client) -> None:
    # given two turns
    conversation = new_conversation("rewritten")
    prompt = first_prompt()
    first = client.chat(prompt, conversation, max_tokens=60)
    history = [*prompt, {"role": "assistant", "content": first.text}]
    second = client.chat(
        [*history, {"role": "user", "content": text(300, seed=4)}], conversation, max_tokens=40
    )
    # when the last user message is taken back and written anew
    rewritten = [*history, {"role": "user", "content": text(300, seed=5)}]
    third = client.chat(rewritten, conversation)
    again = client.recomputed(rewritten)
    # then what the two prompts share is reused, to the chunk
    assert_same_answer(third, again)
    check_reuse(second, third)
    assert third.outcome == "hit"


def test_text_that_is_not_valid_utf8_tokenizes_anew_and_stays_right(client: Client) -> None:
    # given an answer with bytes that are no valid UTF-8, which JSON cannot carry back
    conversation = new_conversation("utf8")
    prompt = first_prompt()
    not_ascii = {str(byte): 100 for byte in range(128, 256)}
    first = client.chat(prompt, conversation, max_tokens=120, logit_bias=not_ascii)
    assert "\ufffd" in first.text
    history = [*prompt, {"role": "assistant", "content": first.text}]
    second_prompt = [*history, {"role": "user", "content": text(200, seed=6)}]
    # when the client sends back what it was given
    second = client.chat(second_prompt, conversation)
    again = client.recomputed(second_prompt)
    # then the tokens differ from the leased ones, and only the equal chunks are reused
    assert second.prompt_ids[: len(leased_ids(first))] != leased_ids(first)
    assert_same_answer(second, again)
    check_reuse(first, second)
    assert second.outcome == "hit"


def test_other_tenants_salts_and_conversations_do_not_hit(client: Client) -> None:
    conversation = new_conversation("salt")
    prompt = first_prompt()
    first = client.chat(prompt, conversation, cache_salt="a")
    history = [
        *prompt,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    assert client.chat(history, conversation, cache_salt="b").outcome == "miss_prefix"
    assert client.chat(history, new_conversation()).outcome == "miss_no_lease"


def test_a_short_history_is_recomputed(client: Client) -> None:
    conversation = new_conversation("short")
    ids = [ord(c) % 256 for c in text(40, seed=7)]
    first = complete(client, ids, conversation, max_tokens=5)
    assert complete(client, ids + first["ids"], conversation)["outcome"] == "miss_short"


def test_reuse_can_be_turned_off_for_one_turn(client: Client) -> None:
    conversation = new_conversation("off")
    prompt = first_prompt()
    first = client.chat(prompt, conversation)
    history = [
        *prompt,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    off = client.chat(history, conversation, headers={"x-kvlease-reuse": "off"})
    on = client.chat(history, conversation)
    assert (off.outcome, off.reused_tokens) == ("off", 0)
    assert on.outcome == "hit"
    assert_same_answer(on, off)


def complete(
    client: Client, ids: list[int], conversation: str | None, *, max_tokens: int = 8
) -> dict[str, object]:
    """A turn of /v1/completions on token ids."""
    status, headers, body = client.post(
        "/v1/completions",
        {
            "model": client.model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"conversation_id": conversation} if conversation else {}),
        },
    )
    assert status == 200, body
    choice = body["choices"][0]
    return {
        "outcome": headers["x-kvlease-outcome"],
        "reused": int(headers["x-kvlease-reused-tokens"]),
        "ids": choice["token_ids"],
        "logprobs": sorted(choice["logprobs"]["top_logprobs"][0].values()),
    }


def test_several_answers_to_one_prompt_share_its_prefill(client: Client) -> None:
    # given a conversation whose second turn asks for three answers
    conversation = new_conversation("answers")
    prompt = first_prompt()
    first = client.chat(prompt, conversation)
    second_prompt = [
        *prompt,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    second = client.chat(second_prompt, conversation, n=3, temperature=1.0, seed=1)
    # then all of them come from one prefill, which hit
    assert second.outcome == "hit"
    choices = second.body["choices"]
    assert len(choices) == 3
    # (the last of the top five is the sampled token, where that is not among them)
    again = client.recomputed(second_prompt)
    assert second.first_logprobs[:4] == pytest.approx(again.first_logprobs[:4], abs=1e-3)
    # and the next turn hits, whichever answer the client goes on with
    third_prompt = [
        *second_prompt,
        {"role": "assistant", "content": choices[1]["message"]["content"]},
        {"role": "user", "content": "and then?"},
    ]
    assert client.chat(third_prompt, conversation).outcome == "hit"


def test_what_pulling_and_computing_take_is_predicted(client: Client, receiver: Receiver) -> None:
    # given two conversations from which the engine learns what reads and prompts take
    taken: dict[str, list[float]] = {"pull": [], "compute": []}
    for seed in (11, 12):
        conversation = new_conversation("predicted")
        prompt = [SYSTEM, {"role": "user", "content": text(1400, seed=seed)}]
        for number in range(4):
            turn = client.chat(prompt, conversation)
            again = client.recomputed(prompt)
            # when a turn of the second one hits
            if seed == 12 and number > 0:
                assert turn.outcome == "hit"
                spans = receiver.wait_for(turn.trace_id, "kv.pull", "prefill", timeout_s=20)
                alone = receiver.wait_for(again.trace_id, "prefill", timeout_s=20)["prefill"]
                pull, prefill = spans["kv.pull"].attributes, spans["prefill"].attributes
                # then both predictions are on its spans, beside what happened
                assert prefill["kvlease.pull_s"] == pull["kvlease.seconds"]
                saved = (
                    alone.attributes.get("kvlease.prefill_s", 0.0) - prefill["kvlease.prefill_s"]
                )
                taken["pull"].append(pull["kvlease.seconds"] / pull["kvlease.predicted_pull_s"])
                taken["compute"].append(saved / pull["kvlease.predicted_compute_s"])
                assert prefill["kvlease.predicted_pull_s"] == pull["kvlease.predicted_pull_s"]
            prompt = [
                *prompt,
                {"role": "assistant", "content": turn.text},
                {"role": "user", "content": text(200, seed=100 + number)},
            ]
    # and they are of something (how good they are is for bench/pull.py to say)
    for what, factors in taken.items():
        assert factors, what
        assert all(factor > 0 for factor in factors) or what == "compute", factors
