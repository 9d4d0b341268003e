"""Lists in pages (AIP-158): page_size, page_token, next_page_token."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import TypeVar

import grpc

from kvlease.mirror import Mirror
from kvlease.rpc import Refused

Record = TypeVar("Record")

DEFAULT_SIZE = 100
MAX_SIZE = 1000


def page(
    mirror: Mirror[Record], size: int, token: str, keep: Callable[[str, Record], bool]
) -> tuple[list[Record], str]:
    """Records that ``keep(key, record)`` lets pass, by key, and the token of the page
    after (empty on the last).

    Raises :class:`~kvlease.rpc.Refused`: INVALID_ARGUMENT with INVALID_PAGE_SIZE or
    INVALID_PAGE_TOKEN.
    """
    length = limit(size)
    found: list[Record] = []
    last = ""
    for entry in mirror.after(_decode(token) if token else ""):
        if not keep(entry.item.key, entry.record):
            continue
        if len(found) == length:
            return found, _encode(last)
        found.append(entry.record)
        last = entry.item.key
    return found, ""


def limit(size: int) -> int:
    """A page's length. Raises :class:`~kvlease.rpc.Refused`: INVALID_ARGUMENT with
    INVALID_PAGE_SIZE."""
    if size < 0:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_PAGE_SIZE",
            f"page_size is {size}: give 0 for the default of {DEFAULT_SIZE}, or up to {MAX_SIZE}",
        )
    return min(size or DEFAULT_SIZE, MAX_SIZE)


def _encode(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _decode(token: str) -> str:
    try:
        key = base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        key = ""
    if not key.startswith("/"):
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_PAGE_TOKEN",
            "page_token is not one of this service's: give the next_page_token of the page "
            "before, unchanged, or nothing",
        )
    return key
