"""The ``kvlease`` command. Subcommands are imported when they are called, so that
``kvlease settings`` never waits for what only ``kvlease serve`` needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from kvlease import __version__
from kvlease.config import ConfigError

# Name → "module:attribute". Help lists them in this order: from the first thing a new
# user types to the last.
_COMMANDS = {
    "up": "kvlease.cli.up:up",
    "down": "kvlease.cli.up:down",
    "demo": "kvlease.cli.demo:demo",
    "talk": "kvlease.cli.talk:talk",
    "engines": "kvlease.cli.engines:engines",
    "drain": "kvlease.cli.engines:drain",
    "leases": "kvlease.cli.leases:leases",
    "trace": "kvlease.cli.trace:trace",
    "renew": "kvlease.cli.conversations:renew",
    "end": "kvlease.cli.conversations:end",
    "serve": "kvlease.cli.serve:serve",
    "engine": "kvlease.cli.engine:engine",
    "ca": "kvlease.cli.ca:ca",
    "model": "kvlease.cli.model:model",
    "settings": "kvlease.cli.settings:settings",
}

_EXAMPLES = """\b
Examples:
  kvlease model make build/model
  kvlease up --engines cpu --model build/model --dir build/stack --detach
  kvlease leases --dir build/stack --watch
  kvlease down --dir build/stack
"""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="kvlease")
def cli() -> None:
    """Leases on a decode engine's KV blocks, so that the next turn of a conversation reads
    them instead of computing them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line. What is wrong with the user's input or configuration ends
    with one sentence on stderr, exit code 1 or 2; never with a traceback."""
    try:
        result = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="kvlease",
            standalone_mode=False,
        )
    except ConfigError as error:
        click.echo(f"kvlease: {error}", err=True)
        sys.exit(2)
    except click.UsageError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"kvlease: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)  # the shell's code for a command that Ctrl-C ended
    except BrokenPipeError:
        # `kvlease leases | head`: the reader has seen enough.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        click.echo(f"kvlease: {error}", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)
