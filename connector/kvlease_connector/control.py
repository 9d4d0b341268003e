"""One engine's ties to the control plane: its channels, its session, and the part that
claims (prefill) or grants (decode). All of it lives in the background loop.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc.aio
import structlog

from kvlease import rpc, tls
from kvlease.telemetry import Telemetry
from kvlease.v1 import lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease_connector.background import Background
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.claims import Claims
from kvlease_connector.decode import DecodeSide
from kvlease_connector.holder import Holders, HolderServer
from kvlease_connector.options import Options
from kvlease_connector.prefill import PrefillSide
from kvlease_connector.served import other_models
from kvlease_connector.session import Session

log = structlog.get_logger("kvlease.connector")

Handler = Callable[[int, Any], Any]
"""Of a signal."""

JOIN_TIMEOUT_S = 10.0
"""To open channels, which connects to nothing yet."""


class ControlPlane:
    """Joins on construction: the engine registers as soon as its HTTP server answers.

    Exactly one of :attr:`prefill` and :attr:`decode` is set, by the engine's role.
    """

    def __init__(
        self,
        engine: registry_pb2.Engine,
        options: Options,
        holder: BlockHolder,
        *,
        chunk_tokens: int,
        usage: Callable[[], registry_pb2.BlockUsage],
    ) -> None:
        self.prefill: PrefillSide | None = None
        self.decode: DecodeSide | None = None
        self._engine = engine
        self._options = options
        self._holder = holder
        self._chunk_tokens = chunk_tokens
        self._usage = usage
        self._watch: Future[None] | None = None
        self._server: HolderServer | None = None
        self._session: Session | None = None
        self._handlers: dict[signal.Signals, tuple[Handler, Handler]] = {}
        """Ours, and the one before it."""
        self._parent = os.getppid()
        self._tls = tls.of(options.settings)
        self._telemetry = Telemetry(
            f"kvlease-{role_name(engine.role)}",
            instance_id=f"{engine.engine_id}/{engine.incarnation}",
        )
        self._background = Background(f"kvlease-{engine.engine_id}")
        # Channels belong to the loop that makes them.
        self._background.submit(self._join(), "join").result(JOIN_TIMEOUT_S)

    def leave_when_told_to_end(self) -> None:
        """Has the engine leave the registry as soon as its process gets a signal to end.
        vLLM calls :meth:`stop` after its workers have ended, which may take so long that it
        is killed before; and until then routers would send turns that it refuses. Only for
        the main thread, as :meth:`stop` from then on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if callable(handler):
                ours = functools.partial(self._told_to_end, handler)
                signal.signal(number, ours)
                self._handlers[number] = (ours, handler)

    def _told_to_end(self, handler: Handler, number: int, frame: Any) -> None:
        if self._session is not None:
            self._session.leave()
        handler(number, frame)

    async def _join(self) -> None:
        settings, tracer = self._options.settings, self._telemetry.tracer
        leases = lease_pb2_grpc.LeaseServiceStub(self._channel(settings.lease_endpoint))
        if self._engine.role == registry_pb2.ENGINE_ROLE_PREFILL:
            claims = Claims(
                leases,
                self._engine,
                tracer,
                claim_timeout_s=settings.claim_timeout,
                connect_timeout_s=settings.connect_timeout,
                holders=Holders(settings.connect_timeout, self._tls),
            )
            self.prefill = PrefillSide(
                claims,
                self._background,
                tracer,
                settings,
                kv_bytes_per_token=self._engine.kv_bytes_per_token,
            )
        else:
            self.decode = DecodeSide(
                leases,
                self._engine,
                self._background,
                tracer,
                settings,
                chunk_tokens=self._chunk_tokens,
            )
            self._server = HolderServer(self.decode.confirm, self._tls)
            self._engine.holder_address = await self._server.start(self._engine.side_channel_host)
        self._open_session()

    def _open_session(self) -> None:
        settings = self._options.settings
        session = self._session = Session(
            registry_pb2_grpc.RegistryStub(self._channel(settings.registry_endpoint)),
            self._engine,
            usage=self._usage,
            on_opened=self._session_opened,
            on_lost=self._session_lost,
            on_gone=self._http_gone,
            other_models=functools.partial(other_models, self._engine),
        )
        if self.decode is not None:
            self.decode.bind(self._holder, session)
            self._background.submit(self.decode.sweep(), "sweep")
        if self._engine.http_address:
            self._background.submit(session.run(), "session")
        else:
            log.warning("no http_address is configured: the engine does not register")

    def _channel(self, endpoints: str) -> grpc.aio.Channel:
        channel = rpc.aio_channel(endpoints, self._tls)
        self._background.submit(tls.watch(channel, endpoints, self._tls), "connection")
        return channel

    def _session_opened(self, session_id: str) -> None:
        if self.decode is not None:
            self._watch = self._background.submit(self.decode.watch(session_id), "watch")

    def _session_lost(self, session_id: str, ended_by: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self.decode is not None:
            self.decode.session_lost(session_id, ended_by)

    def _http_gone(self) -> None:
        """Ends this process if the API server that started it has died: nobody can reach
        the engine any more, but it would hold its ports, memory and cores."""
        if os.getppid() != self._parent:
            log.error("the API server has died; ending the engine", pid=os.getpid())
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """Lets no reader in any more, deregisters, ends all calls, exports the last spans."""
        for number, (ours, before) in self._handlers.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, before)
        if self._server is not None:
            self._background.submit(self._server.stop(), "stop").result(JOIN_TIMEOUT_S)
        self._background.stop()
        self._telemetry.shutdown()


def role_name(role: registry_pb2.EngineRole.ValueType) -> str:
    """ "prefill" or "decode"."""
    return registry_pb2.EngineRole.Name(role).removeprefix("ENGINE_ROLE_").lower()
