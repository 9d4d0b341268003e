"""A thread with an event loop: where the connector talks to the services.

The engine's own thread never waits for the network. It hands coroutines over here and
looks at their results on a later step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0
"""How long :meth:`Background.stop` waits for coroutines that were asked to end."""

log = structlog.get_logger("kvlease.connector")


class Background:
    """An event loop in a daemon thread. It owns every coroutine handed to it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T], what: str) -> Future[T]:
        """Runs a coroutine; the future holds its result. An exception that nobody can be
        waiting for is logged under ``what``."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(lambda done: _log_failure(done, what))
        return future

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs a callback in the loop's thread."""
        self._loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Cancels what still runs, waits for it, ends the thread. Safe to call twice."""
        if not self._thread.is_alive():
            return
        future = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        try:
            future.result(STOP_TIMEOUT_S)
        except TimeoutError:
            log.warning("background work did not end in time", seconds=STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _cancel_all(self) -> None:
        me = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_failure(future: Future[Any], what: str) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("background work failed", what=what, error=repr(error))
