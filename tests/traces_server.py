"""`kvlease serve traces`, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlease.config import Settings
from kvlease.traces.app import serve_traces

ANY = "127.0.0.1:0"


@contextmanager
def serving_traces(**settings: Any) -> Iterator[dict[str, str]]:
    """Its addresses: ``traces_otlp`` and ``traces``, each host:port."""
    given = Settings(traces_listen=ANY, traces_http_listen=ANY, **settings)
    addresses: dict[str, str] = {}
    ready, stop = threading.Event(), asyncio.Event()

    def told(name: str, address: str) -> None:
        addresses[name] = address
        if len(addresses) == 2:
            ready.set()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await serve_traces(given, stop, told)

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(20)
        yield addresses
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()
