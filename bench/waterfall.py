"""The waterfall of a real turn: starts a stack, runs three turns, prints the last trace.

.venv/bin/python bench/waterfall.py            # about a minute
.venv/bin/python bench/waterfall.py --chars 6000
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.turns import Client, new_conversation, text
from otlp_receiver import Receiver, Span, receiving

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack
from kvlease.cli.waterfall import Bar, render

NOTES = {
    "turn": ("kvlease.outcome", "kvlease.prompt_tokens", "kvlease.reused_tokens"),
    "lease.claim": ("kvlease.outcome", "kvlease.usable_tokens"),
    "kv.pull": ("kvlease.tokens", "kvlease.bytes", "kvlease.source_engine"),
    "lease.grant": ("kvlease.tokens", "kvlease.blocks"),
}


def note(span: Span) -> str:
    """The attributes that matter most, without their prefix."""
    wanted = [name for name in NOTES.get(span.name, ()) if name in span.attributes]
    return ", ".join(f"{name.split('.')[-1]} {span.attributes[name]}" for name in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chars", type=int, default=4000, help="length of the first prompt")
    chars = parser.parse_args().chars
    with tempfile.TemporaryDirectory() as directory, receiving() as receiver:
        options = Options(
            directory=Path(directory),
            prefill_prefix_cache=False,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint},
        )
        with Stack(options, progress=lambda line: print(line, file=sys.stderr)) as stack:
            print(show(receiver, run(Client(stack.endpoints["router_http"], "model"), chars)))


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


def show(receiver: Receiver, trace_id: str) -> str:
    receiver.wait_for(trace_id, "turn", "decode", "kv.pull", "lease.grant", timeout_s=20)
    time.sleep(6)  # vLLM exports its own spans every five seconds
    return render(
        Bar(s.name, s.span_id, s.parent_id, s.start_ns / 1e9, s.end_ns / 1e9, note(s))
        for s in receiver.trace(trace_id)
    )


if __name__ == "__main__":
    main()
