"""A simulated engine: an OpenAI-compatible server that answers as vLLM 0.32 does, keeps
what it was asked, and fails on demand.

It stands for what is not ours, an engine: it checks requests where vLLM checks them (as
far as splitting a request could break them) and keeps the contract on
``kv_transfer_params``. It computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc.aio
from aiohttp import web

from kvlease.v1 import registry_pb2, registry_pb2_grpc

Role = Literal["prefill", "decode"]

COMPATIBILITY = "sim-compatible"


@dataclass
class Status:
    """Answer with this status and body."""

    status: int
    body: Mapping[str, Any] = field(
        default_factory=lambda: {
            "error": {
                "message": "simulated",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        }
    )


@dataclass
class Hang:
    """Never answer."""


@dataclass
class Cut:
    """Break the connection off: before the head, before the first content (``chunks`` 0),
    or after so many chunks; ``inside`` an event, not after one. ``comments`` go before."""

    before_head: bool = False
    chunks: int = 0
    inside: bool = False
    comments: int = 0


@dataclass
class Slow:
    """Wait before the head, and between chunks."""

    head_s: float = 0.0
    chunk_s: float = 0.0


Fault = Status | Hang | Cut | Slow


@dataclass
class Seen:
    """One request. ``aborted``: the caller closed the connection before the end."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    done: bool = False
    aborted: bool = False

    @property
    def kv(self) -> dict[str, Any]:
        """Its transfer parameters."""
        return self.body["kv_transfer_params"]

    @property
    def told(self) -> dict[str, Any]:
        """What the router says in them."""
        return self.kv["kvlease"]


class SimEngine:
    """One engine on a free port of 127.0.0.1."""

    def __init__(self, role: Role, engine_id: str, model: str = "sim") -> None:
        self.role: Role = role
        self.engine_id = engine_id
        self.model = model
        self.incarnation = uuid.uuid4().hex
        self.seen: list[Seen] = []
        self.faults: deque[Fault] = deque()
        """For the next requests, one each."""
        self.fault: Fault | None = None
        """For all others."""
        self.text = ["Hel", "lo", " there", "!"]
        self.prompt_tokens = 100
        self.report: dict[str, Any] | None = {
            "outcome": "miss_no_lease",
            "reused_tokens": 0,
            "prompt_tokens": 100,
            "detail": "the conversation has no lease",
            "handoff_ttl_s": 60.0,
            "lease_traceparent": "",
        }
        """A prefill engine's ``kvlease`` in its answer. None: plain vLLM."""
        self.hands_over = True
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.session_id = ""
        """Of its registration."""
        self.other_models: list[str] = []

    # --- its server -------------------------------------------------------------------

    @property
    def http_address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens; again on the same port after :meth:`kill`."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/v1/completions", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """As ``kill -9``: connections break, new ones are refused, the session is not
        ended but no longer renewed."""
        await self._stop_keeper()
        if self._runner is None or self._site is None:
            return
        await self._site.stop()
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = self._site = None

    async def stop(self) -> None:
        await self.kill()

    # --- its session ------------------------------------------------------------------

    def record(self) -> registry_pb2.Engine:
        roles = {
            "prefill": registry_pb2.ENGINE_ROLE_PREFILL,
            "decode": registry_pb2.ENGINE_ROLE_DECODE,
        }
        return registry_pb2.Engine(
            engine_id=self.engine_id,
            role=roles[self.role],
            incarnation=self.incarnation,
            model=self.model,
            http_address=self.http_address,
            side_channel_host="127.0.0.1",
            side_channel_port=1,
            block_size=16,
            kv_bytes_per_token=1024,
            compatibility_hash=COMPATIBILITY,
            engine_version="0.32.0",
            other_models=self.other_models,
        )

    async def register(self, registry: grpc.aio.Channel) -> registry_pb2.Engine:
        """Registers, and keeps the session alive until :meth:`kill`."""
        stub = registry_pb2_grpc.RegistryStub(registry)
        answer: registry_pb2.RegisterResponse = await stub.Register(
            registry_pb2.RegisterRequest(engine=self.record()), timeout=5, wait_for_ready=True
        )
        self.session_id = answer.engine.session_id
        await self._stop_keeper()
        period = answer.engine.session_ttl.ToTimedelta().total_seconds() / 3
        self._keeper = asyncio.create_task(self._keep_alive(stub, period))
        return answer.engine

    async def _keep_alive(self, stub: registry_pb2_grpc.RegistryStub, period_s: float) -> None:
        record = self.record()
        while True:
            await asyncio.sleep(period_s)
            request = registry_pb2.KeepAliveRequest(
                session_id=self.session_id,
                role=record.role,
                engine_id=self.engine_id,
                incarnation=self.incarnation,
            )
            try:
                await stub.KeepAlive(request, timeout=period_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    continue
                with contextlib.suppress(grpc.aio.AioRpcError):  # the next round tries again
                    answer = await stub.Register(
                        registry_pb2.RegisterRequest(engine=record), timeout=period_s
                    )
                    self.session_id = answer.engine.session_id

    async def deregister(self, registry: grpc.aio.Channel) -> None:
        """Ends the session in order."""
        await self._stop_keeper()
        await registry_pb2_grpc.RegistryStub(registry).Deregister(
            registry_pb2.DeregisterRequest(session_id=self.session_id), timeout=5
        )

    async def _stop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None

    # --- its answers ------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, request.headers.copy(), await request.json())
        self.seen.append(seen)
        try:
            response = await self._answer(request, seen.body)
        except (asyncio.CancelledError, ConnectionError):
            seen.aborted = True
            raise
        seen.done = True
        return response

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else self.fault
        if isinstance(fault, Hang):
            await asyncio.Event().wait()
        if isinstance(fault, Status):
            return web.json_response(fault.body, status=fault.status)
        if isinstance(fault, Cut) and fault.before_head:
            return _abort(request)
        if isinstance(fault, Slow):
            await asyncio.sleep(fault.head_s)
        problem = vllm_objects_to(body, chat=_is_chat(request))
        if problem:
            error = {"message": problem, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)
        if body.get("stream"):
            return await self._stream(request, body, fault)
        if isinstance(fault, Cut):
            return await self._cut_json(request)
        if isinstance(fault, Slow):
            await asyncio.sleep(fault.chunk_s * len(self.text))
        return web.json_response(self._whole(request, body))

    def _whole(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        text = "".join(self.text[: 1 if body.get("max_tokens") == 1 else None])
        answer = self._chunk(request, text, whole=True)
        answer["usage"] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.text),
            "total_tokens": self.prompt_tokens + len(self.text),
        }
        answer["kv_transfer_params"] = self._handoff(body)
        return answer

    def _handoff(self, body: dict[str, Any]) -> dict[str, Any] | None:
        params = body.get("kv_transfer_params")
        if not params or not params.get("do_remote_decode") or not self.hands_over:
            return None
        handed: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": f"{self.engine_id}-{self.incarnation}",
            "remote_request_id": f"req-{len(self.seen)}",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "a_field_of_a_newer_vllm": {"kept": True},
        }
        if self.report is not None:
            off = not params["kvlease"]["conversation_id"] or not params["kvlease"]["reuse"]
            handed["kvlease"] = {**self.report, **({"outcome": "off"} if off else {})}
        return handed

    def _chunk(self, request: web.Request, text: str, *, whole: bool = False) -> dict[str, Any]:
        chat = _is_chat(request)
        kind = ("chat.completion" if chat else "text_completion") + (
            ".chunk" if chat and not whole else ""
        )
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if whole else None}
        if chat:
            choice["message" if whole else "delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        prefix = "chatcmpl-" if chat else "cmpl-"
        return {
            "id": prefix + request.headers.get("X-Request-Id", "none"),
            "object": kind,
            "created": 1,
            "model": self.model,
            "choices": [choice],
        }

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        cut = fault if isinstance(fault, Cut) else None
        for _ in range(cut.comments if cut else 0):
            await response.write(b": keep-alive\n\n")
        for index, event in enumerate(self.events(request)):
            if cut is not None and index == cut.chunks:
                await asyncio.sleep(0.02)  # what was written arrives before the break
                if cut.inside:
                    await response.write(event[:20])
                    await asyncio.sleep(0.02)
                return _abort(request)
            if isinstance(fault, Slow) and index:
                await asyncio.sleep(fault.chunk_s)
            await response.write(event)
        await response.write_eof()
        return response

    def events(self, request: web.Request) -> list[bytes]:
        """A chat stream begins with an event that carries only the role."""
        texts = ["", *self.text] if _is_chat(request) else self.text
        chunks = [json.dumps(self._chunk(request, text)) for text in texts]
        return [f"data: {chunk}\n\n".encode() for chunk in [*chunks, "[DONE]"]]

    async def _cut_json(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"id": ')
        await asyncio.sleep(0.02)
        return _abort(request)


def _is_chat(request: web.Request) -> bool:
    return request.path == "/v1/chat/completions"


def _abort(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("simulated")


def vllm_objects_to(body: Mapping[str, Any], *, chat: bool) -> str:
    """What vLLM 0.32 answers 400 to, of what a careless split would produce
    (``protocol.py`` of both endpoints, ``SamplingParams._verify_args``)."""
    limit = body.get("max_completion_tokens") if chat else None
    limit = body.get("max_tokens") if limit is None else limit
    if limit is not None and limit < 1:
        return f"max_tokens must be at least 1, got {limit}."
    if limit is not None and body.get("min_tokens", 0) > limit:
        return f"min_tokens must be less than or equal to max_tokens={limit}"
    if body.get("stream_options") and not body.get("stream"):
        return "Stream options can only be defined when `stream=True`."
    if chat and body.get("top_logprobs") and not body.get("logprobs"):
        return "when using `top_logprobs`, `logprobs` must be set to true."
    if body.get("logprob_token_ids") and body.get("logprobs") in (None, False):
        return "when using `logprob_token_ids`, `logprobs` must be set to true."
    if body.get("tool_choice") not in (None, "none") and not body.get("tools"):
        return "When using `tool_choice`, `tools` must be set."
    if (body.get("n") or 1) > 1 and body.get("temperature") == 0:
        return "n must be 1 when using greedy sampling"
    return ""
