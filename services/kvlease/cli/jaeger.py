"""Traces from Jaeger's query service, or from the local stack, which answers as it does.

``/api/traces`` is the JSON that Jaeger's own pages were made with, in version 1 and 2.
Times in it are microseconds.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from kvlease import direct
from kvlease.cli.text import clean

ROUTER = "kvlease-router"
"""The service whose ``turn`` spans are turns."""

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times are seconds since 1970."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none in its trace."""
    start: float
    end: float
    tags: Mapping[str, Any]
    follows: tuple[str, ...] = ()
    """Ids of the traces that it links to."""

    @property
    def failure(self) -> str:
        """Why it failed, in words; empty if it did not."""
        if not self.tags.get("error"):
            return ""
        return str(self.tags.get("otel.status_description") or "failed")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, or a part of one. ``raw`` is Jaeger's own JSON of it."""

    raw: Mapping[str, Any]
    spans: tuple[Span, ...]

    @property
    def turns(self) -> list[Span]:
        """Its ``turn`` spans, in their order. A client's trace may hold several."""
        found = [span for span in self.spans if (span.service, span.name) == (ROUTER, "turn")]
        return sorted(found, key=lambda span: span.start)

    def under(self, root: Span) -> Trace:
        """``root`` and everything below it."""
        children: dict[str, list[Span]] = {}
        for span in self.spans:
            children.setdefault(span.parent_id, []).append(span)
        found, left = [root], [root]
        while left:
            below = children.get(left.pop().span_id, [])
            found += below
            left += below
        ids = {span.span_id for span in found}
        raw = [span for span in self.raw["spans"] if span["spanID"] in ids]
        return Trace({**self.raw, "spans": raw}, tuple(found))


class Jaeger:
    """A client of the query service at ``url``. What goes wrong is a
    :class:`click.ClickException` with a sentence."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def trace(self, trace_id: str) -> Trace | None:
        """The trace, as far as it has arrived; None if there is none."""
        found = self._get(f"/api/traces/{trace_id}", {})
        return _trace(found[0]) if found else None

    def turns(self, tags: Mapping[str, str], limit: int) -> list[Trace]:
        """Up to ``limit`` of the latest traces that have a turn with these tags."""
        query = {"service": ROUTER, "operation": "turn", "limit": str(limit)}
        if tags:
            query["tags"] = json.dumps(dict(tags))
        return [_trace(found) for found in self._get("/api/traces", query)]

    def _get(self, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        try:
            with _opener(url).open(url, timeout=_TIMEOUT_S) as response:
                body = json.load(response)
            data = body["data"]
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise self._failure(error) from None
        return data or []

    def _refused(self, error: urllib.error.HTTPError) -> list[dict[str, Any]]:
        try:
            problems = json.load(error)["errors"]
            message = str(problems[0]["msg"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            raise self._failure(error) from None
        if error.code == 404:
            return []
        raise click.ClickException(f"Jaeger at {self.url} refuses: {clean(message)}")

    def _failure(self, error: Exception) -> click.ClickException:
        if isinstance(error, urllib.error.HTTPError):
            why = f"it answers with status {error.code}"
        elif isinstance(error, OSError | http.client.HTTPException):
            reason = getattr(error, "reason", error)
            return click.ClickException(
                f"no Jaeger answers at {self.url} ({reason}): start it, name another with "
                "--jaeger, or the directory of a local stack with --dir"
            )
        else:
            why = "its answer is not Jaeger's JSON"
        return click.ClickException(
            f"{self.url} is not Jaeger's query service ({why}): name the address of its pages, "
            "such as http://127.0.0.1:16686"
        )


def _opener(url: str) -> urllib.request.OpenerDirector:
    if urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1"):
        return direct.opener()
    return urllib.request.build_opener()


def _trace(raw: Mapping[str, Any]) -> Trace:
    services = {key: process["serviceName"] for key, process in raw["processes"].items()}
    return Trace(raw, tuple(_span(span, services) for span in raw["spans"]))


def _span(raw: Mapping[str, Any], services: Mapping[str, str]) -> Span:
    start = raw["startTime"] / 1e6
    return Span(
        name=raw["operationName"],
        service=services.get(raw["processID"], ""),
        trace_id=raw["traceID"],
        span_id=raw["spanID"],
        parent_id=next(_references(raw, "CHILD_OF", "spanID"), ""),
        start=start,
        end=start + raw["duration"] / 1e6,
        tags={tag["key"]: tag["value"] for tag in raw["tags"]},
        follows=tuple(_references(raw, "FOLLOWS_FROM", "traceID")),
    )


def _references(raw: Mapping[str, Any], kind: str, what: str) -> Iterator[str]:
    return (item[what] for item in raw["references"] or () if item["refType"] == kind)
