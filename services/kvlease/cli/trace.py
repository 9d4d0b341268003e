"""``kvlease trace``: a turn as a waterfall."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from kvlease import config
from kvlease.cli import records
from kvlease.cli.jaeger import Jaeger, Span, Trace
from kvlease.cli.text import clean
from kvlease.cli.up import DEFAULT_DIRECTORY
from kvlease.cli.waterfall import Bar, render
from kvlease.config import ConfigError

DEFAULT_URL = "http://127.0.0.1:16686"

SETTLED_S = 2.5
"""Spans are sent in batches, after a second: a turn that has just ended is waited for."""

_LATEST = 50
"""Turns of a conversation that are looked at."""

_STATUS = "http.response.status_code"

_TRACE_ID = re.compile(r"[0-9a-f]{32}")

# What to say of a span behind its bar: attributes that it may have, in words.
_NOTES: Mapping[str, Mapping[str, str]] = {
    "route": {"kvlease.start_turn.failure": "{}"},
    "prefill": {"kvlease.engine_id": "{}", "kvlease.outcome": "{}"},
    "decode": {"kvlease.engine_id": "{}"},
    "lease.claim": {"kvlease.outcome": "{}", "kvlease.usable_tokens": "{} usable tokens"},
    "kv.pull": {
        "kvlease.tokens": "{} tokens",
        "kvlease.bytes": "{} bytes",
        "kvlease.source_engine": "from {}",
    },
    "llm_request": {"gen_ai.latency.time_in_queue": "{} s in queue"},
    "lease.grant": {
        "kvlease.tokens": "{} tokens",
        "kvlease.blocks": "{} blocks",
        "kvlease.detail": "{}",
    },
}

_EXAMPLES = """\b
Examples:
  kvlease trace last
  kvlease trace books-42 --turn 3
  kvlease trace 7edd97f3f64588fcdba3be23d1064c4c --jaeger http://jaeger:16686
  kvlease trace books-42 --json | jq '.spans[].operationName'
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("what", metavar="last|CONVERSATION|TRACE_ID")
@click.option(
    "--jaeger",
    "url",
    metavar="URL",
    help="Jaeger's query service, such as http://jaeger:16686. "
    f"[default: the stack in ./.kvlease if there is one, else jaeger_url, else {DEFAULT_URL}]",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="The local stack in DIR (`kvlease up --dir`).",
)
@click.option("--turn", type=click.IntRange(1), help="Of the conversation. [default: its last]")
@click.option("--tenant", default="", help="The conversation's, if several have one of that id.")
@click.option("--model", default="", help="The conversation's, if several have one of that id.")
@click.option("--json", "as_json", is_flag=True, help="Print the spans as Jaeger's JSON.")
def trace(
    what: str,
    url: str | None,
    directory: Path | None,
    turn: int | None,
    tenant: str,
    model: str,
    as_json: bool,
) -> None:
    """Shows what a turn spent its time on: the last one, a CONVERSATION's, or that of
    TRACE_ID (the response header x-kvlease-trace-id).

    Spans come from Jaeger, or from a local stack, which keeps the latest itself.
    """
    if url and directory:
        raise click.UsageError("--jaeger and --dir name two places: give one of them")
    jaeger = Jaeger(url or _local(directory) or config.load().jaeger_url or DEFAULT_URL)
    tags = {"kvlease.tenant": tenant, "gen_ai.request.model": model}
    tags = {name: value for name, value in tags.items() if value}
    if turn is not None:
        tags["kvlease.turn"] = str(turn)

    def find() -> Trace:
        return _find(jaeger, what, tags)

    found = _settled(find)
    if as_json:
        click.echo(json.dumps(found.raw, indent=2))
        return
    click.echo(show(found, width=_bar_width()))


def _local(directory: Path | None) -> str | None:
    """Where the stack of ``directory`` (default: of this one, if there is one) is asked."""
    if directory is None:
        if not (DEFAULT_DIRECTORY / records.ENDPOINTS).exists():
            return None
        directory = DEFAULT_DIRECTORY
    url = records.load_endpoints(directory).get("traces")
    if not url:
        raise ConfigError(
            f"the stack in {directory} keeps no traces: start it with --traces, or name a Jaeger "
            "with --jaeger"
        )
    return str(url)


def _find(jaeger: Jaeger, what: str, tags: Mapping[str, str]) -> Trace:
    if what == "last":
        return _last(jaeger, tags)
    if _TRACE_ID.fullmatch(what.lower()) and not tags:
        found = jaeger.trace(what.lower())
        if found is not None:
            return found
    return _of_conversation(jaeger, what, tags)


def _last(jaeger: Jaeger, tags: Mapping[str, str]) -> Trace:
    turns = [(turn, found) for found in jaeger.turns(tags, 20) for turn in found.turns]
    turns = [(turn, found) for turn, found in turns if _has(turn, tags)]
    if not turns:
        raise click.ClickException(
            f"there is no such turn at {jaeger.url} yet: send a request to the router, and see "
            "that the services export their spans (docs/tracing.md)"
        )
    turn, found = max(turns, key=lambda pair: pair[0].start)
    return found.under(turn)


def _of_conversation(jaeger: Jaeger, conversation: str, tags: Mapping[str, str]) -> Trace:
    wanted = {**tags, "kvlease.conversation": conversation}
    turns = [
        (turn, found)
        for found in jaeger.turns(wanted, _LATEST)
        for turn in found.turns
        if _has(turn, wanted)
    ]
    if not turns:
        raise click.ClickException(_nothing(jaeger, conversation, tags))
    owners = sorted(
        {(_text(t, "kvlease.tenant"), _text(t, "gen_ai.request.model")) for t, _ in turns}
    )
    if len(owners) > 1:
        names = "; ".join(f"tenant {tenant}, model {model}" for tenant, model in owners)
        raise click.ClickException(
            clean(f"there are {len(owners)} conversations {conversation}: {names}")
            + ". Name one with --tenant and --model"
        )
    turn, found = max(turns, key=lambda pair: pair[0].start)
    return found.under(turn)


def _nothing(jaeger: Jaeger, what: str, tags: Mapping[str, str]) -> str:
    if "kvlease.turn" in tags:
        said = f"there is no turn {tags['kvlease.turn']} of {what}"
    elif _TRACE_ID.fullmatch(what.lower()):
        said = f"there is no trace and no conversation {what}"
    else:
        said = f"there is no turn of a conversation {what}"
    return (
        f"{clean(said)} at {jaeger.url}: it may be older than what is kept there, still be "
        "running, or belong to another tenant or model"
    )


def _has(turn: Span, tags: Mapping[str, str]) -> bool:
    return all(_text(turn, name) == value for name, value in tags.items())


def _text(span: Span, name: str) -> str:
    return str(span.tags.get(name, ""))


def _settled(find: Callable[[], Trace]) -> Trace:
    """What ``find`` finds; once more if it has just ended, when all its spans are there."""
    found = find()
    left = max(span.end for span in found.spans) + SETTLED_S - time.time()
    if 0 < left <= SETTLED_S:
        time.sleep(left)
        found = find()
    return found


def _bar_width() -> int:
    """On a terminal there should be room for what stands around the bars."""
    if not sys.stdout.isatty():
        return 44
    return min(60, max(16, shutil.get_terminal_size().columns - 80))


def show(found: Trace, width: int = 44) -> str:
    """Its turns, each in a few lines, and the waterfall of all its spans."""
    heads = [_head(turn) for turn in found.turns] or [
        "the turn's own span is missing: its router died, or the turn still runs"
    ]
    bars = render((_bar(span) for span in found.spans), width, told="\n".join(heads))
    return "\n\n".join([*heads, bars])


def _head(turn: Span) -> str:
    return "\n".join(filter(None, [_what(turn), _how(turn), _where(turn), _after(turn)]))


def _what(turn: Span) -> str:
    conversation = _text(turn, "kvlease.conversation")
    number = _text(turn, "kvlease.turn")
    name = f"turn {number}" if number else "a turn"
    if conversation:
        name += f" of {conversation}"
    status = _text(turn, _STATUS)
    outcome = _text(turn, "kvlease.outcome") or (f"status {status}" if status else "no outcome")
    detail = _text(turn, "kvlease.detail")
    return clean(f"{name}: {outcome}" + (f" ({detail})" if detail else ""))


def _how(turn: Span) -> str:
    """Its tokens, its TTFT and its end, as far as they are known."""
    tags = turn.tags
    parts = []
    if "kvlease.prompt_tokens" in tags:
        parts.append(
            f"{tags['kvlease.prompt_tokens']:,} prompt tokens: "
            f"{tags.get('kvlease.reused_tokens', 0):,} reused, "
            f"{tags.get('kvlease.computed_tokens', 0):,} computed"
        )
    if "kvlease.ttft_s" in tags:
        parts.append(f"first token after {1000 * tags['kvlease.ttft_s']:,.1f} ms")
    if _STATUS in tags and "kvlease.outcome" in tags:  # else it stands in the first line
        parts.append(f"status {tags[_STATUS]}")
    if turn.failure:
        parts.append(f"failed: {turn.failure}")
    return clean("; ".join(parts))


def _where(turn: Span) -> str:
    engines = [
        engine
        for half in ("prefill", "decode")
        if (engine := _text(turn, f"kvlease.{half}.engine_id"))
    ]
    tenant, model = _text(turn, "kvlease.tenant"), _text(turn, "gen_ai.request.model")
    owner = [*([f"tenant {tenant}"] if tenant else []), *([f"model {model}"] if model else [])]
    started = datetime.fromtimestamp(turn.start, UTC)
    parts = [
        *([" to ".join(engines)] if engines else []),
        *([", ".join(owner)] if owner else []),
        f"{started:%Y-%m-%d %H:%M:%S} UTC",
        f"trace {turn.trace_id}",
    ]
    return clean("; ".join(parts))


def _after(turn: Span) -> str:
    """The turn whose blocks it was given."""
    return "; ".join(f"read what the turn of trace {trace_id} left" for trace_id in turn.follows)


def _bar(span: Span) -> Bar:
    return Bar(span.name, span.span_id, span.parent_id, span.start, span.end, _notes(span))


def _notes(span: Span) -> tuple[str, ...]:
    """Its failure, and the attributes that matter most."""
    failure: Sequence[str] = [f"failed: {span.failure}"] if span.failure else []
    known = [
        words.format(_value(span.tags[name]))
        for name, words in _NOTES.get(span.name, {}).items()
        if span.tags.get(name) not in (None, "", 0)
    ]
    return tuple(map(clean, [*failure, *known]))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
