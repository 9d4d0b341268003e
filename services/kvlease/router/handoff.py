"""What router and connector tell each other inside ``kv_transfer_params``.

Transfer parameters of vLLM itself (``remote_*`` and whatever a newer version adds)
travel through unread. Ours are under the key ``kvlease``; vLLM passes unknown keys
through in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlease import outcomes
from kvlease.v1 import common_pb2

KEY = "kvlease"


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """What both engines learn about a turn. ``conversation_id`` empty: it has none, so
    nothing is claimed or granted. ``turn`` 0: the lease service could not be asked."""

    tenant: str
    conversation_id: str
    model: str
    turn: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What a prefill engine expected of a turn, and what came of it: seconds and bytes. A
    value is None where the engine does not say."""

    claim_s: float | None = None
    """To the answer of the lease service, and that of the holder where it was asked."""
    predicted_pull_s: float | None = None
    """Of the decision whether to pull: both predictions are for the same tokens."""
    predicted_compute_s: float | None = None
    pull_s: float | None = None
    """None: nothing was pulled."""
    pull_bytes: int = 0
    pull_source: str = ""
    """The decode engine's id."""
    prefill_s: float | None = None
    """Of the engine's steps, for the part of the prompt that it computed."""
    predicted_prefill_s: float | None = None

    def attributes(self) -> dict[str, float]:
        """For a span: what is known, under our names."""
        values = {
            "kvlease.claim_s": self.claim_s,
            "kvlease.predicted_pull_s": self.predicted_pull_s,
            "kvlease.predicted_compute_s": self.predicted_compute_s,
            "kvlease.pull_s": self.pull_s,
            "kvlease.prefill_s": self.prefill_s,
            "kvlease.predicted_prefill_s": self.predicted_prefill_s,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill engine answered. ``params`` None: there is nothing to read from it,
    and the decode engine computes the prompt. ``ttl_s``: how long it keeps the prompt's
    blocks, from its answer on."""

    outcome: str
    params: Mapping[str, Any] | None = None
    reused_tokens: int = 0
    prompt_tokens: int = 0
    detail: str = ""
    ttl_s: float = 0.0
    lease_traceparent: str = ""
    costs: Costs = Costs()


MISS_ENGINE = outcomes.word(common_pb2.OUTCOME_MISS_ENGINE)
MISS_UNSUPPORTED = outcomes.word(common_pb2.OUTCOME_MISS_UNSUPPORTED)
OFF = outcomes.word(common_pb2.OUTCOME_OFF)
HIT = outcomes.word(common_pb2.OUTCOME_HIT)


def prefill_params(
    info: TurnInfo, *, reuse: bool, readers: int, traceparent: str
) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill half: compute, and keep for a decode engine that
    reads ``readers`` times."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        KEY: {
            "tenant": info.tenant,
            "conversation_id": info.conversation_id,
            "model": info.model,
            "turn": info.turn,
            "reuse": reuse,
            "readers": readers,
            "traceparent": traceparent,
        },
    }


def decode_params(
    info: TurnInfo,
    params: Mapping[str, Any] | None,
    *,
    traceparent: str,
    handoff_remaining_s: float,
    retain_s: float | None,
    end: bool,
) -> dict[str, Any]:
    """``kv_transfer_params`` of a decode half: the prefill engine's, verbatim, and ours.

    With ``params`` None the decode engine computes the prompt, and may still grant.
    ``handoff_remaining_s``: how long the prefill engine still keeps the prompt's blocks.
    ``retain_s``: how long the client wants the blocks kept (None: the configured time).
    ``end``: the client will not come back.
    """
    upstream = params if params is not None else _NOTHING_REMOTE
    return {
        **upstream,
        KEY: {
            "tenant": info.tenant,
            "conversation_id": info.conversation_id,
            "model": info.model,
            "turn": info.turn,
            "traceparent": traceparent,
            "handoff_remaining_s": handoff_remaining_s,
            "retain_s": retain_s,
            "end": end,
        },
    }


_NOTHING_REMOTE: Mapping[str, Any] = {"do_remote_decode": False, "do_remote_prefill": False}


def from_answer(answer: object) -> Handoff:
    """What a prefill engine's response body says. An engine that is plain vLLM, without
    our connector, says nothing of ours: outcome ``off``, and reads still work."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict):
        return Handoff(OFF, prompt_tokens=_usage(answer), detail="the engine handed nothing over")
    ours = params.get(KEY)
    upstream = {name: value for name, value in params.items() if name != KEY}
    readable = bool(upstream.get("do_remote_prefill"))
    if not isinstance(ours, dict):
        return Handoff(OFF, upstream if readable else None, prompt_tokens=_usage(answer))
    outcome = ours.get("outcome")
    hit = outcome == HIT
    return Handoff(
        outcome=outcome if outcome in outcomes.ALL_WORDS else OFF,
        params=upstream if readable else None,
        reused_tokens=_number(ours.get("reused_tokens")) if hit else 0,
        prompt_tokens=_number(ours.get("prompt_tokens")) or _usage(answer),
        detail=str(ours.get("detail") or ""),
        ttl_s=float(_number(ours.get("handoff_ttl_s"), float)),
        lease_traceparent=str(ours.get("lease_traceparent") or ""),
        costs=_costs(ours),
    )


def _costs(ours: Mapping[str, Any]) -> Costs:
    def seconds(name: str) -> float | None:
        return float(_number(ours.get(name), float)) or None

    return Costs(
        claim_s=seconds("claim_s"),
        predicted_pull_s=seconds("predicted_pull_s"),
        predicted_compute_s=seconds("predicted_compute_s"),
        pull_s=seconds("pull_s"),
        pull_bytes=_number(ours.get("pull_bytes")),
        pull_source=str(ours.get("pull_source") or ""),
        prefill_s=seconds("prefill_s"),
        predicted_prefill_s=seconds("predicted_prefill_s"),
    )


def _usage(answer: object) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return _number(usage.get("prompt_tokens")) if isinstance(usage, dict) else 0


def _number(value: object, kind: type[int] | type[float] = int) -> Any:
    return kind(value) if isinstance(value, int | float) and value > 0 else kind(0)
