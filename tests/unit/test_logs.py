"""Log lines as a collector reads them: one line an event, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
