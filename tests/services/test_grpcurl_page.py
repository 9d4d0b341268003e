"""docs/grpcurl.md: every command on it is run, and prints what the page says: the same
fields, the same kinds of values.

``WRITE_PAGES=1 pytest tests/services/test_grpcurl_page.py`` writes what was
printed into the page.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpcurl import grpcurl_binary, snake_case
from router_stack import Stack, running, until
from sim_engine import COMPATIBILITY, SimEngine

from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc

PAGE = Path(__file__).parent.parent.parent / "docs" / "grpcurl.md"
MODEL = "qwen3-8b"
CHAT = "/v1/chat/completions"
BLOCK = re.compile(r"```console\n\$ (grpcurl .*)\n((?:.*\n)*?)```\n")


@dataclass(frozen=True)
class Command:
    line: str
    printed: str


def commands() -> list[Command]:
    return [Command(*found.groups()) for found in BLOCK.finditer(PAGE.read_text())]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """What the page talks about: two conversations, one that has just missed and one that
    is being read."""
    async with running(session_ttl=15) as made:
        prefill = await made.add("prefill", "prefill-0", MODEL)
        decode = await made.add("decode", "decode-0", MODEL)
        for number in range(1, 4):
            prefill.report = _report(number)
            await _turn(made, "books-42")
            if number < 3:
                await _grant(made, decode, "books-42", number, 1_016 + 1_000 * (number - 1))
        prefill.report = _report(1)
        await _turn(made, "films-7")
        await _grant(made, decode, "films-7", 1, 1_016)
        await _read(made, prefill, "films-7")
        await _use(made, decode)
        await until(lambda: _recorded(made), "the turns were not recorded")
        yield made


def _report(turn: int) -> dict[str, Any]:
    prompt = 1_000 * turn
    kept = prompt - 984
    common = {"prompt_tokens": prompt, "handoff_ttl_s": 60.0, "reused_tokens": 0}
    if turn == 1:
        detail = "no turn of the conversation has been granted yet"
        return {**common, "outcome": "miss_no_lease", "detail": detail}
    if turn < 3:
        detail = f"{kept:,} of {kept:,} kept tokens are proven equal"
        return {**common, "outcome": "hit", "detail": detail, "reused_tokens": kept}
    detail = (
        f"0 of {kept:,} kept tokens are proven equal: the prompt first differs within its "
        "tokens 1 to 256"
    )
    return {**common, "outcome": "miss_prefix", "detail": detail}


async def _turn(stack: Stack, conversation_id: str) -> None:
    body = {"model": MODEL, "messages": [], "conversation_id": conversation_id}
    async with stack.client.post(stack.url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()


def _conversation(name: str) -> common_pb2.Conversation:
    return common_pb2.Conversation(tenant="default", model=MODEL, conversation_id=name)


async def _grant(stack: Stack, engine: SimEngine, name: str, turn: int, tokens: int) -> None:
    digests = bytes(range(16)) * (tokens // 256)
    request = lease_pb2.GrantRequest(
        conversation=_conversation(name),
        lease_id=f"5fcf0c30-178b-4611-a09c-{turn:012x}{len(name)}",
        turn=turn,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        session_id=engine.session_id,
        num_tokens=tokens,
        num_blocks=-(-tokens // 16),
        block_size=16,
        compatibility_hash=COMPATIBILITY,
        proof=lease_pb2.PrefixProof(
            chunk_tokens=256, chunk_digests=digests, tail_digest=bytes(range(16))
        ),
        kv_transfer_params_json='{"remote_block_ids": [[7, 8, 9]]}',
        traceparent=f"00-{turn:032x}-{1:016x}-01",
    )
    await lease_pb2_grpc.LeaseServiceStub(stack.lease_channel).Grant(request, timeout=5)


async def _read(stack: Stack, reader: SimEngine, name: str) -> None:
    request = lease_pb2.ClaimRequest(
        conversation=_conversation(name),
        ticket_id="0b0e6c2e-9a3c-4d0f-8f0a-3f4f6d8e1c55",
        reader_engine_id=reader.engine_id,
        reader_incarnation=reader.incarnation,
        compatibility_hash=COMPATIBILITY,
        proof=lease_pb2.PrefixProof(chunk_tokens=256, chunk_digests=bytes(range(16)) * 4),
        num_prompt_tokens=1_200,
        min_tokens=64,
    )
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    assert (await stub.Claim(request, timeout=5)).outcome == common_pb2.OUTCOME_HIT


async def _use(stack: Stack, engine: SimEngine) -> None:
    usage = registry_pb2.BlockUsage(
        total_blocks=4096, free_blocks=3800, retained_blocks=190, retained_leases=2
    )
    request = registry_pb2.KeepAliveRequest(
        session_id=engine.session_id,
        role=registry_pb2.ENGINE_ROLE_DECODE,
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        usage=usage,
    )
    await registry_pb2_grpc.RegistryStub(stack.registry_channel).KeepAlive(request, timeout=5)


async def _recorded(stack: Stack) -> bool:
    stub = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    answer = await stub.ListConversations(lease_pb2.ListConversationsRequest(), timeout=10)
    return sum(len(found.turns) for found in answer.conversations) == 4


def run(line: str, addresses: Mapping[str, str]) -> str:
    words = [addresses.get(word, word) for word in shlex.split(line)]
    assert not {"127.0.0.1:7401", "127.0.0.1:7402", "127.0.0.1:7403"} & set(words)
    words[0] = str(grpcurl_binary())
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    watches = "-max-time" in words and "DeadlineExceeded" in ended.stderr
    assert ended.returncode == 0 or watches, f"{line}\n{ended.stderr}"
    return ended.stdout


def shape(printed: str) -> Any:
    """The names of all fields, and the kinds of their values; other text as it is."""
    decoder = json.JSONDecoder()
    text, shapes = printed.strip(), []
    while text.startswith("{"):
        value, end = decoder.raw_decode(text)
        shapes.append(_shape(snake_case(value)))
        text = text[end:].strip()
    assert not shapes or not text, text
    return shapes or text


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shape(item) for item in value]
    return type(value).__name__


async def test_every_command_prints_what_the_page_says(stack: Stack) -> None:
    addresses = {
        "127.0.0.1:7401": stack.registry.addresses["registry"],
        "127.0.0.1:7402": stack.lease.addresses["lease"],
        "127.0.0.1:7403": stack.router.addresses["router_grpc"],
    }
    found = commands()
    assert len(found) >= 10
    printed = [await asyncio.to_thread(run, command.line, addresses) for command in found]
    if os.environ.get("WRITE_PAGES") == "1":
        _write(printed, {real: shown for shown, real in addresses.items()})
    for command, output in zip(commands(), printed, strict=True):
        assert shape(output) == shape(command.printed), command.line


def _write(printed: list[str], shown: Mapping[str, str]) -> None:
    outputs = iter(printed)

    def block(found: re.Match[str]) -> str:
        text = next(outputs).strip()
        for real, instead in shown.items():
            text = text.replace(real, instead)
        return f"```console\n$ {found[1]}\n{text}\n```\n"

    PAGE.write_text(BLOCK.sub(block, PAGE.read_text()))
