"""By which names clients may ask an engine for turns: its own HTTP server knows."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request

import structlog

from kvlease import direct
from kvlease.v1 import registry_pb2

log = structlog.get_logger("kvlease.connector")

TIMEOUT_S = 5.0


async def other_models(engine: registry_pb2.Engine) -> list[str]:
    """LoRA adapters that are loaded, and further served names; none if that cannot be
    learnt, which is logged. vLLM lists them in ``/v1/models`` (OpenAIServingModels)."""
    try:
        names = await asyncio.to_thread(_names, engine.http_address)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the engine's LoRA adapters are not known, and not routed", error=str(error))
        return []
    return [name for name in names if name != engine.model]


def _names(http_address: str) -> list[str]:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{http_address}/v1/models", headers=headers)
    with direct.opener().open(request, timeout=TIMEOUT_S) as answer:
        return [str(model["id"]) for model in json.load(answer)["data"]]
