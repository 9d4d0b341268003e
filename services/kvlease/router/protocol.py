"""What clients get, and what is logged, for requests that are not valid HTTP: an error in
OpenAI's shape, and one line.

aiohttp answers them below the application, with a traceback in the log and plain text,
and has no hook for it: so its protocol is derived from.
"""

from __future__ import annotations

from typing import Any

import structlog
from aiohttp import http_exceptions, web

from kvlease.router.errors import HttpError

_log = structlog.get_logger("kvlease.router")

_CLIENTS_FAULT = (http_exceptions.HttpProcessingError, web.RequestPayloadError)


def replace(runner: web.AppRunner) -> None:
    """For connections that ``runner``, which has been set up, will take."""
    assert runner.server is not None
    runner.server.__class__ = _Server


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        handler = super().__call__()
        handler.__class__ = _Protocol
        return handler


class _Protocol(web.RequestHandler):
    __slots__ = ()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if isinstance(error, _CLIENTS_FAULT):
            peer = self.transport.get_extra_info("peername") if self.transport else None
            _log.warning("broken request", reason=_reason(error), client=peer[0] if peer else "")
        else:
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Logs; raises ConnectionError where an answer has begun."""
        super().handle_error(request, status, exc, message)
        if isinstance(exc, _CLIENTS_FAULT):
            error = HttpError(status, _reason(exc), "invalid_http")
        else:
            error = HttpError(
                status, "The router failed: its log says why.", "internal_error", "server_error"
            )
        response = error.response()
        response.force_close()
        return response


def _reason(error: BaseException) -> str:
    """Without the bytes that were sent: they may be a key or a prompt."""
    match error:
        case http_exceptions.LineTooLong():
            return "A header, or the request's first line, is longer than 8190 bytes: send less."
        case http_exceptions.ContentEncodingError() | web.RequestPayloadError():
            return (
                "The request body cannot be decoded: send it plain, or check its Content-Encoding."
            )
        case http_exceptions.BadHttpMethod() | http_exceptions.BadStatusLine():
            return "This is not HTTP/1.1: use an http:// address."
        case http_exceptions.BadHttpMessage() if "PRI" in error.message:  # HTTP/2's preface
            return "This is not HTTP/1.1: HTTP/2 is not spoken here."
        case http_exceptions.HttpProcessingError():
            what = error.message.partition("\n")[0].partition(":")[0]
            return f"This is not valid HTTP/1.1: {what}."
        case _:
            return "This is not valid HTTP/1.1."
