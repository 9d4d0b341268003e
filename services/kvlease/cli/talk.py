"""``kvlease talk``: does reuse work there?"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.table import Table

from kvlease import config
from kvlease.cli import records, tables
from kvlease.cli.chat import Message, NobodyThere, TurnFailed, ask, connect, send, words
from kvlease.cli.text import clean
from kvlease.cli.up import DEFAULT_DIRECTORY
from kvlease.config import ConfigError
from kvlease.prefix import TARGET_CHUNK_TOKENS

_LATER_CHARS = 300
_ANSWER_TOKENS = 24
_SHORT_TOKENS = 2 * TARGET_CHUNK_TOKENS

_EXAMPLES = """\b
Examples:
  kvlease talk
  kvlease talk --url https://kvlease.example.com --model Qwen/Qwen3-8B --size 40000
  kvlease talk --turns 5 --json | jq '.turns[].outcome'
"""


@dataclass(frozen=True)
class Turn:
    """What became of one turn, as clients see it."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    outcome: str
    ttft_s: float
    trace_id: str


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.option(
    "--url",
    metavar="URL",
    help="The router. [default: the stack in ./.kvlease if there is one, else where "
    "router_listen says]",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="The local stack in DIR (`kvlease up --dir`).",
)
@click.option("--model", default="", help="[default: the one model that is served]")
@click.option("--turns", type=click.IntRange(2, 50), default=3, show_default=True)
@click.option(
    "--size",
    type=click.IntRange(1, 1_000_000),
    default=3000,
    show_default=True,
    metavar="CHARACTERS",
    help="Of the first prompt. (The small model has a token for each.)",
)
@click.option(
    "--api-key",
    default="",
    envvar="KVLEASE_API_KEY",
    show_envvar=True,
    help="Where the router asks for one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def talk(
    url: str | None,
    directory: Path | None,
    model: str,
    turns: int,
    size: int,
    api_key: str,
    as_json: bool,
) -> None:
    """Holds a short conversation with the model and shows what became of each turn.

    Fails if no turn after the first was a hit.
    """
    if url and directory:
        raise click.UsageError("--url and --dir name two places: give one of them")
    base_url = _checked(url) if url else _router(directory)
    conversation = f"talk-{time.time_ns():x}"
    found: list[Turn] = []
    failure = ""
    try:
        model = model or _only_model(base_url, api_key)
        for turn in _converse(base_url, model, conversation, turns, size, api_key):
            found.append(turn)
            if not as_json:
                outcome = clean(turn.outcome)
                click.echo(f"talk: turn {turn.turn}: {outcome}, {turn.ttft_s:.2f} s", err=True)
    except NobodyThere as error:
        failure = (
            f"{base_url}: {error}: start one (`kvlease up`, `docker compose up`), or name its "
            "address with --url or --dir"
        )
    except TurnFailed as error:
        failure = f"{base_url}: {error}"
    if failure and not found:
        raise click.ClickException(failure)
    if as_json:
        told = {"conversation_id": conversation, "model": model, "turns": list(map(asdict, found))}
        click.echo(json.dumps(told, indent=2))
    else:
        tables.new_console().print(_table(conversation, found))
    if failure:
        raise click.ClickException(f"turn {len(found) + 1} failed: {failure}")
    if not any(turn.outcome == "hit" for turn in found[1:]):
        raise click.ClickException(no_hit(found))


def _router(directory: Path | None) -> str:
    if directory is None and (DEFAULT_DIRECTORY / records.ENDPOINTS).exists():
        directory = DEFAULT_DIRECTORY
    if directory is not None:
        return str(records.load_endpoints(directory)["router_http"])
    settings = config.load()
    host, _, port = settings.router_listen.rpartition(":")
    # Who listens everywhere is reached here.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"{'https' if settings.router_tls_cert else 'http'}://{host}:{port}"


def _checked(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no URL of a router: write it as http://127.0.0.1:7480")
    return f"{parts.scheme}://{parts.netloc}"


def _only_model(base_url: str, api_key: str) -> str:
    """Raises :class:`TurnFailed`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = connect(base_url)
    try:
        _, response = send(base_url, connection, "GET", "/v1/models", None, headers)
        names = sorted({str(each["id"]) for each in json.loads(response.read())["data"]})
    except (OSError, http.client.HTTPException) as error:
        raise TurnFailed(f"the answer broke off: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise TurnFailed("what answers there is not a router: /v1/models lists no models") from None
    finally:
        connection.close()
    if len(names) != 1:
        served = clean(", ".join(names)) or "none"
        raise TurnFailed(f"name the model with --model; those served are: {served}")
    return names[0]


def _converse(
    base_url: str, model: str, conversation: str, turns: int, size: int, api_key: str
) -> Iterator[Turn]:
    messages: list[Message] = []
    for number in range(1, turns + 1):
        # Text of its own each time, so that no engine's prefix cache knows it.
        seed = time.time_ns()
        messages.append(
            {"role": "user", "content": words(size if number == 1 else _LATER_CHARS, seed=seed)}
        )
        answer = ask(
            base_url,
            model,
            messages,
            conversation=conversation,
            max_tokens=_ANSWER_TOKENS,
            api_key=api_key,
        )
        messages.append({"role": "assistant", "content": answer.text})
        yield Turn(
            number,
            answer.prompt_tokens,
            answer.reused_tokens,
            answer.outcome,
            round(answer.ttft_s, 4),
            answer.trace_id,
        )


def _table(conversation: str, turns: Sequence[Turn]) -> Table:
    numbers = ("turn", "prompt tokens", "reused tokens", "TTFT")
    table = tables.new(
        *("turn", "prompt tokens", "reused tokens", "outcome", "TTFT", "trace"),
        title=f"conversation {conversation}",
        numbers=numbers,
    )
    for turn in turns:
        table.add_row(
            str(turn.turn),
            f"{turn.prompt_tokens:,}",
            f"{turn.reused_tokens:,}",
            clean(turn.outcome) or "none",
            f"{turn.ttft_s:.2f} s",
            clean(turn.trace_id),
        )
    return table


def no_hit(turns: Sequence[Turn]) -> str:
    """What became of the turns after the first, and what to look at or to change."""
    outcomes = sorted({turn.outcome for turn in turns[1:]})
    if outcomes == [""]:
        return "the answers say nothing of reuse: is this kvlease's router, or an engine?"
    told = (
        f"no turn was a hit, but {', '.join(outcomes)}: the README says what that means, and "
        f"`kvlease trace {turns[-1].trace_id}` what the last turn did"
    )
    short = turns[-2].prompt_tokens < _SHORT_TOKENS
    if "miss_short" in outcomes or ("miss_prefix" in outcomes and short):
        told += (
            ". The conversation may be too short to be worth reading (no less than a chunk of "
            f"{TARGET_CHUNK_TOKENS} tokens is read): try a larger --size"
        )
    return clean(told)
