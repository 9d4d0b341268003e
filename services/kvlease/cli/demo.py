"""``kvlease demo``: a conversation on real engines, with and without reuse."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from kvlease.cli import demo_report as report
from kvlease.cli import processes, records, tables
from kvlease.cli import stack as local
from kvlease.cli.chat import COMPARABLE, Answer, Message, TurnFailed, ask, words
from kvlease.cli.up import interruptible
from kvlease.config import ConfigError

# Characters (so tokens, with the small model) that each turn adds: a task with its
# material, three long tool results, a short question. The last turn has more than 6,000
# prompt tokens, fewer than 400 of them new.
_NEW_TEXT = (1900, 1350, 1350, 1350, 300)
_ANSWER_TOKENS = 32

_EXAMPLES = """\b
Examples:
  kvlease demo
  kvlease demo --dir build/demo --repeats 5
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Where results, plot and the stack's logs go.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 20),
    default=3,
    show_default=True,
    help="Measurements of each turn, each with reuse and without.",
)
def demo(directory: Path, repeats: int) -> None:
    """Runs a conversation of five turns on a prefill and a decode engine, each turn with
    reuse and without in alternation, and compares times and answers.

    Fails if a turn after the first is not a hit, or an answer differs.
    """
    _end_leftovers(directory)
    started = time.monotonic()
    stack = local.Stack(_options(directory), progress=lambda line: _say(line), owner=True)
    with interruptible(stack):
        _say("starting etcd, services, a prefill and a decode engine (about a minute)")
        stack.start()
        try:
            turns = _converse(stack.endpoints["router_http"], repeats)
        except TurnFailed as error:
            logs = directory / "logs"
            raise click.ClickException(f"{error} (the stack's logs: {logs})") from None
    files = report.write(turns, directory)
    tables.new_console().print(report.table(turns))
    _say(f"written: {', '.join(map(str, files))}")
    _say(f"ended after {time.monotonic() - started:.0f} s")
    wrong = report.misses(turns) + report.differences(turns)
    if wrong:
        raise click.ClickException("; ".join(wrong))
    _say("every turn after the first was a hit, and every answer is that of recomputation")


def _say(line: str) -> None:
    click.echo(f"demo: {line}")


def _end_leftovers(directory: Path) -> None:
    """What an earlier demo that was killed has left running."""
    owner = records.load(directory).owner
    if owner is not None and processes.is_alive(owner):
        raise ConfigError(
            f"another demo (process {owner.pid}) runs in {directory}: wait for its end, or "
            "choose another --dir"
        )
    local.down(directory, progress=lambda line: _say(f"an earlier demo: {line}"))


def _options(directory: Path) -> local.Options:
    has_etcd = shutil.which("etcd") is not None
    _say("store: etcd" if has_etcd else "store: the embedded one (there is no etcd in PATH)")
    return local.Options(
        directory=directory,
        store="etcd" if has_etcd else "memory",
        # What is measured is reading from the decode engine: the prefill engine must not
        # find the history in a cache of its own.
        prefill_prefix_cache=False,
    )


def _converse(base_url: str, repeats: int) -> list[report.Turn]:
    """Every measurement with reuse is a conversation of its own, which runs its turns once
    and in order: a turn asked twice in one conversation would find its own blocks. Those
    without reuse are others again, so that they neither read nor replace a lease of the
    first. All send the same prompts.
    """

    def turn(kind: str, repeat: int, messages: Sequence[Message]) -> Answer:
        return ask(
            base_url,
            "model",
            messages,
            conversation=f"demo-{kind}-{repeat}",
            reuse=kind != "off",
            max_tokens=_ANSWER_TOKENS,
            fields=COMPARABLE,
        )

    _warm_up(lambda messages: turn("warm-up", 0, messages))
    turns = []
    messages: list[Message] = [{"role": "system", "content": "You are a careful engineer."}]
    for number, length in enumerate(_NEW_TEXT, 1):
        messages.append({"role": "user", "content": words(length, seed=number)})
        answers: dict[str, list[Answer]] = {"off": [], "on": []}
        for repeat in range(repeats):
            # Alternating who goes first, so that neither always finds the warmer machine.
            for kind in ("off", "on") if repeat % 2 == 0 else ("on", "off"):
                answers[kind].append(turn(kind, repeat, messages))
        turns.append(report.Turn(number, on=answers["on"], off=answers["off"]))
        _say(
            f"turn {number}: {turns[-1].prompt_tokens:,} prompt tokens, {turns[-1].outcome}, "
            f"{turns[-1].ttft_off_s:.2f} s without reuse, {turns[-1].ttft_on_s:.2f} s with"
        )
        messages.append({"role": "assistant", "content": answers["off"][0].text})
    return turns


def _warm_up(turn: Callable[[Sequence[Message]], Answer]) -> None:
    """Two turns, not measured: the first pull between two engines shakes hands, and the
    first request on an engine allocates."""
    messages = [{"role": "user", "content": words(700, seed=0)}]
    answer = turn(messages)
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": words(200, seed=-1)},
    ]
    turn(messages)
    _say("warmed up with a conversation of two turns")
