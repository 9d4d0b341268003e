"""The router's HTTP face. Handlers are thin: the work is in :mod:`kvlease.router.turns`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from kvlease import telemetry
from kvlease.router import errors, rules
from kvlease.router.engines import Engines
from kvlease.router.errors import HttpError
from kvlease.router.leases import Leases, ServiceDown
from kvlease.router.metrics import Metrics
from kvlease.router.readiness import Readiness
from kvlease.router.split import Endpoint
from kvlease.router.turns import TRACE_ID_HEADER, Turns
from kvlease.router.ui import Ui
from kvlease.v1 import common_pb2, registry_pb2

RETAIN_HEADER = "x-kvlease-retain"


class Http:
    """All routes. ``keys``: API key → tenant; None where there are none."""

    def __init__(
        self,
        turns: Turns,
        engines: Engines,
        readiness: Readiness,
        leases: Leases,
        metrics: Metrics,
        tracing: telemetry.Telemetry,
        keys: dict[str, str] | None,
        ui: Ui,
    ) -> None:
        self._turns = turns
        self._engines = engines
        self._readiness = readiness
        self._leases = leases
        self._metrics = metrics
        self._tracer = tracing.tracer
        self._keys = keys
        self._ui = ui
        self.stopping = False
        """Set when no new turns should come: /ready says so."""

    def app(self, max_body_bytes: int) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_openai_errors])
        app.router.add_post(Endpoint.CHAT.value, self._chat)
        app.router.add_post(Endpoint.COMPLETION.value, self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_post(
            "/v1/conversations/{conversation_id:.+}/renew", self._renew_conversation
        )
        app.router.add_delete("/v1/conversations/{conversation_id:.+}", self._end_conversation)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._render_metrics)
        app.router.add_get("/", self._root)
        self._ui.add_to(app)
        return app

    async def _root(self, request: web.Request) -> web.Response:
        """A browser goes to the page; others learn what there is."""
        if self._ui.is_on and "text/html" in request.headers.get("Accept", ""):
            raise web.HTTPFound("ui")  # relative: the address may have a path in front
        raise web.HTTPNotFound

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turns.serve(request, Endpoint.CHAT)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._turns.serve(request, Endpoint.COMPLETION)

    async def _models(self, request: web.Request) -> web.Response:
        self._tenant(request)
        data = [_model_object(name, engine) for name, engine in self._engines.models().items()]
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        self._tenant(request)
        wanted = request.match_info["model"]
        served = self._engines.models()
        if wanted not in served:
            raise errors.unknown_model(wanted, list(served))
        return web.json_response(_model_object(wanted, served[wanted]))

    async def _health(self, _: web.Request) -> web.Response:
        """The process lives."""
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Turns can be served, as a turn that came now would be."""
        reason = "The router is stopping." if self.stopping else ""
        reason = reason or await self._readiness.unready_reason()
        if reason:
            return errors.unavailable(reason, "not_ready").response()
        return web.json_response(
            {
                "status": "ready",
                "draining": self._readiness.draining(),
                "warnings": self._readiness.warnings(),
            }
        )

    async def _render_metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        # In a thread: it takes some 10 ms, in which no answer would go on.
        body, content_type = await asyncio.to_thread(self._metrics.render, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _end_conversation(self, request: web.Request) -> web.Response:
        """Frees what is kept for a conversation. One that does not exist has ended too."""
        with self._named(request, "end_conversation") as named:
            ended = await asyncio.gather(
                *(self._leases.end(item, named.metadata) for item in named.conversations)
            )
        return named.answer("deleted", deleted=True, leases_ended=named.models(ended))

    async def _renew_conversation(self, request: web.Request) -> web.Response:
        """Keeps what is kept for a conversation for ``x-kvlease-retain`` seconds from now:
        for a tool that turns out to run long."""
        retention_s = rules.retention_of(request.headers.get(RETAIN_HEADER, ""))
        if retention_s is None:
            raise rules.InvalidRequest(
                f"{RETAIN_HEADER} is missing: give the seconds that the blocks should stay",
                RETAIN_HEADER,
            )
        with self._named(request, "renew_conversation") as named:
            leases = await asyncio.gather(
                *(
                    self._leases.renew(item, retention_s, named.metadata)
                    for item in named.conversations
                )
            )
        if not any(leases):
            raise errors.no_lease(named.conversation_id)
        expires = [lease.expire_time.ToJsonString() for lease in leases if lease is not None]
        return named.answer(
            "renewed", leases_renewed=named.models(leases), expire_time=min(expires)
        )

    @contextlib.contextmanager
    def _named(self, request: web.Request, operation: str) -> Iterator[_Named]:
        """The conversation that a path names, with every model that it may be of."""
        tenant = self._tenant(request)
        conversation_id = rules.checked_conversation_id(
            request.match_info["conversation_id"], "conversation_id"
        )
        model = request.query.get("model")
        models = [model] if model else list(self._engines.models())
        with self._tracer.start_as_current_span(
            operation, context=telemetry.extract(request.headers)
        ) as span:
            span.set_attribute("gen_ai.conversation.id", conversation_id)
            span.set_attribute("kvlease.conversation", conversation_id)
            span.set_attribute("kvlease.tenant", tenant)
            try:
                yield _Named(
                    [
                        common_pb2.Conversation(
                            tenant=tenant, model=name, conversation_id=conversation_id
                        )
                        for name in models
                    ],
                    conversation_id,
                    telemetry.inject(span),
                    telemetry.trace_id_of(span),
                )
            except ServiceDown as error:
                raise errors.unavailable(str(error), "lease_service_unavailable") from None

    def _tenant(self, request: web.Request) -> str:
        try:
            return rules.tenant_of(request.headers.get("Authorization", ""), self._keys)
        except rules.UnknownKey:
            raise errors.unauthorized() from None


@dataclass(frozen=True, slots=True)
class _Named:
    """A conversation id, as the conversations of one model each. ``metadata`` goes with
    calls about them."""

    conversations: Sequence[common_pb2.Conversation]
    conversation_id: str
    metadata: Mapping[str, str]
    trace_id: str

    def models(self, found: Sequence[object]) -> list[str]:
        """Those models whose conversation's ``found`` is true."""
        return [item.model for item, it in zip(self.conversations, found, strict=True) if it]

    def answer(self, what: str, **fields: object) -> web.Response:
        """In the shape of OpenAI's answers."""
        body = {"id": self.conversation_id, "object": f"conversation.{what}", **fields}
        return web.json_response(body, headers={TRACE_ID_HEADER: self.trace_id})


def _model_object(name: str, engine: registry_pb2.Engine) -> dict[str, object]:
    """As vLLM shows it: an adapter has its model as ``parent``."""
    return {
        "id": name,
        "object": "model",
        "created": engine.register_time.seconds,
        "owned_by": "kvlease",
        "parent": None if name == engine.model else engine.model,
    }


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors that no handler answers itself, in OpenAI's shape."""
    try:
        return await handler(request)
    except HttpError as error:
        return error.response()
    except rules.InvalidRequest as error:
        return HttpError(400, str(error), "invalid_request", param=error.param).response()
    except web.HTTPNotFound:
        return HttpError(
            404,
            f"There is no {request.method} {request.path} here. The router serves "
            "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, "
            "POST /v1/conversations/{id}/renew and DELETE /v1/conversations/{id}; for those who "
            "run it, GET /ui (a page), GET /metrics, GET /ready and GET /health.",
            "unknown_url",
        ).response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return HttpError(
            405,
            f"{request.path} does not take {request.method}: use {allowed}.",
            "method_not_allowed",
        ).response({"Allow": allowed})
