"""What a test needs and does not find."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(reason: str) -> NoReturn:
    """Skips the test; fails it where everything must run (``KVLEASE_REQUIRE_ENGINES=1``, as
    in CI)."""
    if os.environ.get("KVLEASE_REQUIRE_ENGINES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
