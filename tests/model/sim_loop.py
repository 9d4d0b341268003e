"""An event loop without waiting: time jumps to the next timer, and every callback belongs to
a simulated process that can be paused or killed between any two of its steps.

Whole services run in it, unchanged. The same input gives the same run, to the last step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing will ever happen any more: a deadlock of the simulation."""


@dataclass(slots=True, eq=False)
class _Step:
    """One callback of a process. ``handle`` knows whether it was cancelled."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: Context
    handle: asyncio.Handle | None = None


@dataclass(eq=False)
class Process:
    """A simulated operating system process: some tasks that stop and die together."""

    name: str
    loop: SimLoop
    alive: bool = True
    paused: bool = False
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    on_death: list[Callable[[], None]] = field(default_factory=list)
    _waiting: list[_Step] = field(default_factory=list)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a coroutine in this process. Its failure is a failure of the test."""
        context = copy_context()
        context.run(_process.set, self)
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.add(task)
        task.add_done_callback(self._ended, context=Context())
        return task

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function as this process: what it spawns belongs to it."""
        context = copy_context()
        context.run(_process.set, self)
        return context.run(function, *args)

    def pause(self) -> None:
        """SIGSTOP: no step runs; time and what others send goes on."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what became due meanwhile runs now, in order."""
        if not self.paused:
            return
        self.paused = False
        self.flush()

    def flush(self) -> None:
        """Lets the steps that were held up run."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self.loop.again(self, step)

    def kill(self) -> None:
        """SIGKILL: no step runs any more, not even a ``finally``."""
        if self.alive:
            self.alive = False
            for callback in self.on_death:
                callback()

    def step(self, step: _Step) -> None:
        if step.handle is not None and step.handle.cancelled():
            return
        if (self.paused or not self.alive) and not self.loop.ending:
            self._waiting.append(step)
        else:
            step.callback(*step.args)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.loop.ending:
            self.loop.failures.append(error)


class _Selector:
    """Stands where a loop waits for sockets: there are none, so time passes instead."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck
        self._loop.now += max(0.0, timeout)
        return []


class SimLoop(asyncio.BaseEventLoop):
    """``now`` is the true time, in seconds; clocks of processes may differ from it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.ending = False
        self.failures: list[BaseException] = []
        self._selector = _Selector(self)

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and not self.ending:
            self.failures.append(error)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        context = context or copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        step = _Step(callback, args, context)
        handle = step.handle = super().call_soon(process.step, step, context=context)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context or copy_context()
        process = context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        step = _Step(callback, args, context)
        handle = step.handle = super().call_at(when, process.step, step, context=context)
        return handle

    def again(self, process: Process, step: _Step) -> None:
        """Runs a step that was held up."""
        super().call_soon(process.step, step, context=step.context)

    def outside(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Calls something that belongs to no process (a wire, a clock) after a while."""
        super().call_at(self.now + delay_s, callback, *args, context=Context())

    def close_down(self, processes: list[Process]) -> None:
        """Ends all tasks, those of dead processes too, so that nothing is left behind."""
        self.ending = True
        for process in processes:
            process.flush()
        tasks = [task for process in processes for task in process.tasks]
        while tasks:
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            tasks = [task for process in processes for task in process.tasks]
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()
