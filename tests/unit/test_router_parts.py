"""Small parts of the router: circuit, handoff, reading a request, errors, keys."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvlease.config import ConfigError
from kvlease.router import handoff
from kvlease.router.ask import read_ask, to_json
from kvlease.router.circuit import Circuit
from kvlease.router.errors import HttpError, refusal, unknown_model
from kvlease.router.handoff import Handoff, TurnInfo
from kvlease.router.keys import read_keys
from kvlease.router.rules import InvalidRequest
from kvlease.router.split import Endpoint
from kvlease.router.turn import Prefilled

INFO = TurnInfo("acme", "c", "qwen", 3)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# --- circuit ----------------------------------------------------------------------------


def test_a_circuit_opens_after_failures_in_a_row_and_tries_once_a_pause() -> None:
    clock = Clock()
    circuit = Circuit(clock, threshold=2, pause_s=1.0)

    circuit.failed()
    assert circuit.allows()
    circuit.failed()
    assert not circuit.allows()

    clock.now += 1.0
    assert circuit.allows()
    assert not circuit.allows()  # while the trial is under way
    circuit.failed()
    clock.now += 0.5
    assert not circuit.allows()

    clock.now += 0.5
    assert circuit.allows()
    circuit.succeeded()
    assert circuit.allows()


def test_a_success_between_failures_keeps_a_circuit_closed() -> None:
    circuit = Circuit(Clock(), threshold=2, pause_s=1.0)

    for _ in range(5):
        circuit.failed()
        circuit.succeeded()
    circuit.failed()

    assert circuit.allows()


# --- handoff ----------------------------------------------------------------------------

REMOTE = {"do_remote_prefill": True, "remote_block_ids": [[1]], "newer": {"x": [1]}}


def test_the_prefill_half_asks_for_a_handoff_and_names_nothing_remote() -> None:
    params = handoff.prefill_params(INFO, reuse=False, readers=3, traceparent="tp")

    assert params["do_remote_decode"] is True
    assert all(params[f"remote_{name}"] is None for name in ("engine_id", "host", "port"))
    assert params["kvlease"] == {
        "tenant": "acme",
        "conversation_id": "c",
        "model": "qwen",
        "turn": 3,
        "reuse": False,
        "readers": 3,
        "traceparent": "tp",
    }


def test_the_decode_half_carries_the_prefill_engine_s_parameters_verbatim() -> None:
    given = handoff.from_answer({"kv_transfer_params": {**REMOTE, "kvlease": {"outcome": "hit"}}})

    params = handoff.decode_params(
        INFO, given.params, traceparent="tp", handoff_remaining_s=5.0, retain_s=600.0, end=True
    )

    ours = params.pop("kvlease")
    assert params == REMOTE
    assert ours == {
        "tenant": "acme",
        "conversation_id": "c",
        "model": "qwen",
        "turn": 3,
        "traceparent": "tp",
        "handoff_remaining_s": 5.0,
        "retain_s": 600.0,
        "end": True,
    }


def test_without_a_handoff_the_decode_engine_computes_and_may_still_grant() -> None:
    params = handoff.decode_params(
        INFO, None, traceparent="tp", handoff_remaining_s=0.0, retain_s=None, end=False
    )

    assert params["do_remote_prefill"] is False
    assert params["kvlease"]["conversation_id"] == "c"


def test_plain_vllm_counts_as_off_and_its_blocks_are_still_read() -> None:
    given = handoff.from_answer({"kv_transfer_params": REMOTE, "usage": {"prompt_tokens": 9}})

    assert (given.outcome, given.params, given.prompt_tokens) == ("off", REMOTE, 9)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": "x"},
        {"kv_transfer_params": {"do_remote_prefill": False, "kvlease": {"outcome": "off"}}},
    ],
)
def test_an_answer_without_a_handoff_leaves_nothing_to_read(answer: Any) -> None:
    assert handoff.from_answer(answer).params is None


def test_reused_tokens_count_only_with_a_hit() -> None:
    def reused(outcome: str) -> int:
        ours = {"outcome": outcome, "reused_tokens": 64, "prompt_tokens": 100}
        return handoff.from_answer(
            {"kv_transfer_params": {**REMOTE, "kvlease": ours}}
        ).reused_tokens

    assert reused("hit") == 64
    assert reused("miss_engine") == 0


def costs(**ours: Any) -> handoff.Costs:
    return handoff.from_answer({"kv_transfer_params": {**REMOTE, "kvlease": ours}}).costs


def test_what_a_turn_cost_and_was_expected_to_cost_is_read() -> None:
    known = {"pull_s": 0.02, "pull_bytes": 9000, "pull_source": "decode-0", "prefill_s": 1}
    assert costs(outcome="hit", **known) == handoff.Costs(
        pull_s=0.02, pull_bytes=9000, pull_source="decode-0", prefill_s=1.0
    )
    assert costs(predicted_pull_s=0.5).attributes() == {"kvlease.predicted_pull_s": 0.5}


@pytest.mark.parametrize("wrong", [None, "x", -1, 0, [1]])
def test_costs_that_are_no_numbers_are_not_known(wrong: Any) -> None:
    assert costs(pull_s=wrong, pull_bytes=wrong, predicted_pull_s=wrong) == handoff.Costs()


@pytest.mark.parametrize("ours", [{"outcome": "new_word"}, {"outcome": None}, {"outcome": ["a"]}])
def test_an_outcome_that_is_no_word_of_ours_counts_as_off(ours: dict[str, Any]) -> None:
    answer = {"kv_transfer_params": {**REMOTE, "kvlease": ours}}

    assert handoff.from_answer(answer).outcome == "off"


def test_a_handoff_is_over_when_its_blocks_may_have_been_freed() -> None:
    def prefilled(ttl_s: float, age_s: float, params: Any = REMOTE) -> Prefilled:
        return Prefilled(Handoff("off", params, ttl_s=ttl_s), "id", time.monotonic() - age_s)

    assert not prefilled(60, 1).is_over
    assert 58 < prefilled(60, 1).remaining_s <= 59
    assert prefilled(60, 61).is_over
    assert not prefilled(60, 61, None).is_over  # there was nothing to read
    assert not prefilled(0, 61).is_over  # plain vLLM does not say


# --- reading a request ------------------------------------------------------------------


def ask(body: object, **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_ask(Endpoint.CHAT, raw, headers, "acme")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe\xfd", b"[1]", b'"x"', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused_in_words(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"request body"):
        ask(raw)


def test_a_key_that_is_given_twice_or_escaped_hides_nothing() -> None:
    raw = (
        rb'{"messages":[],"kv_transfer_params":1,"\u006bv_transfer_params":{"remote_host":"evil"}}'
    )

    assert b"evil" not in to_json(ask(raw).split.decode)


def test_the_request_id_comes_from_the_header_else_from_the_body_else_is_new() -> None:
    assert ask({"request_id": "b"}, **{"X-Request-Id": "h"}).request_id == "h"
    assert ask({"request_id": "b"}).request_id == "b"
    assert len(ask({"request_id": "b\n"}).request_id) == 32


def test_headers_of_ours_are_read() -> None:
    headers = {"x-kvlease-reuse": "off", "x-kvlease-retain": "600", "x-kvlease-end": "true"}

    given = ask({"messages": []}, **headers)

    assert (given.reuse, given.retain_s, given.end) == (False, 600.0, True)


@pytest.mark.parametrize("text", ["grüße 你好", "\ud800 alone", "\x00", "a\u2028b"])
def test_text_reaches_the_engines_as_it_was_sent(text: str) -> None:
    assert json.loads(to_json({"text": text, "number": 0.1, "big": 2**63})) == {
        "text": text,
        "number": 0.1,
        "big": 2**63,
    }


# --- errors and keys --------------------------------------------------------------------


def test_an_error_has_the_shape_that_openai_s_clients_know() -> None:
    error = HttpError(400, "Say less.", "too_long", param="messages")

    assert json.loads(error.body()) == {
        "error": {
            "message": "Say less.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "too_long",
        }
    }
    assert error.event() == b"data: " + error.body() + b"\n\n"


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    assert "Known models: a, b." in unknown_model("x", ["a", "b"]).message


def test_api_keys_are_read_from_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"sk-1": "acme"}')

    assert read_keys(str(path)) == {"sk-1": "acme"}
    assert read_keys("") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": 1}', '{"a": ""}', '{"": "a"}'])
def test_a_file_of_api_keys_that_cannot_be_used_is_a_configuration_error(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match="api_keys_file"):
        read_keys(str(path))


def test_a_missing_file_of_api_keys_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none.json"))


# --- what an engine says is wrong -------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error": {"message": "m", "type": "BadRequestError", "param": "max_tokens"}}',
            "status 400, BadRequestError, param max_tokens",
        ),
        (
            b'{"object": "error", "message": "m", "type": "NotFoundError", "code": "gone"}',
            "status 400, NotFoundError, code gone",
        ),
        (
            b'{"error": {"type": "a prompt", "param": "it\'s", "code": "to be, or", "x": "y"}}',
            "status 400",
        ),
        (b'{"error": {"type": ["a"], "param": {"a": 1}, "code": 400}}', "status 400"),
        (b'{"error": "a prompt"}', "status 400"),
        (b'["a prompt"]', "status 400"),
        (b'{"error": {"type": "BadReq', "status 400"),
        (b"[" * 100_000, "status 400"),
        (b"\xff", "status 400"),
        (b"", "status 400"),
    ],
)
def test_of_an_engine_s_error_only_words_for_programs_are_told(body: bytes, said: str) -> None:
    assert refusal(400, body) == said
