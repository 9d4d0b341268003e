"""A prefill engine's side of a turn under each pull policy, against a real lease service.
Only vLLM's scheduler is missing, and what it measures is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from control_plane import CHUNK, SEED, ControlPlane, conversation, grant_request, until
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvlease import rpc
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2
from kvlease_connector.background import Background
from kvlease_connector.claims import Ask, Claims
from kvlease_connector.holder import HolderServer
from kvlease_connector.prefill import PrefillSide
from kvlease_connector.pull_policy import Chunk

BYTES_PER_TOKEN = 1000
PARAMS = {
    "remote_block_ids": [list(range(1, 101))],
    "remote_engine_id": "decode-0-i",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


class PrefillEngine:
    """What the scheduler does with a prefill engine's connector, by hand."""

    def __init__(self, plane: ControlPlane, **settings: Any) -> None:
        self.plane = plane
        self.settings = plane.settings.model_copy(update={"claim_timeout": 2.0, **settings})
        self.spans = InMemorySpanExporter()
        self.background = Background("test")
        self.side = self.background.submit(self._build(), "build").result(5)
        self.holder = registry_pb2.Engine()

    async def _build(self) -> PrefillSide:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        tracer = provider.get_tracer("test")
        record = registry_pb2.Engine(
            engine_id="prefill-0", incarnation="p", compatibility_hash="hash"
        )
        claims = Claims(
            lease_pb2_grpc.LeaseServiceStub(rpc.aio_channel(self.plane.addresses["lease"][0])),
            record,
            tracer,
            claim_timeout_s=self.settings.claim_timeout,
            connect_timeout_s=self.settings.connect_timeout,
        )
        return PrefillSide(
            claims, self.background, tracer, self.settings, kv_bytes_per_token=BYTES_PER_TOKEN
        )

    async def grant(self, num_tokens: int) -> None:
        """A decode engine holds so many tokens of the conversation."""
        self.server = HolderServer(lambda lease_id, ticket_id: 30.0)
        address = await self.server.start("127.0.0.1")
        self.holder = await self.plane.register(holder_address=address)
        request = grant_request(
            self.holder, tokens=range(num_tokens), kv_transfer_params_json=json.dumps(PARAMS)
        )
        await self.plane.lease.Grant(request, timeout=5)

    async def match(self, num_prompt: int, *, num_local: int = 0) -> int:
        """What the scheduler is offered in the end."""
        self.params: dict[str, Any] = {"kvlease": {}}

        def ask() -> Ask:
            return Ask(
                conversation=conversation(),
                token_ids=range(num_prompt),
                seed=SEED,
                chunk_tokens=CHUNK,
                block_size=4,
                min_tokens=num_local + self.side.policy.min_tokens,
                num_local_tokens=num_local,
                traceparent="",
            )

        offered: list[int | None] = []

        def decided() -> bool:
            offered.append(self.side.match("r", self.params, num_prompt, num_local, ask))
            return offered[-1] is not None

        await until(decided)
        return offered[-1] or 0

    def learn(self, *, compute_s: float, pull_s: float) -> None:
        """That 100 tokens take so long."""
        policy, holder = self.side.policy, self.holder
        for _ in range(4):
            policy.prefill.add([Chunk("x", 100, 0)], compute_s)
            source = (holder.engine_id, holder.incarnation)
            policy.read_started(*source, None, self.side._clock())
            policy.read_ended(
                *source, 100, None, at_least_s=pull_s, at_most_s=pull_s, now=self.side._clock()
            )

    async def open_tickets(self) -> int:
        request = lease_pb2.GetLeaseRequest(conversation=conversation())
        lease = await self.plane.lease.GetLease(request, timeout=5)
        return len(lease.tickets)

    def span(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans.get_finished_spans() if span.name == name]
        return found

    async def stop(self) -> None:
        await asyncio.to_thread(self.background.stop)
        await self.server.stop()


@pytest.fixture
async def plane() -> AsyncIterator[ControlPlane]:
    started = ControlPlane({})
    await started.start()
    yield started
    await started.stop()


StartEngine = Callable[[str], Awaitable[PrefillEngine]]


@pytest.fixture
async def with_policy(plane: ControlPlane) -> AsyncIterator[StartEngine]:
    """Starts an engine under a pull policy; a lease of 100 tokens is there to claim."""
    started: list[PrefillEngine] = []

    async def start(policy: str) -> PrefillEngine:
        started.append(PrefillEngine(plane, pull_policy=policy))
        await started[-1].grant(100)
        return started[-1]

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
async def engine(with_policy: StartEngine) -> PrefillEngine:
    return await with_policy("adaptive")


async def test_a_pull_that_would_be_slower_is_declined_and_its_ticket_closed(
    engine: PrefillEngine,
) -> None:
    engine.learn(compute_s=0.1, pull_s=3.0)

    assert await engine.match(120) == 0
    report = engine.side.finished("r", 120)

    assert report["outcome"] == "miss_short"
    assert "a pull of 100 tokens from decode-0 would take 3.0" in report["detail"]
    assert "computing them 0.1" in report["detail"]
    assert report["predicted_pull_s"] == pytest.approx(3.0, rel=0.1)
    assert report["predicted_compute_s"] == pytest.approx(0.1, rel=0.1)
    assert "pull_s" not in report
    assert "remote_block_ids" not in engine.params
    assert await engine.open_tickets() == 0
    attributes = engine.span("lease.claim").attributes or {}
    assert attributes["kvlease.outcome"] == "miss_short"
    assert attributes["kvlease.predicted_pull_s"] == report["predicted_pull_s"]
    assert attributes["kvlease.predicted_compute_s"] == report["predicted_compute_s"]


async def test_a_pull_that_is_faster_is_made_and_says_what_it_took(engine: PrefillEngine) -> None:
    engine.learn(compute_s=1.0, pull_s=0.2)

    assert await engine.match(120) == 100
    assert engine.side.allocated("r", 100) is not None
    engine.side.received(["r"], [])
    report = engine.side.finished("r", 120)

    assert report["outcome"] == "hit"
    assert 0 < report["pull_s"] < 1
    assert (report["pull_source"], report["pull_bytes"]) == ("decode-0", 100 * BYTES_PER_TOKEN)
    attributes = engine.span("kv.pull").attributes or {}
    assert attributes["kvlease.predicted_pull_s"] == pytest.approx(0.2, rel=0.1)
    assert attributes["kvlease.predicted_compute_s"] == pytest.approx(1.0, rel=0.1)
    assert attributes["kvlease.seconds"] == report["pull_s"]


async def test_a_local_cache_that_grew_during_the_claim_is_counted_again(
    engine: PrefillEngine,
) -> None:
    # given a hit of 100 tokens that the scheduler had no room for yet
    engine.learn(compute_s=1.0, pull_s=0.2)
    assert await engine.match(120) == 100
    # when all but 36 of them have come into the local cache meanwhile
    assert await engine.match(120, num_local=64) == 0
    # then what is left is under the threshold, and the ticket is closed
    report = engine.side.finished("r", 120)
    assert report["outcome"] == "miss_short"
    assert report["detail"].startswith("36 tokens beyond the 64 in the local cache")

    async def closed() -> bool:
        return await engine.open_tickets() == 0

    await until(closed)


async def test_the_threshold_alone_pulls_what_is_slower(with_policy: StartEngine) -> None:
    engine = await with_policy("threshold")
    engine.learn(compute_s=0.1, pull_s=3.0)
    assert await engine.match(120) == 100
    engine.side.finished("r", 120)


async def test_always_pulls_a_single_token(with_policy: StartEngine) -> None:
    engine = await with_policy("always")
    assert await engine.match(120, num_local=99) == 1
    engine.side.finished("r", 120)


async def test_never_makes_no_claim(with_policy: StartEngine) -> None:
    engine = await with_policy("never")
    assert await engine.match(120) == 0
    report = engine.side.finished("r", 120)
    assert (report["outcome"], report["detail"]) == (
        "off", "pulls are turned off: pull_policy is never",
    )  # fmt: skip
    assert engine.spans.get_finished_spans() == ()


async def test_a_read_that_failed_says_nothing_of_the_link(engine: PrefillEngine) -> None:
    engine.learn(compute_s=1.0, pull_s=0.2)
    assert await engine.match(120) == 100
    engine.side.allocated("r", 100)
    engine.side.received(["r"], ["r"])
    report = engine.side.finished("r", 120)
    assert report["outcome"] == "miss_engine"
    assert "pull_s" not in report
    source = (engine.holder.engine_id, engine.holder.incarnation)
    again = engine.side.policy.decide(*source, 0, 100, 0.0)
    assert again.predicted_pull_s == report["predicted_pull_s"]
