"""Structured logs: one line an event, for people or for machines.

Lines that belong to a turn name it: ``conversation_id`` and ``trace_id``. What clients and
engines send each other (prompts, answers, headers) and secrets are in no line.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvlease.config import Settings

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# Libraries' loggers that say at INFO what we already log ourselves.
_QUIET = ("grpc", "opentelemetry", "aiohttp.access", "asyncio")


def configure(settings: Settings, **bound: str) -> None:
    """Sets up structlog to write to stderr, and the standard library's logging to look the
    same.

    ``bound`` stands in every line of this process, for example ``service="lease"``.
    """
    level = _LEVELS[settings.log_level]
    shared = _shared(bound)
    renderer = _renderer(settings.log_format)
    _configure_structlog(
        level, [*shared, _traceback_in_one_line, renderer], structlog.PrintLoggerFactory(sys.stderr)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _traceback_in_one_line,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def configure_inside(host: str, settings: Settings, **bound: str) -> None:
    """Sets up structlog inside of another program that logs by itself: lines go to its
    logger ``host`` (a child of it, in its format), or, as JSON, to stderr.

    The host's own level holds too. ``bound`` stands in every line that is JSON.
    """
    level = _LEVELS[settings.log_level]
    factory: Any
    if settings.log_format == "json":
        processors = [*_shared(bound), _traceback_in_one_line, _renderer("json")]
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors = [structlog.contextvars.merge_contextvars, _traceback_in_one_line, _PLAIN]
        factory = _ChildLoggers(host)
    _configure_structlog(level, processors, factory)


def turn_ids(conversation_id: str, traceparent: str = "") -> dict[str, str]:
    """What a line needs, so that someone finds the turn: the ids that there are."""
    parts = traceparent.split("-")  # version, trace id, span id, flags (W3C Trace Context)
    ids = {"conversation_id": conversation_id, "trace_id": parts[1] if len(parts) > 3 else ""}
    return {name: value for name, value in ids.items() if value}


class _ChildLoggers:
    """The standard library's loggers below another one."""

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def __call__(self, *args: Any) -> logging.Logger:
        host_class = logging.getLoggerClass()
        try:
            # Its loggers name the line that called structlog. It makes that the class of all
            # loggers to come, also of the host's, which need not go along.
            return structlog.stdlib.LoggerFactory()(".".join([self._parent, *args]))
        finally:
            logging.setLoggerClass(host_class)


def _configure_structlog(level: int, processors: list[Processor], factory: Any) -> None:
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )


_PLAIN = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
"""Event and fields; a host adds time and level itself."""


def _shared(bound: dict[str, str]) -> list[Processor]:
    def bind(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        bind,
    ]


def _renderer(log_format: str) -> Processor:
    if log_format == "json":
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False
    )


def _traceback_in_one_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """``exc_info`` becomes a field, so that a log collector that reads lines keeps it with
    its event."""
    error = _exception_of(event.pop("exc_info", None))
    if error is not None:
        event["error"] = event.get("error", f"{type(error).__name__}: {error}")
        event["traceback"] = "".join(traceback.format_exception(error))
    return event


def _exception_of(info: Any) -> BaseException | None:
    if isinstance(info, BaseException):
        return info
    if isinstance(info, tuple):
        found: tuple[type | None, BaseException | None, TracebackType | None] = info
        return found[1]
    return sys.exc_info()[1] if info else None
