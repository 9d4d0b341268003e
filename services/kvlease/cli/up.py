"""``kvlease up`` and ``kvlease down``: a whole local stack."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import click
from click.core import ParameterSource

from kvlease.cli import stack as local
from kvlease.cli.parts import Options

DEFAULT_DIRECTORY = Path(".kvlease")
_WATCH_EVERY_S = 0.5

_UP_EXAMPLES = """\b
Examples:
  kvlease up                                   etcd, services, a prefill and a decode engine
  kvlease up --detach --dir build/stack        the same, and back to the shell when it is ready
  kvlease up --engines none --lease-replicas 2 --routers 2
  kvlease up --store memory --set retention_ttl=60 --engine-arg "--max-num-seqs 4"
"""

_DOWN_EXAMPLES = """\b
Examples:
  kvlease down
  kvlease down --dir build/stack
"""

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Logs, etcd's data and endpoints.json of the stack.",
)


@click.command(epilog=_UP_EXAMPLES, context_settings={"max_content_width": 100})
@directory_option
@click.option(
    "--store",
    type=click.Choice(["etcd", "memory"]),
    default="etcd",
    show_default=True,
    help="Where the services keep their state.",
)
@click.option("--etcd", default="", metavar="HOST:PORT", help="An etcd that runs already.")
@click.option(
    "--engines",
    type=click.Choice(["cpu", "none"]),
    default="cpu",
    show_default=True,
    help="vLLM on the CPU, or services only.",
)
@click.option("--prefill", type=click.IntRange(1), default=1, help="Prefill engines. [default: 1]")
@click.option("--decode", type=click.IntRange(1), default=1, help="Decode engines. [default: 1]")
@click.option("--routers", type=click.IntRange(1), default=1, help="Routers. [default: 1]")
@click.option(
    "--lease-replicas", type=click.IntRange(1), default=1, help="Lease services. [default: 1]"
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The model's directory. [default: the small model, made in DIR/model]",
)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A setting of kvlease."
)
@click.option(
    "--engine-arg",
    "engine_arguments",
    multiple=True,
    metavar="ARGUMENTS",
    help='More arguments for vLLM, as in "--max-num-seqs 4"; may be repeated.',
)
@click.option(
    "--p-prefix-cache/--no-p-prefix-cache",
    "prefill_prefix_cache",
    default=True,
    show_default=True,
    help="Whether prefill engines keep prompts in a cache of their own, too.",
)
@click.option(
    "--traces/--no-traces",
    default=True,
    show_default=True,
    help="Whether the latest traces are kept, for `kvlease trace`; they also go to "
    "OTEL_EXPORTER_OTLP_ENDPOINT, if that is set.",
)
@click.option("--detach", is_flag=True, help="Return when it is ready; `kvlease down` ends it.")
def up(
    directory: Path,
    store: Literal["etcd", "memory"],
    etcd: str,
    engines: Literal["cpu", "none"],
    prefill: int,
    decode: int,
    routers: int,
    lease_replicas: int,
    model: Path | None,
    assignments: tuple[str, ...],
    engine_arguments: tuple[str, ...],
    prefill_prefix_cache: bool,
    traces: bool,
    detach: bool,
) -> None:
    """Starts etcd, the services and engines on 127.0.0.1, waits until they are ready, and
    writes their addresses to DIR/endpoints.json."""
    if engines == "none":
        _refuse_for_engines("prefill", "decode", "model", "engine_arguments")
    options = Options(
        directory=directory,
        store=store,
        etcd=etcd,
        prefill=prefill,
        decode=decode,
        routers=routers,
        lease_replicas=lease_replicas,
        engines=engines,
        model=model,
        assignments=assignments,
        engine_arguments=tuple(word for text in engine_arguments for word in _words(text)),
        prefill_prefix_cache=prefill_prefix_cache,
        traces=traces,
    )
    _run(options, detach=detach)


def _refuse_for_engines(*names: str) -> None:
    """Options of engines that there will be none of."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = next(item for item in context.command.params if item.name == name).opts[0]
            raise click.UsageError(f"{option} has no effect with --engines none: leave one out")


def _run(options: Options, *, detach: bool) -> None:
    stack = local.Stack(options, progress=lambda line: click.echo(f"up: {line}"), owner=True)
    started = time.monotonic()
    with interruptible(stack):
        stack.start()
        click.echo(f"up: ready after {time.monotonic() - started:.1f} s")
        click.echo(_summary(stack))
        if detach:
            stack.leave()
            return
        click.echo("up: Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            _watch(stack)


@contextlib.contextmanager
def interruptible(stack: local.Stack) -> Iterator[None]:
    """Whatever ends the command inside (Ctrl-C, SIGTERM, a closed terminal, a failure)
    ends the stack, unless it was left to run; a second Ctrl-C does so at once. A part's
    failure becomes the command's."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup
        signal.signal(number, _interrupt)
    try:
        try:
            yield
        finally:
            stack.stop()
    except local.StackError as error:
        raise click.ClickException(str(error)) from None
    finally:
        # Does nothing, unless an interrupt has broken off what was above.
        stack.stop(at_once=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _watch(stack: local.Stack) -> None:
    """Returns when nothing runs any more."""
    while stack.running:
        for name in stack.ended():
            click.echo(f"up: {name} has ended; its log: {stack.log(name)}", err=True)
        time.sleep(_WATCH_EVERY_S)


def _summary(stack: local.Stack) -> str:
    endpoints = stack.endpoints
    lines = [
        ("router, OpenAI's API", endpoints["router_http"] + "/v1"),
        ("router, live page", endpoints["router_http"] + "/ui"),
        ("router, gRPC", endpoints["router_grpc"]),
        ("lease service", ", ".join(endpoints["lease_replicas_grpc"])),
        ("registry", endpoints["registry_grpc"]),
        ("etcd", endpoints["etcd"] or "none: the embedded store"),
        ("traces", endpoints["traces"] or "not kept"),
        *((e["engine_id"], e["http"]) for e in endpoints["prefill"] + endpoints["decode"]),
        ("all of it", str(stack.options.directory / "endpoints.json")),
    ]
    return "\n".join(f"  {name:<22}{address}" for name, address in lines)


@click.command(epilog=_DOWN_EXAMPLES)
@directory_option
@click.option("--json", "as_json", is_flag=True, help="Print the names as a JSON list.")
def down(directory: Path, as_json: bool) -> None:
    """Ends the stack of DIR: every process that was started for it, and no other."""
    try:
        ended = local.down(
            directory,
            progress=lambda line: None if as_json else click.echo(f"down: {line}"),
        )
    except local.StackError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(ended))
    elif not ended:
        click.echo(f"down: nothing runs in {directory}")


def _words(text: str) -> list[str]:
    """An --engine-arg as a shell would split it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} cannot be split into words: {error}", param_hint="--engine-arg"
        ) from None
