"""A whole deployment in one simulation, and what can happen to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from sim_blocks import MODEL, Text
from sim_decode import DecodeEngine, DecodeJob
from sim_loop import Process, SimLoop
from sim_network import Network, Weather
from sim_oracle import Oracle
from sim_prefill import PrefillEngine, PrefillJob
from sim_services import LeaseReplica, RegistryReplica, Service, Stub
from sim_store import STORE, StoreCore

from kvlease.config import Settings
from kvlease.lease import keys
from kvlease.v1 import lease_pb2
from kvlease.v1.common_pb2 import Conversation

SETTINGS = Settings(
    session_ttl=15,
    claim_grace=30.0,
    retention_ttl=90.0,
    max_retention=120.0,
    max_readers=4,
    connect_timeout=2.0,
    min_pull_tokens=4,
    pull_policy="threshold",
    max_retained_fraction=0.5,
    min_free_fraction=0.05,
)

CONVERSATIONS = (
    Conversation(tenant="a", model=MODEL, conversation_id="c"),
    Conversation(tenant="b", model=MODEL, conversation_id="c"),
    Conversation(tenant="a", model=MODEL, conversation_id="d"),
)
"""The first two have the same id and the same words, and belong to different tenants."""

WEATHERS = {
    "good": Weather(),
    "lossy": Weather(lose_request=0.3, lose_answer=0.3),
    "deaf": Weather(lose_answer=1.0),
    "late": Weather(late=0.5, latest_s=5.0),
    "very late": Weather(late=0.3, latest_s=60.0),
    "stuck": Weather(late=1.0, latest_s=30.0),
    "slow": Weather(late=1.0, latest_s=0.9),
    "double": Weather(double=0.5, echo_s=3.0, late=0.2, latest_s=3.0),
    "echo": Weather(double=1.0, echo_s=60.0),
    "cut": Weather(cut=True),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a simulation starts with. Skews in seconds."""

    seed: int = 0
    skews: tuple[float, ...] = (0.0, 0.0)
    """One a lease replica."""
    decoders: int = 2
    prefillers: int = 1
    num_blocks: int = 60


@dataclass(slots=True)
class History:
    """A conversation as its client has it."""

    conversation: Conversation
    tokens: tuple[int, ...] = ()
    turns: int = 0
    seen: set[int] = field(default_factory=set)


class World:
    """Starts everything; :meth:`run_for` lets time pass; :meth:`close` it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.settings = SETTINGS
        self.loop = SimLoop()
        self.network = Network(self.loop, setup.seed)
        self.oracle = Oracle(self.loop, self.settings)
        self.core = StoreCore(self.loop, self.network, self.oracle.observe)
        self.oracle.core = self.core
        self.router = Process("router", self.loop)
        self.leases = [
            self._service(LeaseReplica, f"lease-{i}", s) for i, s in enumerate(setup.skews)
        ]
        self.registries = [self._service(RegistryReplica, "registry-0", 0.0)]
        self.decoders = [self._decoder(i) for i in range(setup.decoders)]
        self.prefillers = [self._prefiller(i) for i in range(setup.prefillers)]
        self.histories = [History(conversation) for conversation in CONVERSATIONS]
        self.lease_stub = Stub(self.network, self.router, self.leases)
        self.requests = 0
        self.outcomes: dict[str, str] = {}
        for place in self.places():
            place.start()
        self._look()

    def _look(self) -> None:
        """Rules about how long something lasts are looked at every second."""
        if not self.loop.ending:
            self.oracle.check_kept()
            self.loop.outside(1.0, self._look)

    def _service(self, kind: type[Any], name: str, skew_s: float) -> Any:
        return kind(name, self.loop, self.network, self.core, self.settings, skew_s=skew_s)

    def _decoder(self, number: int) -> DecodeEngine:
        return DecodeEngine(
            f"decode-{number}",
            self.loop,
            self.network,
            self.oracle,
            self.settings,
            self.leases,
            self.registries,
            num_blocks=self.setup.num_blocks,
            uptime_s=5000.0 * number,
        )

    def _prefiller(self, number: int) -> PrefillEngine:
        engine = PrefillEngine(
            f"prefill-{number}",
            self.loop,
            self.network,
            self.oracle,
            self.settings,
            self.leases,
            uptime_s=70000.0 + number,
        )
        engine.decoders = {decoder.name: decoder for decoder in self.decoders}
        return engine

    def places(self) -> list[Service | DecodeEngine | PrefillEngine]:
        """Everything that can be killed, paused and started."""
        return [*self.leases, *self.registries, *self.decoders, *self.prefillers]

    # --- time ---------------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Lets true time pass. Raises AssertionError if a rule is broken."""
        self.loop.outside(seconds, self.loop.stop)
        self.loop.run_forever()
        self.check()

    def check(self) -> None:
        """Raises AssertionError if a rule has been broken."""
        if self.loop.failures:
            raise self.loop.failures[0]
        assert not self.oracle.broken, self.oracle.broken[0]

    def close(self) -> None:
        processes = [self.core.process, self.router]
        for service in (*self.leases, *self.registries):
            processes += service.processes
        processes += [run.process for decoder in self.decoders for run in decoder.runs]
        processes += [run.process for prefiller in self.prefillers for run in prefiller.runs]
        self.loop.close_down(processes)

    # --- turns --------------------------------------------------------------------------

    def turn(
        self,
        who: int,
        *,
        new: int = 9,
        answer: int = 7,
        forget: int = 0,
        decoder: int = -1,
        prefiller: int = 0,
        salt: str = "",
        think_s: float = 0.2,
        room_s: float = 0.0,
        read_s: float = 0.03,
        retain_s: float | None = None,
        end: bool = False,
        aborted: bool = False,
    ) -> asyncio.Task[None]:
        """A client sends a turn. ``forget``: tokens of the history that it leaves out, from
        the end. ``decoder`` -1: where the conversation's lease is."""
        self.requests += 1
        history = self.histories[who]
        kept = history.tokens[: len(history.tokens) - forget]
        history.turns += 1
        words = range(1000 * history.turns, 1000 * history.turns + new)
        prompt = Text(history.conversation, (*kept, *words), salt)
        prefill = PrefillJob(f"r{self.requests}", prompt, 0, room_s, read_s, 0.05, aborted)
        said = prompt.extended(
            range(1000 * history.turns + 500, 1000 * history.turns + 500 + answer)
        )
        # The last token's KV is not computed.
        computed = Text(said.conversation, said.tokens[:-1], salt)
        decode = DecodeJob(
            prefill.request_id,
            computed,
            0,
            think_s,
            retain_s or self.settings.retention_ttl,
            end,
        )
        return self.router.spawn(
            self._turn(history, prefill, decode, said.tokens, decoder, prefiller)
        )

    async def _turn(
        self,
        history: History,
        prefill: PrefillJob,
        decode: DecodeJob,
        said: tuple[int, ...],
        decoder: int,
        prefiller: int,
    ) -> None:
        number, holder = await self._start_turn(history)
        target = self.decoders[decoder % len(self.decoders)]
        if decoder < 0:
            target = next((d for d in self.decoders if d.name == holder), self.decoders[0])
        name = prefill.request_id
        self.oracle.tell(f"turn {number} of {history.conversation.tenant}/{name} on {target.name}")
        p = self.prefillers[prefiller % len(self.prefillers)]
        if (run := p.run) is not None:
            job = prefill
            try:
                report = await self.network.call(
                    self.router, run.process, p.name, lambda: run.prefill(job), 120.0
                )
                self.outcomes[name] = report["outcome"]
            except grpc.aio.AioRpcError as error:
                self.oracle.tell(f"{name} has no prefill: {error.details()}")
        if (decoding := target.run) is None:
            return
        task = DecodeJob(name, decode.text, number, decode.seconds, decode.retention_s, decode.end)
        try:
            done = await self.network.call(
                self.router, decoding.process, target.name, lambda: decoding.decode(task), 120.0
            )
        except grpc.aio.AioRpcError as error:
            self.oracle.tell(f"{name} has no answer: {error.details()}")
            return
        if done and len(said) > len(history.tokens):
            history.tokens = said

    async def _start_turn(self, history: History) -> tuple[int, str]:
        try:
            answer = await self.lease_stub.StartTurn(
                lease_pb2.StartTurnRequest(conversation=history.conversation), timeout=0.05
            )
        except grpc.aio.AioRpcError:
            return 0, ""
        if answer.turn in history.seen:
            self.oracle.breaks("turns have numbers of their own", str(answer.turn))
        history.seen.add(answer.turn)
        return answer.turn, answer.lease.holder_engine_id

    def end(self, who: int) -> asyncio.Task[None]:
        """A client ends a conversation."""
        request = lease_pb2.EndConversationRequest(conversation=CONVERSATIONS[who])
        return self.router.spawn(self._try("EndConversation", request))

    def renew(self, who: int, seconds: float) -> asyncio.Task[None]:
        """A client asks for a longer (or shorter) retention."""
        span = Duration()
        span.FromMilliseconds(round(seconds * 1000))
        request = lease_pb2.RenewRequest(conversation=CONVERSATIONS[who], retention=span)
        return self.router.spawn(self._try("Renew", request))

    async def _try(self, method: str, request: Any) -> None:
        try:
            await getattr(self.lease_stub, method)(request, timeout=2.0)
            self.oracle.tell(f"{method} was answered")
        except grpc.aio.AioRpcError as error:
            self.oracle.tell(f"{method}: {error.details()}")

    # --- faults -------------------------------------------------------------------------

    def weather(self, sources: str, targets: str, kind: str) -> None:
        """On links between processes whose names start so, both ways for watches."""
        self.network.set_weather(sources, targets, WEATHERS[kind])
        if targets == STORE:
            self.network.set_weather(STORE, sources, WEATHERS[kind])

    def pause(self, place: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        process = self._place(place).process
        if process is not None:
            process.pause()
            self.loop.outside(seconds, process.resume)

    def crash(self, place: int, seconds: float) -> None:
        """SIGKILL, and a new start later."""
        target = self._place(place)
        if target.process is not None:
            target.kill()
            self.loop.outside(seconds, self._start, target)

    def _place(self, number: int) -> Service | DecodeEngine | PrefillEngine:
        places = self.places()
        return places[number % len(places)]

    def _start(self, target: Service | DecodeEngine | PrefillEngine) -> None:
        if target.process is None and not self.loop.ending:
            target.start()

    def pause_store(self, seconds: float, *, restart: bool) -> None:
        """The store stops for a while. A restart gives sessions their full TTL again."""
        self.core.process.pause()
        self.loop.outside(seconds, self._resume_store, restart)

    def _resume_store(self, restart: bool) -> None:
        if restart:
            self.core.prolong_sessions()
        self.core.process.resume()

    def elect_leader(self) -> None:
        """The store's leader changes: sessions get their full TTL again."""
        self.core.prolong_sessions()

    def lose_history(self) -> None:
        """The store compacts what the services' watches had still to see."""
        self.core.lose_history()

    def break_watches(self) -> None:
        """Every engine's watch of its leases breaks."""
        for stream in list(self.network.streams):
            stream.cut()

    # --- expectations -------------------------------------------------------------------

    def expect_hit(self) -> None:
        """The last turn was a hit."""
        outcome = self.outcomes.get(f"r{self.requests}")
        assert outcome == "hit", f"the last turn was no hit: {outcome}"

    def expect_free(self) -> None:
        """No decode engine keeps anything."""
        for decoder in self.decoders:
            if decoder.run is not None:
                retained = decoder.run.side.usage().retained_blocks
                assert retained == 0, f"{decoder.name} keeps {retained} blocks"

    # --- the end ------------------------------------------------------------------------

    def heal(self) -> None:
        """All faults are over."""
        self.network.clear_weather()
        self.core.process.resume()
        for place in self.places():
            if place.process is None:
                place.start()
            else:
                place.process.resume()

    def settle(self) -> None:
        """Waits until everything that was kept must be free. Raises AssertionError if
        anything is left."""
        # Sessions come back, and readers that are gone have had their time.
        self.run_for(self.settings.session_ttl + self.settings.claim_grace + 5.0)
        self.oracle.check_ended()
        self.check()
        self.run_for(self.settings.max_retention + self.settings.claim_grace + 40.0)
        for decoder in self.decoders:
            assert decoder.run is not None
            usage = decoder.run.side.usage()
            assert usage.retained_blocks == 0, f"{decoder.name} still keeps blocks: {usage}"
            decoder.process.run(decoder.run.side.drain)  # type: ignore[union-attr]
            left = decoder.run.pool.get_num_free_blocks()
            assert left == self.setup.num_blocks, f"{decoder.name} has lost blocks: {left}"
        records = [
            key for key in self.core.items if key.startswith(keys.LEASES) and "\x7f" not in key
        ]
        assert not records, f"the store still has {records}"

    def hits_again(self) -> None:
        """Without faults, the next turn of every conversation finds what it needs."""
        for who, history in enumerate(self.histories):
            history.tokens = ()  # a short one, that fits any budget
            for _ in range(2):
                self.turn(who)
                name = f"r{self.requests}"
                self.run_for(2.0)
            assert self.outcomes.get(name) == "hit", (
                f"turn {name} was no hit: {self.outcomes.get(name)}"
            )
