"""A decode engine's connector without the engine: real sessions, grants, watches and
revocations over gRPC. Only vLLM's block pool is a fake, and the HTTP server that says that
the engine is healthy."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvlease import prefix
from kvlease.config import Settings
from kvlease.v1 import common_pb2, registry_pb2
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.control import ControlPlane
from kvlease_connector.decode import DecodeSide
from kvlease_connector.grants import Finished
from kvlease_connector.options import Options
from kvlease_connector.retention import Phase

BLOCK = 4
CHUNK = 8
SEED = prefix.seed_for("acme", "qwen", "", "", "")


@dataclass(eq=False)
class FakeBlock:
    """As vLLM's ``KVCacheBlock``, as far as it is used."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


@dataclass
class _Blocks:
    blocks: tuple[list[FakeBlock], ...]


class FakeManager:
    """As vLLM's ``KVCacheManager`` and its ``BlockPool``, without a prefix cache."""

    def __init__(self, total: int) -> None:
        self.num_gpu_blocks = total + 1
        self.all = [FakeBlock(index) for index in range(total)]
        self.requests: dict[str, list[FakeBlock]] = {}

    @property
    def block_pool(self) -> FakeManager:
        return self

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.all)

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            assert block.ref_cnt > 0, "freed twice"
            block.ref_cnt -= 1

    def get_blocks(self, request_id: str) -> _Blocks:
        return _Blocks((self.requests[request_id],))

    def allocate(
        self, request_id: str, count: int, shared: Sequence[FakeBlock] = ()
    ) -> list[FakeBlock] | None:
        """A request's blocks, ``shared`` ones (from the prefix cache) first; None if they
        are not free."""
        free = [block for block in self.all if block.ref_cnt == 0 and block not in shared]
        if count - len(shared) > len(free):
            return None
        blocks = [*shared, *free[: count - len(shared)]]
        self.touch(blocks)
        self.requests[request_id] = blocks
        return blocks

    def free(self, request_id: str) -> None:
        self.free_blocks(self.requests.pop(request_id))


@dataclass
class DecodeEngine:
    """``await start()`` it; what vLLM's scheduler would do is done by the test."""

    settings: Settings
    total_blocks: int = 100
    pool: FakeManager = field(init=False)
    served: list[str] = field(default_factory=lambda: ["qwen"])
    """What its HTTP server lists as models."""
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.pool = FakeManager(self.total_blocks)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", _healthy)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.engine = registry_pb2.Engine(
            engine_id="decode-0",
            role=registry_pb2.ENGINE_ROLE_DECODE,
            incarnation=uuid.uuid4().hex,
            model="qwen",
            http_address=f"http://127.0.0.1:{port}",
            side_channel_host="127.0.0.1",
            side_channel_port=5600,
            block_size=BLOCK,
            kv_bytes_per_token=4096,
            compatibility_hash="hash",
        )
        options = Options(self.settings, "decode-0", self.engine.incarnation)
        self.control = ControlPlane(
            self.engine,
            options,
            BlockHolder(self.pool),  # type: ignore[arg-type]
            chunk_tokens=CHUNK,
            usage=lambda: self.side.usage(),
        )

    @property
    def side(self) -> DecodeSide:
        assert self.control.decode is not None
        return self.control.decode

    @property
    def usage(self) -> registry_pb2.BlockUsage:
        return self.side.usage()

    @property
    def free(self) -> int:
        """Free blocks of the pool, after a step."""
        self.step()
        return self.pool.get_num_free_blocks()

    @property
    def has_session(self) -> bool:
        session = self.side._session
        return session is not None and session.is_fresh

    @property
    def phases(self) -> dict[str, Phase]:
        """Its leases as it knows them, by conversation."""
        entries = self.side._table.entries.values()
        return {entry.conversation.conversation_id: entry.lease.phase for entry in entries}

    async def _models(self, _: web.Request) -> web.Response:
        models = [{"id": name, "object": "model"} for name in self.served]
        return web.json_response({"object": "list", "data": models})

    async def stop(self) -> None:
        await asyncio.to_thread(self.control.stop)
        await self._runner.cleanup()

    def turn(
        self, name: str, num_tokens: int = 40, *, number: int = 0, **fields: Any
    ) -> list[FakeBlock]:
        """A whole turn: admitted, computed, finished, freed. Returns its blocks."""
        request_id = f"request-{next(self.ids)}"
        shared = fields.pop("shared", ())
        blocks = self.pool.allocate(request_id, -(-num_tokens // BLOCK), shared)
        assert blocks is not None, "the pool is full"
        self.finish(request_id, name, num_tokens, number=number, **fields)
        return blocks

    def finish(
        self, request_id: str, name: str, num_tokens: int, *, number: int = 0, **fields: Any
    ) -> None:
        """vLLM's end of a request that has its blocks."""
        turn = Finished(
            conversation=common_pb2.Conversation(tenant="acme", model="qwen", conversation_id=name),
            turn=number,
            token_ids=list(range(num_tokens)),
            seed=SEED,
            transfer_params_json='{"remote_block_ids": [[1, 2]]}',
            traceparent="",
            **{"retention_s": self.settings.retention_ttl, **fields},
        )
        self.side.finished(request_id, turn, [-(-num_tokens // BLOCK)])
        self.pool.free(request_id)

    def step(self) -> None:
        """A step of the scheduler: its hooks."""
        self.side.drain()
        self.side.keep_reserve()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()
