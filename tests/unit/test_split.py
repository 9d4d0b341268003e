"""The two halves of a request."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from required import unavailable
from sim_engine import vllm_objects_to

from kvlease.router.split import FIELDS, Endpoint, split

CHAT, COMPLETION = Endpoint.CHAT, Endpoint.COMPLETION

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hello", **fields}


def prefill(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    half = split(endpoint, body).prefill
    assert half is not None
    return half


@pytest.mark.parametrize(("endpoint", "body"), [(CHAT, chat()), (COMPLETION, completion())])
def test_the_prefill_half_has_one_token_and_no_streaming(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    half = prefill(endpoint, {**body, "stream": True, "max_tokens": 500})

    assert half["max_tokens"] == 1
    assert half["stream"] is False
    assert half["ignore_eos"] is True


def test_the_prefill_half_of_a_chat_limits_both_token_fields() -> None:
    half = prefill(CHAT, chat(max_completion_tokens=500))

    assert (half["max_tokens"], half["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in prefill(COMPLETION, completion())


def test_the_decode_half_is_what_the_client_sent_and_an_absent_limit_stays_absent() -> None:
    body = chat(stream=True, stream_options={"include_usage": True}, stop=["x"], service_tier="a")

    assert split(CHAT, body).decode == body


def test_the_client_s_body_is_not_changed() -> None:
    body = chat(kv_transfer_params={"a": 1}, vllm_xargs={"kv_transfer_params": "x", "b": 1})
    before = {**body, "vllm_xargs": dict(body["vllm_xargs"])}

    split(CHAT, body)

    assert body == before


ANSWER_FIELDS: dict[str, Any] = {
    "min_tokens": 10,
    "stop": ["END"],
    "stop_token_ids": [7],
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 5,
    "logprob_token_ids": [1, 2],
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 100,
    "repetition_detection": {"max_pattern_size": 3},
    "n": 1,
    "seed": 3,
    "logit_bias": {"5": 1.0},
    "bad_words": ["no"],
    "allowed_token_ids": [1],
    "return_token_ids": True,
    "stream_interval": 4,
}


def test_no_field_that_only_shapes_the_answer_reaches_the_prefill_half() -> None:
    half = prefill(CHAT, chat(stream=True, **ANSWER_FIELDS))

    assert not set(ANSWER_FIELDS) & set(half)


PROMPT_FIELDS: dict[str, Any] = {
    "tools": TOOLS,
    "tool_choice": "required",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "documents": [{"title": "t", "text": "x"}],
    "truncate_prompt_tokens": 100,
    "truncation_side": "left",
    "mm_processor_kwargs": {"a": 1},
    "cache_salt": "s",
    "reasoning_effort": "low",
    "add_special_tokens": True,
    "response_format": {"type": "json_object"},
    "priority": 3,
}


def test_every_field_that_may_shape_the_prompt_reaches_both_halves() -> None:
    both = split(CHAT, chat(**PROMPT_FIELDS))

    assert both.prefill is not None
    assert PROMPT_FIELDS.items() <= both.prefill.items()
    assert PROMPT_FIELDS.items() <= both.decode.items()


def test_a_field_nobody_knows_reaches_both_halves_because_it_may_shape_the_prompt() -> None:
    both = split(CHAT, chat(a_field_of_a_newer_vllm=5))

    assert both.prefill is not None
    assert both.prefill["a_field_of_a_newer_vllm"] == 5
    assert both.decode["a_field_of_a_newer_vllm"] == 5


def test_a_completion_s_response_format_shapes_only_its_answer() -> None:
    body = completion(response_format={"type": "json_object"})

    assert "response_format" not in prefill(COMPLETION, body)


@pytest.mark.parametrize("choice", ["auto", "required", "none", {"function": {"name": "look"}}])
def test_a_tool_choice_keeps_its_tools_in_the_prefill_half(choice: Any) -> None:
    half = prefill(CHAT, chat(tools=TOOLS, tool_choice=choice, min_tokens=5))

    assert vllm_objects_to(half, chat=True) == ""
    assert half["tool_choice"] == choice


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "min_tokens": st.integers(0, 50),
            "max_tokens": st.integers(50, 100),
            "max_completion_tokens": st.integers(50, 100),
            "stream": st.booleans(),
            "logprobs": st.just(True),
            "temperature": st.sampled_from([0, 1.0]),
            "seed": st.integers(0, 5),
        },
    )
)
def test_vllm_takes_the_prefill_half_of_every_request_it_takes(fields: dict[str, Any]) -> None:
    body = chat(**fields)
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if body.get("logprobs"):
        body |= {"top_logprobs": 2, "logprob_token_ids": [1]}
    assert vllm_objects_to(body, chat=True) == ""

    assert vllm_objects_to(prefill(CHAT, body), chat=True) == ""


# --- what cannot be split ---------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2, 3]]])
def test_a_single_prompt_can_be_split(prompt: Any) -> None:
    assert prefill(COMPLETION, completion(prompt=prompt))["prompt"] == prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [3]]},
        {"n": "2"},
        {"n": True},
        {"best_of": 3},
        {"use_beam_search": True},
        {"use_beam_search": "true"},
    ],
)
def test_several_prompts_or_answers_are_not_split_and_not_granted(fields: dict[str, Any]) -> None:
    result = split(COMPLETION, completion(**fields))

    assert result.prefill is None
    assert result.unsplit
    assert not result.one_answer


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 5},
        {"echo": True, "logprobs": 1},
        {"prompt_embeds": "AAAA"},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": "-1"},
    ],
)
def test_a_request_whose_prompt_must_be_computed_by_the_decode_engine_is_not_split(
    fields: dict[str, Any],
) -> None:
    result = split(COMPLETION, completion(**fields))

    assert result.prefill is None
    assert result.one_answer


def test_a_chat_that_echoes_asks_for_prompt_log_probabilities_too() -> None:
    assert split(CHAT, chat(echo=True)).prefill is None
    assert split(COMPLETION, completion(echo=True)).prefill is not None


@pytest.mark.parametrize(("n", "readers"), [(None, 1), (1, 1), (3, 3)])
def test_several_answers_share_one_prefill(n: int | None, readers: int) -> None:
    result = split(CHAT, chat(n=n))

    assert result.prefill is not None
    assert "n" not in result.prefill
    assert result.decode["n"] == n
    assert result.readers == readers


def test_null_means_absent() -> None:
    body = completion(n=None, prompt_logprobs=None, echo=None, truncate_prompt_tokens=None)

    assert split(COMPLETION, body).prefill is not None


# --- what is not the client's to say ----------------------------------------------------


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "request_id"])
@pytest.mark.parametrize("more", [{}, {"n": 2}])
def test_a_client_s_transfer_parameters_and_request_id_reach_no_engine(
    name: str, more: dict[str, Any]
) -> None:
    result = split(CHAT, chat(**{name: {"remote_host": "evil"}}, **more))

    assert name not in result.decode
    assert name not in (result.prefill or {})


@pytest.mark.parametrize("value", ["text", ["list"], {"remote_host": "evil"}, 5])
def test_transfer_parameters_in_vllm_xargs_reach_no_engine(value: Any) -> None:
    xargs = {"kv_transfer_params": value, "ec_transfer_params": value, "mine": 1}

    result = split(CHAT, chat(vllm_xargs=xargs))

    assert result.decode["vllm_xargs"] == {"mine": 1}
    assert result.prefill is not None
    assert result.prefill["vllm_xargs"] == {"mine": 1}


def test_a_tool_s_parameter_of_that_name_is_the_client_s_own() -> None:
    tools = [{"function": {"name": "f", "parameters": {"kv_transfer_params": {}}}}]

    assert prefill(CHAT, chat(tools=tools))["tools"] == tools


def test_kvlease_s_own_fields_reach_no_engine() -> None:
    result = split(CHAT, chat(conversation_id="c", prompt_cache_key="k"))

    assert "conversation_id" not in result.decode
    assert result.decode["prompt_cache_key"] == "k"  # OpenAI's; vLLM ignores it


# --- the table against vLLM's sources ---------------------------------------------------


def _vllm_fields(module: str, name: str) -> set[str]:
    """The request model's fields, from its source: importing vLLM takes seconds."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        unavailable("vLLM is not installed")
    path = Path(found.origin).parent / "entrypoints/openai" / module / "protocol.py"
    tree = ast.parse(path.read_text())
    model = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        node.target.id
        for node in model.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")],
)
def test_the_table_decides_about_every_field_of_vllm_s_request(module: str, name: str) -> None:
    fields = _vllm_fields(module, name)

    assert len(fields) > 50
    assert fields - FIELDS == set()


def test_vllm_itself_takes_the_prefill_half_of_every_request_it_takes() -> None:
    if importlib.util.find_spec("vllm") is None:
        unavailable("vLLM is not installed")
    script = Path(__file__).parents[1] / "split_against_vllm.py"

    done = subprocess.run(
        [sys.executable, str(script), "3000"], capture_output=True, text=True, timeout=150
    )

    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["broken"] == report["wrong"] == report["leaks"] == []
    assert report["served"] > 1000
    assert report["refused"] > 100
