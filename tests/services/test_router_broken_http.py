"""Requests that are not valid HTTP: an error that clients can read, and one line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest
from router_stack import Stack, running
from structlog.testing import capture_logs

POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running() as made:
        yield made


async def answer_to(stack: Stack, raw: bytes) -> tuple[bytes, bytes]:
    """Head and body."""
    host, _, port = stack.router.addresses["router_http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "HTTP/2 is not spoken here"),
        (POST + b"X-Key: sk-" + b"a" * 9000 + b"\r\n\r\n", "longer than 8190 bytes"),
        (POST + b"Content-Length: secret\r\n\r\n", "not valid HTTP/1.1: Invalid character in Con"),
        (POST + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", "cannot be decoded"),
    ],
    ids=["http2", "long header", "bad length", "bad gzip"],
)
async def test_a_broken_request_is_answered_in_json_and_is_one_line(
    stack: Stack, raw: bytes, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with capture_logs() as lines, caplog.at_level(logging.INFO):
        head, body = await answer_to(stack, raw)

    assert head.split(b"\r\n")[0].endswith(b" 400 Bad Request")
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert sentence in error["message"]
    assert error["type"] == "invalid_request_error"
    assert [line["event"] for line in lines if line["log_level"] != "info"] == ["broken request"]
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]
    assert b"sk-" not in body
    assert "secret" not in str(lines)


async def test_a_connection_that_speaks_tls_is_refused_quietly(stack: Stack) -> None:
    hello = bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(100)
    with capture_logs() as lines:
        _, body = await answer_to(stack, hello)
    assert "use an http:// address" in json.loads(body)["error"]["message"]
    assert not [line for line in lines if line["log_level"] != "info"]
