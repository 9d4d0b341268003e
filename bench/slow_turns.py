"""Five slow turns and their traces, for docs/tracing.md: each time a conversation's second
turn, whose history of 3,000 tokens could be read, if nothing came between.

.venv/bin/python bench/slow_turns.py            # about three minutes
.venv/bin/python bench/slow_turns.py --write docs/tracing.md
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engines.look import holder_of
from engines.turns import Client, Message, text
from waterfall import show, write

from kvlease.cli.parts import Options
from kvlease.cli.stack import Stack

CHARS = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put them there, too")
    file = parser.parse_args().write
    with tempfile.TemporaryDirectory() as directory:
        options = Options(
            directory=Path(directory),
            decode=2,
            prefill_prefix_cache=False,
            traces=True,
            # Four times the defaults: what is to be seen is the fault, not a busy machine.
            assignments=("claim_timeout=0.2", "start_turn_timeout=0.16"),
        )
        with Stack(options, progress=lambda line: print(line, file=sys.stderr)) as stack:
            client = Client(stack.endpoints["router_http"], "model")
            begin(stack, client, "warm-up")
            for case in (nothing, rewritten, late, queued, unanswered, killed):
                print(f"running: {case.__name__}", file=sys.stderr, flush=True)
                shown = show(stack, case(stack, client))
                print(f"--- {case.__doc__}\n\n{shown}", flush=True)
                if file:
                    write(file, f"bench/slow_turns.py: {case.__name__}", shown)


def begin(
    stack: Stack, client: Client, conversation: str, headers: dict[str, str] | None = None
) -> list[Message]:
    """A first turn, up to its grant; what the second one sends."""
    messages = [{"role": "user", "content": text(CHARS, seed=1)}]
    first = client.chat(messages, conversation, headers=headers)
    holder_of(stack, conversation)
    return [
        *messages,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": text(200, seed=2)},
    ]


def nothing(stack: Stack, client: Client) -> str:
    """For comparison: nothing came between."""
    return client.chat(begin(stack, client, "books-1"), "books-1").trace_id


def rewritten(stack: Stack, client: Client) -> str:
    """The client has changed the beginning of its history."""
    messages = begin(stack, client, "books-2")
    messages[0] = {**messages[0], "content": "Today is Monday. " + messages[0]["content"]}
    return client.chat(messages, "books-2").trace_id


def late(stack: Stack, client: Client) -> str:
    """The client has come back after its blocks' retention."""
    messages = begin(stack, client, "books-3", {"x-kvlease-retain": "3"})
    time.sleep(4)
    return client.chat(messages, "books-3").trace_id


def queued(stack: Stack, client: Client) -> str:
    """The prefill engine works on another prompt."""
    messages = begin(stack, client, "books-4")
    other = [{"role": "user", "content": text(2 * CHARS, seed=3)}]
    with running(lambda: client.chat(other, "other")):
        time.sleep(0.5)
        return client.chat(messages, "books-4").trace_id


def unanswered(stack: Stack, client: Client) -> str:
    """The lease service hangs."""
    messages = begin(stack, client, "books-5")
    stack.send("lease-0", signal.SIGSTOP)
    try:
        return client.chat(messages, "books-5").trace_id
    finally:
        stack.send("lease-0", signal.SIGCONT)
        stack.wait_part("lease-0")


def killed(stack: Stack, client: Client) -> str:
    """The decode engine that held the blocks has been killed."""
    messages = begin(stack, client, "books-6")
    stack.kill(holder_of(stack, "books-6"))
    return client.chat(messages, "books-6").trace_id


@contextmanager
def running(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


if __name__ == "__main__":
    main()
