"""Run by a test in a process of its own (importing vLLM takes seconds and changes much):
splits many requests and has vLLM's own models read both halves. Prints a JSON report."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

from kvlease.router import handoff
from kvlease.router.split import Endpoint, split

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

VALUES: dict[str, list[Any]] = {
    "stream": [True, False, None],
    "stream_options": [{"include_usage": True}],
    "stream_interval": [3],
    "max_tokens": [1, 50, None],
    "max_completion_tokens": [20, None],
    "min_tokens": [0, 5],
    "stop": ["x", ["a", "b"], None],
    "stop_token_ids": [[1]],
    "ignore_eos": [True],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 3}],
    "logprobs": [True],
    "top_logprobs": [3],
    "logprob_token_ids": [[1, 2]],
    "return_token_ids": [True],
    "temperature": [0, 0.7, None],
    "top_p": [0.5],
    "top_k": [5],
    "seed": [3, None],
    "n": [1, 3, None],
    "use_beam_search": [False],
    "length_penalty": [1.5],
    "presence_penalty": [1.0],
    "logit_bias": [{"5": 1}],
    "bad_words": [["a"]],
    "allowed_token_ids": [[1, 2]],
    "tools": [TOOLS],
    "tool_choice": ["auto", "required", "none", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False],
    "response_format": [{"type": "json_object"}, {"type": "text"}],
    "structured_outputs": [{"regex": "a+"}],
    "thinking_token_budget": [10],
    "reasoning_effort": ["low"],
    "include_reasoning": [False],
    "chat_template_kwargs": [{"a": 1}],
    "truncate_prompt_tokens": [10],
    "truncation_side": ["left"],
    "cache_salt": ["s"],
    "priority": [0],
    "session_id": ["s"],
    "request_id": ["evil"],
    "vllm_xargs": [{"a": 1, "kv_transfer_params": "evil", "ec_transfer_params": ["evil"]}],
    "kv_transfer_params": [{"remote_host": "evil"}],
    "ec_transfer_params": [{"remote_host": "evil"}],
}


def read(body: dict[str, Any], endpoint: Endpoint) -> Any:
    """vLLM's sampling parameters for a body. Raises what vLLM raises."""
    if endpoint is Endpoint.CHAT:
        chat = ChatCompletionRequest.model_validate_json(json.dumps(body))
        limit = chat.max_completion_tokens
        limit = chat.max_tokens if limit is None else limit
        return chat.to_sampling_params(100 if limit is None else limit, {})
    request = CompletionRequest.model_validate_json(json.dumps(body))
    return request.to_sampling_params(request.max_tokens or 0, {})


def refusal(body: dict[str, Any], endpoint: Endpoint) -> str:
    try:
        read(body, endpoint)
    except (ValueError, VLLMValidationError) as error:
        return str(error)
    return ""


def main(count: int) -> None:
    chance = random.Random(0)
    info = handoff.TurnInfo("t", "c", "m", 1)
    params = handoff.prefill_params(info, reuse=True, readers=1, traceparent="tp")
    report: dict[str, Any] = {"served": 0, "refused": 0, "broken": [], "leaks": [], "wrong": []}
    for _ in range(count):
        endpoint = chance.choice(list(Endpoint))
        body: dict[str, Any] = {"model": "m"}
        if endpoint is Endpoint.CHAT:
            body["messages"] = [{"role": "user", "content": "hi"}]
        else:
            body["prompt"] = chance.choice(["x", [1, 2], ["x"]])
        for name in chance.sample(list(VALUES), chance.randint(0, 14)):
            body[name] = chance.choice(VALUES[name])
        if endpoint is Endpoint.COMPLETION and "logprobs" in body:
            body["logprobs"] = 2
        halves = split(endpoint, body)
        assert halves.prefill is not None
        if refusal(halves.decode, endpoint):
            report["refused"] += 1
            continue
        report["served"] += 1
        prefill = {**halves.prefill, "kv_transfer_params": params}
        why = refusal(prefill, endpoint)
        if why:
            report["broken"].append([body, why])
            continue
        sampling = read(prefill, endpoint)
        if (sampling.max_tokens, sampling.n, sampling.ignore_eos) != (1, 1, True):
            report["wrong"].append(body)
        decoded = read(halves.decode, endpoint)
        if "evil" in f"{sampling.extra_args} {decoded.extra_args} {prefill} {halves.decode}":
            report["leaks"].append(body)
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
