"""What ``kvlease engines`` and ``kvlease leases`` share: tables, JSON, --watch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import grpc
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvlease.cli.services import as_dict

_WATCH_EVERY_S = 1.0


def show(
    fetch: Callable[[], list[Any]],
    table: Callable[[list[Any]], Table],
    *,
    as_json: bool,
    watch: bool,
    sentence: Callable[[grpc.RpcError], str],
    nothing: Callable[[], str],
) -> None:
    """Prints what ``fetch`` returns (messages), once or, with ``watch``, every second
    until Ctrl-C: as a table, or as one JSON array (a line each with ``watch``).

    A watch goes on through an outage, and says so in a ``sentence``: below the table, or
    on stderr. Only if the first call fails its grpc.RpcError is raised. Without a
    watch, ``nothing`` may say on stderr why there is nothing.
    """
    if not watch:
        found = fetch()
        if as_json:
            click.echo(_json(found, indent=2))
        else:
            new_console().print(table(found))
        if not found and (why := nothing()):
            click.echo(f"kvlease: {why}", err=True)
    elif as_json:
        told = ""
        for found, problem in _watched(fetch, sentence):
            if not problem:
                click.echo(_json(found, indent=None))
            elif problem != told:
                click.echo(f"kvlease: {problem}; asking again every second", err=True)
            told = problem
    else:
        with Live(console=new_console(), auto_refresh=False) as live:
            for found, problem in _watched(fetch, sentence):
                below = [Text(f"as it was before this: {problem}")] if problem else []
                live.update(Group(table(found), *below), refresh=True)


def _watched(
    fetch: Callable[[], list[Any]], sentence: Callable[[grpc.RpcError], str]
) -> Iterator[tuple[list[Any], str]]:
    """What there is, every second; in an outage what there was, and the problem."""
    found, problem = fetch(), ""
    while True:
        yield found, problem
        time.sleep(_WATCH_EVERY_S)
        try:
            found, problem = fetch(), ""
        except grpc.RpcError as error:
            problem = sentence(error)


def new_console() -> Console:
    """For tables. Cells are shown as they are: what a client put into a conversation id
    is not read as rich's markup. A file or pipe gets whole lines."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=200)


def _json(messages: list[Message], indent: int | None) -> str:
    return json.dumps([as_dict(message) for message in messages], indent=indent)


def new(*columns: str, title: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; ``numbers`` are the columns to align right."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def count(number: int, noun: str) -> str:
    """``"1 lease"``, ``"3 leases"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ago(timestamp: Timestamp, now_s: float) -> str:
    """Time from ``timestamp`` to now, for people."""
    return duration(now_s - timestamp.seconds - timestamp.nanos / 1e9)


def until(timestamp: Timestamp, now_s: float) -> str:
    """Time from now to ``timestamp``, for people."""
    return duration(timestamp.seconds + timestamp.nanos / 1e9 - now_s)


def duration(seconds: float) -> str:
    """``"42 s"``, ``"7 min 03 s"``, ``"2 h 05 min"``, ``"3 d 4 h"``; 0 s where negative."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
