"""The waterfall of a real turn: starts a stack, runs three turns, has `kvlease trace` show
the last one.

.venv/bin/python bench/waterfall.py            # about a minute
.venv/bin/python bench/waterfall.py --write README.md
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.turns import Client, text

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chars", type=int, default=4000, help="length of the first prompt")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it there, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options = Options(directory=Path(directory), prefill_prefix_cache=False, traces=True)
        with Stack(options, progress=lambda line: print(line, file=sys.stderr)) as stack:
            client = Client(stack.endpoints["router_http"], "model")
            shown = show(stack, run(client, asked.chars))
            print(shown)
            if asked.write:
                write(asked.write, "bench/waterfall.py", shown)


def run(client: Client, chars: int) -> str:
    """Three turns; the last one's trace id."""
    conversation = "books-42"
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


def write(file: Path, marker: str, output: str) -> None:
    """Replaces what stands between ``<!-- marker -->`` and the next ``<!-- end -->``."""
    block = "".join(f"    {line}".rstrip() + "\n" for line in output.rstrip().splitlines())
    between = re.compile(f"(<!-- {re.escape(marker)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, found = between.subn(lambda match: f"{match[1]}\n{block}\n{match[2]}", file.read_text())
    if found != 1:
        raise SystemExit(f"{file} has {found} places for {marker}, not one")
    file.write_text(text)


if __name__ == "__main__":
    main()
