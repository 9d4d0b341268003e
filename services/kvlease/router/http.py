"""The router's HTTP face. Handlers are thin: the work is in :mod:`kvlease.router.turns`."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from kvlease import telemetry
from kvlease.router import errors, rules
from kvlease.router.engines import Engines
from kvlease.router.errors import HttpError
from kvlease.router.leases import Leases, ServiceDown
from kvlease.router.metrics import Metrics
from kvlease.router.split import Endpoint
from kvlease.router.turns import TRACE_ID_HEADER, Turns
from kvlease.v1 import common_pb2, registry_pb2

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Http:
    """All routes. ``keys``: API key → tenant; None where there are none."""

    def __init__(
        self,
        turns: Turns,
        engines: Engines,
        leases: Leases,
        metrics: Metrics,
        tracing: telemetry.Telemetry,
        keys: dict[str, str] | None,
    ) -> None:
        self._turns = turns
        self._engines = engines
        self._leases = leases
        self._metrics = metrics
        self._tracer = tracing.tracer
        self._keys = keys
        self.stopping = False
        """Set when no new turns should come: /ready says so."""

    def app(self, max_body_bytes: int) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_openai_errors])
        app.router.add_post(Endpoint.CHAT.value, self._chat)
        app.router.add_post(Endpoint.COMPLETION.value, self._completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_delete("/v1/conversations/{conversation_id:.+}", self._end_conversation)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._render_metrics)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._turns.serve(request, Endpoint.CHAT)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._turns.serve(request, Endpoint.COMPLETION)

    async def _models(self, request: web.Request) -> web.Response:
        self._tenant(request)
        data = [_model_object(engine) for engine in self._engines.models()]
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        self._tenant(request)
        wanted = request.match_info["model"]
        served = self._engines.models()
        for engine in served:
            if engine.model == wanted:
                return web.json_response(_model_object(engine))
        raise errors.unknown_model(wanted, [engine.model for engine in served])

    async def _health(self, _: web.Request) -> web.Response:
        """The process lives."""
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Turns can be served."""
        reason = "The router is stopping." if self.stopping else self._engines.unready_reason()
        if reason:
            return errors.unavailable(reason, "not_ready").response()
        return web.json_response({"status": "ready"})

    async def _render_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    async def _end_conversation(self, request: web.Request) -> web.Response:
        """Frees what is kept for a conversation. One that does not exist has ended too."""
        tenant = self._tenant(request)
        conversation_id = rules.checked_conversation_id(
            request.match_info["conversation_id"], "conversation_id"
        )
        model = request.query.get("model")
        models = [model] if model else [engine.model for engine in self._engines.models()]
        with self._tracer.start_as_current_span(
            "end_conversation", context=telemetry.extract(request.headers)
        ) as span:
            span.set_attribute("gen_ai.conversation.id", conversation_id)
            metadata = telemetry.inject(span)
            conversations = [
                common_pb2.Conversation(tenant=tenant, model=name, conversation_id=conversation_id)
                for name in models
            ]
            try:
                ended = await asyncio.gather(
                    *(self._leases.end(conversation, metadata) for conversation in conversations)
                )
            except ServiceDown as error:
                raise errors.unavailable(str(error), "lease_service_unavailable") from None
        return web.json_response(
            {
                "id": conversation_id,
                "object": "conversation.deleted",
                "deleted": True,
                "leases_ended": [
                    name for name, was_held in zip(models, ended, strict=True) if was_held
                ],
            },
            headers={TRACE_ID_HEADER: telemetry.trace_id_of(span)},
        )

    def _tenant(self, request: web.Request) -> str:
        try:
            return rules.tenant_of(request.headers.get("Authorization", ""), self._keys)
        except rules.UnknownKey:
            raise errors.unauthorized() from None


def _model_object(engine: registry_pb2.Engine) -> dict[str, object]:
    return {
        "id": engine.model,
        "object": "model",
        "created": engine.register_time.seconds,
        "owned_by": "kvlease",
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
            "POST /v1/chat/completions, POST /v1/completions, GET /v1/models and "
            "DELETE /v1/conversations/{id}.",
            "unknown_url",
        ).response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return HttpError(
            405,
            f"{request.path} does not take {request.method}: use {allowed}.",
            "method_not_allowed",
        ).response({"Allow": allowed})
