"""The waterfall of a real turn: starts a stack, runs three turns, has `kvlease trace` show
the last one.

.venv/bin/python bench/waterfall.py            # about a minute
.venv/bin/python bench/waterfall.py --chars 6000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.turns import Client, new_conversation, text

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chars", type=int, default=4000, help="length of the first prompt")
    chars = parser.parse_args().chars
    with tempfile.TemporaryDirectory() as directory:
        options = Options(directory=Path(directory), prefill_prefix_cache=False, traces=True)
        with Stack(options, progress=lambda line: print(line, file=sys.stderr)) as stack:
            print(show(stack, run(Client(stack.endpoints["router_http"], "model"), chars)))


def run(client: Client, chars: int) -> str:
    """Three turns; the last one's trace id."""
    conversation = new_conversation("waterfall")
    messages = [{"role": "user", "content": text(chars, seed=1)}]
    for seed in (2, 3):
        turn = client.chat(messages, conversation)
        messages += [
            {"role": "assistant", "content": turn.text},
            {"role": "user", "content": text(200, seed)},
        ]
    return client.chat(messages, conversation).trace_id


def show(stack: Stack, trace_id: str) -> str:
    """What `kvlease trace` prints."""
    command = [sys.executable, "-m", "kvlease.cli", "trace", trace_id]
    return subprocess.run(
        [*command, "--dir", str(stack.options.directory)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout


if __name__ == "__main__":
    main()
