"""The page's addresses: its files, and the state that it asks for every two seconds."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from aiohttp import web

from kvlease.router.engines import Engines
from kvlease.router.errors import HttpError
from kvlease.router.leases import Leases, ServiceDown
from kvlease.router.readiness import Readiness
from kvlease.router.ui import state

SHOWN = 100
"""Conversations on the page: those whose turn ended last. The filter finds the others."""

MAX_FILTER = 200

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

_HEADERS = {
    # Nothing but this router's own files, and nothing inline.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Ui:
    """``off_because``: a sentence, where the page is not to be shown."""

    def __init__(
        self,
        engines: Engines,
        readiness: Readiness,
        leases: Leases,
        *,
        jaeger_url: str,
        off_because: str,
    ) -> None:
        self._engines = engines
        self._readiness = readiness
        self._leases = leases
        self._jaeger_url = jaeger_url
        self._off_because = off_because
        folder = files(__package__)
        self._files = {
            name: folder.joinpath(name).read_bytes() for name in ("ui.html", "ui.css", "ui.js")
        }

    @property
    def is_on(self) -> bool:
        """Whether the page is shown."""
        return not self._off_because

    def add_to(self, app: web.Application) -> None:
        """Adds ``/ui`` and what is under it."""
        app.router.add_get("/ui", self._page)
        app.router.add_get("/ui/", self._page)
        app.router.add_get("/ui/state", self._state)
        app.router.add_get("/ui/{name:ui\\.(css|js)}", self._file)

    async def _page(self, _: web.Request) -> web.Response:
        return self._send("ui.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._send(request.match_info["name"])

    def _send(self, name: str) -> web.Response:
        self._check()
        return web.Response(
            body=self._files[name],
            content_type=_TYPES[name.rpartition(".")[2]],
            charset="utf-8",
            headers=_HEADERS,
        )

    async def _state(self, request: web.Request) -> web.Response:
        self._check()
        wanted = request.query.get("filter", "")[:MAX_FILTER]
        now = time.time()
        shown: dict[str, Any] = {
            "problem": await self._readiness.unready_reason()
            or " ".join(self._readiness.warnings()),
            "engines": [state.engine(*row) for row in self._engines.overview()],
            "conversations": None,  # not known
            "total": 0,
        }
        try:
            found = await self._leases.conversations(SHOWN, wanted)
        except ServiceDown as down:
            shown["problem"] = str(down)
        else:
            shown["total"] = found.total_size
            shown["conversations"] = [
                state.conversation(each, now, self._jaeger_url) for each in found.conversations
            ]
        response = web.json_response(shown, headers=_HEADERS)
        response.enable_compression()
        return response

    def _check(self) -> None:
        if self._off_because:
            raise HttpError(404, self._off_because, "ui_off")


def off_because(setting: str, has_keys: bool) -> str:
    """Why the page is off, as a sentence; empty: it is on. ``setting`` is ``ui``."""
    if setting == "off":
        return "The page is off: set ui=on."
    if setting == "auto" and has_keys:
        return (
            "The page is off because api_keys_file is set, and it shows every tenant's "
            "conversations without a key: set ui=on where only operators reach the router."
        )
    return ""
