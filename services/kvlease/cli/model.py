"""``kvlease model``: a small model for trials and tests, without a model hub."""

from __future__ import annotations

import time
from pathlib import Path

import click

_EXAMPLES = """\b
Examples:
  kvlease model make build/model
  kvlease engine prefill --cpu --model build/model
"""


@click.group(epilog=_EXAMPLES)
def model() -> None:
    """A small model to try kvlease with, made on the spot."""


@model.command(epilog=_EXAMPLES)
@click.argument("directory", type=click.Path(path_type=Path))
def make(directory: Path) -> None:
    """Makes a small model (Qwen3 architecture, 24 million parameters, 49 MB, one token a
    byte) in DIRECTORY. Its weights are random with a fixed seed: what it writes is noise,
    always the same noise, computed as a real model computes it."""
    from kvlease.cli.tiny_model import Made, make_model

    started = time.monotonic()
    if make_model(directory) is Made.ALREADY:
        click.echo(f"model: {directory} has it already")
    else:
        click.echo(f"model: made in {directory} ({time.monotonic() - started:.1f} s)")
