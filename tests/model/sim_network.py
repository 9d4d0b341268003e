"""Messages between simulated processes: lost, late, doubled, out of order, refused.

A call is what a unary gRPC call is: a request, a handler that runs in the other process, an
answer, a deadline of the caller's. A handler goes on when its caller has given up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from sim_loop import Process, SimLoop

T = TypeVar("T")

FASTEST_S, SLOWEST_S = 0.0005, 0.003
"""How long a message takes in good weather."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to messages on a link; chances from 0 to 1, delays in seconds."""

    lose_request: float = 0.0
    lose_answer: float = 0.0
    double: float = 0.0
    echo_s: float = 0.0
    """How much later the second copy comes, at most."""
    late: float = 0.0
    latest_s: float = 0.0
    cut: bool = False
    """Nothing passes, in either direction."""


GOOD = Weather()


@dataclass(slots=True)
class Link:
    """From one process to another, by their names: it outlives their restarts."""

    random: random.Random
    weather: Weather = GOOD

    def delay(self) -> float:
        delay_s = self.random.uniform(FASTEST_S, SLOWEST_S)
        if self.weather.late and self.random.random() < self.weather.late:
            delay_s += self.random.uniform(0, self.weather.latest_s)
        return delay_s

    def loses(self, chance: float) -> bool:
        return self.weather.cut or (chance > 0 and self.random.random() < chance)


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[Any]
    link: Link


def failed(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    """What a gRPC client raises."""
    metadata = grpc.aio.Metadata.from_tuple(tuple(trailing or ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)


class Network:
    """All links. ``seed`` decides every delay and loss."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self._loop = loop
        self.seed = seed
        self.streams: list[Any] = []
        """Open watches."""
        self._links: dict[tuple[str, str], Link] = {}
        self._forecast: list[tuple[str, str, Weather]] = []
        self._calls: dict[Process, list[_Call]] = {}

    def link(self, source: str, target: str) -> Link:
        """From ``source`` to ``target``."""
        link = self._links.get((source, target))
        if link is None:
            rng = random.Random(f"{self.seed}/{source}/{target}")
            link = self._links[source, target] = Link(rng)
            for sources, targets, weather in self._forecast:
                if source.startswith(sources) and target.startswith(targets):
                    link.weather = weather
        return link

    def set_weather(self, sources: str, targets: str, weather: Weather) -> None:
        """On all links between processes whose names start so, also those to come."""
        self._forecast.append((sources, targets, weather))
        for (source, target), link in self._links.items():
            if source.startswith(sources) and target.startswith(targets):
                link.weather = weather

    def clear_weather(self) -> None:
        """Good weather everywhere. What is on its way stays late."""
        self._forecast.clear()
        for link in self._links.values():
            link.weather = GOOD

    async def call(
        self,
        source: Process,
        target: Process | None,
        name: str,
        handler: Callable[[], Awaitable[T]],
        timeout_s: float,
    ) -> T:
        """Runs ``handler`` in ``target`` (named ``name``; None: nothing runs there).

        Raises AioRpcError: what the handler raised, UNAVAILABLE if nothing is there or it
        died, DEADLINE_EXCEEDED.
        """
        if self._loop.ending:
            raise failed(grpc.StatusCode.UNAVAILABLE, "the simulation ends")
        link = self.link(source.name, name)
        call = _Call(self._loop.create_future(), link)
        if target is None or not target.alive:
            if not link.weather.cut:
                refused = failed(grpc.StatusCode.UNAVAILABLE, "connection refused")
                self._loop.outside(link.delay(), _settle, call.answer, None, refused)
        elif not link.loses(link.weather.lose_request):
            self._loop.outside(link.delay(), self._arrive, target, call, handler)
            if link.weather.double and link.random.random() < link.weather.double:
                echo_s = link.delay() + link.random.uniform(0, link.weather.echo_s)
                self._loop.outside(echo_s, self._arrive, target, call, handler)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.answer  # type: ignore[no-any-return]
        except TimeoutError:
            raise failed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None

    def _arrive(self, target: Process, call: _Call, handler: Callable[[], Awaitable[Any]]) -> None:
        if self._loop.ending:
            return
        if not target.alive:
            self._reset(call)
            return
        if target not in self._calls:
            self._calls[target] = []
            target.on_death.append(lambda: self._died(target))
        self._calls[target].append(call)
        target.spawn(self._serve(target, call, handler))

    async def _serve(
        self, target: Process, call: _Call, handler: Callable[[], Awaitable[Any]]
    ) -> None:
        result, error = None, None
        try:
            result = await handler()
        except grpc.aio.AioRpcError as raised:
            error = raised
        self._calls[target].remove(call)
        link = call.link
        if not link.loses(link.weather.lose_answer):
            self._loop.outside(link.delay(), _settle, call.answer, result, error)

    def _died(self, target: Process) -> None:
        for call in self._calls.pop(target, []):
            self._reset(call)

    def _reset(self, call: _Call) -> None:
        if not call.link.weather.cut:
            error = failed(grpc.StatusCode.UNAVAILABLE, "connection reset")
            self._loop.outside(call.link.delay(), _settle, call.answer, None, error)


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
        answer.exception()  # the caller may be gone: nobody has to look at it
    else:
        answer.set_result(result)
