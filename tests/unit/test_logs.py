"""Log lines as a collector reads them: one line an event, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvlease import logs

PROGRAM = """
import logging, sys, structlog
from kvlease import logs
from kvlease.config import Settings
logs.configure(Settings(log_format=sys.argv[1], log_level=sys.argv[2]), service="lease")
log = structlog.get_logger("kvlease.x")
log.debug("too fine")
log.info("claimed", ticket_id="t1")
try:
    raise ValueError("bad\\nthing")
except ValueError:
    log.exception("failed", lease_id="l1")
logging.getLogger("grpc").warning("from a %s", "library")
logging.getLogger("grpc").info("chatter")
"""


def lines(log_format: str, level: str = "info") -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format, level],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert ended.stdout == ""
    return ended.stderr.splitlines()


def test_json_lines_are_whole_events() -> None:
    claimed, failed, library = map(json.loads, lines("json"))
    assert claimed["event"] == "claimed"
    assert (claimed["ticket_id"], claimed["service"], claimed["level"]) == ("t1", "lease", "info")
    assert claimed["timestamp"].endswith("Z")
    assert failed["error"] == "ValueError: bad\nthing"
    assert "Traceback" in failed["traceback"]
    assert (library["event"], library["level"], library["service"]) == (
        "from a library",
        "warning",
        "lease",
    )


def test_console_lines_are_one_an_event_too() -> None:
    claimed, failed, library = lines("console")
    assert "claimed" in claimed
    assert "ticket_id=t1" in claimed
    assert "failed" in failed
    assert "lease_id=l1" in failed
    assert "from a library" in library


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("warning", 2), ("error", 1)])
def test_lower_levels_are_left_out(level: str, count: int) -> None:
    assert len(lines("json", level)) == count


INSIDE = """
import logging, sys, structlog
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("HOST %(levelname)s [%(filename)s] %(message)s"))
host = logging.getLogger("vllm")
host.addHandler(handler)
host.setLevel("INFO")
host.propagate = False
from kvlease import logs
from kvlease.config import Settings
settings = Settings(log_format=sys.argv[1], log_level=sys.argv[2])
logs.configure_inside("vllm", settings, service="decode")
log = structlog.get_logger("kvlease.connector.decode")
log.debug("too fine")
log.info("not granted", reason="100 % full", **logs.turn_ids("c1", f"00-{'ab' * 16}-{'cd' * 8}-01"))
try:
    raise ValueError("bad\\nthing")
except ValueError:
    log.exception("failed")
assert type(logging.getLogger("vllm.later")) is logging.Logger
"""


def inside(log_format: str, level: str = "info") -> tuple[list[str], list[str]]:
    ended = subprocess.run(
        [sys.executable, "-c", INSIDE, log_format, level],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return ended.stdout.splitlines(), ended.stderr.splitlines()


def test_inside_of_another_program_lines_are_in_its_log() -> None:
    (refused, failed), rest = inside("console")
    assert refused.startswith("HOST INFO [<string>] not granted")  # the caller's file
    assert "reason='100 % full'" in refused
    assert "conversation_id=c1" in refused
    assert f"trace_id={'ab' * 16}" in refused
    assert failed.startswith("HOST ERROR [<string>] failed")
    assert "Traceback" in failed
    assert rest == []
    assert len(inside("console", "error")[0]) == 1


def test_inside_of_another_program_json_goes_to_stderr() -> None:
    printed, lines = inside("json")
    refused, failed = map(json.loads, lines)
    assert printed == []
    assert (refused["event"], refused["level"]) == ("not granted", "info")
    assert (refused["service"], refused["conversation_id"]) == ("decode", "c1")
    assert refused["trace_id"] == "ab" * 16
    assert refused["timestamp"].endswith("Z")
    assert "Traceback" in failed["traceback"]
    assert len(inside("json", "debug")[1]) == 3


@pytest.mark.parametrize("traceparent", ["", "none", "00-ab"])
def test_a_turn_without_a_trace_has_its_conversation_only(traceparent: str) -> None:
    assert logs.turn_ids("c1", traceparent) == {"conversation_id": "c1"}
    assert logs.turn_ids("", traceparent) == {}
