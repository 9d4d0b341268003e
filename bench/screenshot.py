"""The README's picture of /ui: starts a stack, runs conversations of which some hit and some
miss, and has the page photographed as it then is.

.venv/bin/python bench/screenshot.py           # about two minutes; docs/images/ui.png
.venv/bin/python bench/screenshot.py --out /tmp/phone.png --width 360 --dark
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.turns import text

from kvlease.cli.chat import COMPARABLE, ask
from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack

ROOT = Path(__file__).parents[1]

CONVERSATIONS = {"books-42": 5, "films-7": 3, "travel-9": 2}
"""Turns of each. The last of films-7 comes with another system prompt."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "ui.png")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options = Options(directory=Path(directory), prefill_prefix_cache=False)
        with Stack(options, progress=lambda line: print(line, file=sys.stderr)) as stack:
            address = stack.endpoints["router_http"]
            talk(address)
            shoot(f"{address}/ui", arguments.out, arguments.width, dark=arguments.dark)
    print(f"{arguments.out}: {arguments.out.stat().st_size // 1000} kB")


def talk(address: str) -> None:
    """All turns, one conversation after the other; travel-9 is ended."""
    for seed, (name, turns) in enumerate(CONVERSATIONS.items()):
        messages = [{"role": "user", "content": text(1500, seed)}]
        for turn in range(turns):
            last = turn == turns - 1
            if name == "films-7" and last:
                messages.insert(0, {"role": "system", "content": "Answer in one word."})
            answer = ask(
                address, "model", messages, conversation=name, max_tokens=24, fields=COMPARABLE
            )
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": text(600, 10 * seed + turn)},
            ]
    ended = f"{address}/v1/conversations/travel-9"
    urllib.request.urlopen(urllib.request.Request(ended, method="DELETE"), timeout=10).close()


def shoot(url: str, out: Path, width: int, *, dark: bool) -> None:
    """The page, once it shows every conversation."""
    found = subprocess.run(
        [str(ROOT / "scripts" / "ensure-chromium")], stdout=subprocess.PIPE, text=True, check=True
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found.stdout.split()[-1],
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )
        page = browser.new_page(
            viewport={"width": width, "height": 400}, color_scheme="dark" if dark else "light"
        )
        page.goto(url)
        expect(page.locator("#conversations tbody tr")).to_have_count(
            len(CONVERSATIONS), timeout=20_000
        )
        page.screenshot(path=out, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
