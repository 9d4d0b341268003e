"""A headless Chromium for tests, driven by Playwright: the system's, which
``scripts/ensure-chromium`` installs where it may."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, async_playwright
from required import unavailable

_SCRIPT = Path(__file__).parent.parent / "scripts" / "ensure-chromium"


@functools.cache
def chromium_binary() -> str:
    """Where it is. Where it cannot be had the test is skipped, or fails where engines are
    required."""
    ended = subprocess.run([str(_SCRIPT)], capture_output=True, text=True, timeout=170, check=False)
    if ended.returncode:
        unavailable(f"this test needs Chromium: {ended.stderr.strip()}")
    return ended.stdout.split()[-1]


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """One for a test; it is gone at the end."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium_binary(),
            # Root has no sandbox, and containers little shared memory.
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        try:
            yield browser
        finally:
            await browser.close()
