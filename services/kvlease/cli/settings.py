"""``kvlease settings``: every setting, its default and what it means."""

from __future__ import annotations

import json
from typing import Any

import click
from pydantic_core import PydanticUndefined

from kvlease.cli import tables
from kvlease.config import ENV_PREFIX, Settings

_EXAMPLES = f"""\b
Examples:
  kvlease settings
  kvlease settings --json
  kvlease serve lease --set claim_grace=60
  {ENV_PREFIX}CLAIM_GRACE=60 kvlease serve lease
"""


@click.command(epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--markdown", is_flag=True, help="As a table in Markdown, for the README.")
def settings(as_json: bool, markdown: bool) -> None:
    """Lists all settings. One is given by --set NAME=VALUE, else by the environment variable
    KVLEASE_<NAME>, else in a TOML file (--config, or KVLEASE_CONFIG)."""
    if as_json:
        click.echo(json.dumps(all_settings(), indent=2))
    elif markdown:
        click.echo(as_markdown())
    else:
        table = tables.new("setting", "default", "meaning", title="settings (durations: seconds)")
        for item in all_settings():
            table.add_row(item["name"], _text(item["default"]), item["description"])
        tables.new_console().print(table)


def all_settings() -> list[dict[str, Any]]:
    """Name, default and description of each, in the order of ``kvlease.config``."""
    result = []
    for name, field in Settings.model_fields.items():
        assert field.default is not PydanticUndefined, f"{name} has no default"
        result.append({"name": name, "default": field.default, "description": field.description})
    return result


def as_markdown() -> str:
    """The table of the README, between its markers."""
    rows = [
        f"| `{item['name']}` | {_code(item['default'])} | {_escape(item['description'])} |"
        for item in all_settings()
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def _text(default: Any) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def _code(default: Any) -> str:
    return f"`{_text(default)}`" if _text(default) else ""


def _escape(description: str) -> str:
    return description.replace("|", "\\|").replace("<", "&lt;")
