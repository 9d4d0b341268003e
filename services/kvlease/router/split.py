"""One table: how a client's request becomes its prefill half and its decode half.

The *decode half* is what the client sent; an absent limit stays absent. The *prefill
half* computes the same prompt and one token that is thrown away. So what shapes the
prompt's tokens must stay in it, and what only shapes the answer must not: a field that
stays where it makes no sense could fail the prefill of a request whose decode is fine
(``min_tokens`` above one token), or cost time for nothing (a grammar, log
probabilities). A field that is not in the table stays: a new one may shape the prompt,
and blocks of another prompt would be worse than a refused request.

Some requests cannot be split at all. They go to a decode engine as they are and compute
their prompt there (outcome ``miss_unsupported``).

Fields and their meaning: vLLM 0.32, ``entrypoints/openai/chat_completion/protocol.py``
and ``entrypoints/openai/completion/protocol.py``. A test compares the table with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

Body = dict[str, Any]


class Endpoint(Enum):
    """The two kinds of turns, by their path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class _To:
    """The prefill half has this value, whatever the client sent."""

    value: object


class _Only(Enum):
    KEEP = "stays in the prefill half"
    DROP = "is left out of the prefill half"
    NEVER = "reaches no engine: not the client's to say"


KEEP, DROP, NEVER = _Only.KEEP, _Only.DROP, _Only.NEVER

_Rule = _Only | _To


@dataclass(frozen=True, slots=True)
class _Unless:
    """The request goes to a decode engine unsplit if ``found(value, body)``."""

    found: Callable[[Any, Mapping[str, Any]], bool]
    why: str


def _several_prompts(prompt: object, _: Mapping[str, Any]) -> bool:
    """Anything but one text, one list of token ids, or a list that holds just one."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, list):
        return True
    if prompt and all(isinstance(token, int) for token in prompt):
        return False
    return len(prompt) != 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Values are compared loosely on purpose: vLLM reads "2" as 2, and a request that is sent
# unsplit without need is only slower.
_DIRECT: Mapping[str, _Unless] = {
    "prompt": _Unless(_several_prompts, "several prompts share one set of transfer parameters"),
    "prompt_embeds": _Unless(
        lambda value, _: value not in (None, []), "a prompt of embeddings has no token ids to prove"
    ),
    "n": _Unless(
        lambda value, _: value is not None and not _is_count(value),
        "the number of answers is not a plain positive number",
    ),
    "best_of": _Unless(
        lambda value, _: value not in (None, 1), "several answers would read the same blocks"
    ),
    "use_beam_search": _Unless(
        lambda value, _: value not in (None, False), "beam search takes no transfer parameters"
    ),
    # Log probabilities of the prompt need every prompt position computed where they are
    # asked for; vLLM skips its caches for them, and 0 asks for them too.
    "prompt_logprobs": _Unless(
        lambda value, _: value is not None, "prompt log probabilities need the prompt computed"
    ),
    # Chat: echo takes top_logprobs (0 by default) as prompt_logprobs. Completions: only
    # together with logprobs.
    "echo": _Unless(
        lambda value, body: (
            value not in (None, False)
            and ("messages" in body or body.get("logprobs") is not None)
        ),
        "prompt log probabilities need the prompt computed",
    ),
    # -1 cuts the prompt to what the token limit leaves, and the halves' limits differ.
    "truncate_prompt_tokens": _Unless(
        lambda value, _: value is not None and not (isinstance(value, int) and value >= 0),
        "the prompt's length depends on the token limit",
    ),
}  # fmt: skip

# What the prefill half does with a field: the same for both endpoints, or (chat,
# completion). A value that _DIRECT catches never gets here.
_TABLE: Mapping[str, _Rule | tuple[_Rule, _Rule]] = {
    # The prompt, and what shapes its tokens or their KV
    "model": KEEP,  # a LoRA adapter is named as a model
    "messages": KEEP,
    "prompt": KEEP,
    "suffix": KEEP,
    "prompt_embeds": DROP,
    "tools": KEEP,
    "tool_choice": KEEP,  # some templates show it; vLLM parses a cut tool call without failing
    "parallel_tool_calls": KEEP,
    "response_format": (KEEP, DROP),  # some chat templates show it
    "reasoning_effort": KEEP,
    "documents": KEEP,
    "chat_template": KEEP,
    "chat_template_kwargs": KEEP,
    "add_generation_prompt": KEEP,
    "continue_final_message": KEEP,
    "add_special_tokens": KEEP,
    "truncate_prompt_tokens": KEEP,
    "truncation_side": KEEP,
    "media_io_kwargs": KEEP,
    "mm_processor_kwargs": KEEP,
    "cache_salt": KEEP,
    # How the engine treats the request
    "priority": KEEP,
    "session_id": KEEP,
    "user": KEEP,
    "vllm_xargs": KEEP,  # without what NEVER_IN_XARGS names
    # One token, then stop. The prefill engine hands blocks over only for a request that
    # has ended by its limit or a stop token; nothing may end it otherwise.
    "max_tokens": _To(1),
    "max_completion_tokens": (_To(1), DROP),
    "ignore_eos": _To(True),
    "temperature": _To(0),
    "min_tokens": DROP,
    "stop": DROP,
    "stop_token_ids": DROP,
    "include_stop_str_in_output": DROP,
    "repetition_detection": DROP,
    # The token is thrown away: nothing shapes it
    "n": DROP,
    "best_of": DROP,
    "use_beam_search": DROP,
    "length_penalty": DROP,
    "frequency_penalty": DROP,
    "presence_penalty": DROP,
    "repetition_penalty": DROP,
    "logit_bias": DROP,
    "seed": DROP,
    "top_p": DROP,
    "top_k": DROP,
    "min_p": DROP,
    "watermarking": DROP,
    "allowed_token_ids": DROP,
    "bad_words": DROP,
    "structured_outputs": DROP,
    "thinking_token_budget": DROP,
    "include_reasoning": DROP,
    # Nobody reads the answer: nothing describes it
    "stream": _To(False),
    "stream_options": DROP,
    "stream_interval": DROP,
    "logprobs": DROP,
    "top_logprobs": DROP,
    "logprob_token_ids": DROP,
    "prompt_logprobs": DROP,
    "echo": DROP,
    "skip_special_tokens": DROP,
    "spaces_between_special_tokens": DROP,
    "return_tokens_as_token_ids": DROP,
    "return_token_ids": DROP,
    "return_token_offsets": DROP,
    "return_prompt_text": DROP,
    "routed_experts_prompt_start": DROP,
    "mm_payload": DROP,
    "return_mm_kwargs": DROP,
    # Not the client's to say. Transfer parameters name the host that an engine reads
    # from; request ids are set by header, for both halves alike.
    "kv_transfer_params": NEVER,
    "ec_transfer_params": NEVER,
    "request_id": NEVER,
    # kvlease's own
    "conversation_id": NEVER,
}

NEVER_IN_XARGS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""vLLM copies ``vllm_xargs`` into the same dictionary as the transfer parameters
(``to_sampling_params``), so they could be set there too."""

FIELDS = frozenset(_TABLE) | frozenset(_DIRECT)
"""Every field that the table decides about."""


@dataclass(frozen=True, slots=True)
class Split:
    """Both halves, still without ``kv_transfer_params``.

    ``prefill`` is None where the request cannot be split, for the reason ``unsplit``.
    ``one_answer`` says that the request has one prompt and one answer, so that its end
    can be granted even if it was not split. ``readers``: how often the decode engine
    reads the prompt's blocks, once for each of ``n`` answers.
    """

    prefill: Body | None
    decode: Body
    unsplit: str = ""
    one_answer: bool = True
    readers: int = 1


def split(endpoint: Endpoint, body: Mapping[str, Any]) -> Split:
    """Both halves of a client's request. ``body`` is not changed."""
    decode = {name: value for name, value in body.items() if _rule(endpoint, name) is not NEVER}
    xargs = decode.get("vllm_xargs")
    if isinstance(xargs, dict):
        decode["vllm_xargs"] = {
            name: value for name, value in xargs.items() if name not in NEVER_IN_XARGS
        }
    caught = [name for name, unless in _DIRECT.items() if _is_caught(unless, name, decode)]
    if caught:
        several = {"prompt", "n", "best_of", "use_beam_search"}.intersection(caught)
        return Split(None, decode, unsplit=_DIRECT[caught[0]].why, one_answer=not several)
    return Split(_prefill_half(endpoint, decode), decode, readers=decode.get("n") or 1)


def _is_caught(unless: _Unless, name: str, body: Body) -> bool:
    return name in body and unless.found(body[name], body)


def _prefill_half(endpoint: Endpoint, decode: Body) -> Body:
    half = {name: value for name, value in decode.items() if _rule(endpoint, name) is KEEP}
    for name in _TABLE:
        rule = _rule(endpoint, name)
        if isinstance(rule, _To):
            half[name] = rule.value
    return half


def _rule(endpoint: Endpoint, name: str) -> _Rule:
    rule = _TABLE.get(name, KEEP)
    if isinstance(rule, tuple):
        chat, completion = rule
        return chat if endpoint is Endpoint.CHAT else completion
    return rule
