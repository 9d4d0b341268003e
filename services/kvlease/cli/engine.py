"""``kvlease engine``: start a vLLM engine with kvlease's connector."""

from __future__ import annotations

import json
import os
import uuid

import click

from kvlease import config
from kvlease.cli import launch
from kvlease.config import ConfigError

# (HTTP, side channel) where the user names none.
_DEFAULT_PORTS: dict[launch.Role, tuple[int, int]] = {
    "prefill": (8100, 5600),
    "decode": (8200, 5700),
}

_EXAMPLES = """\b
Examples:
  kvlease engine prefill --model Qwen/Qwen3-8B --host 0.0.0.0 --advertise 10.0.0.7
  kvlease engine decode --cpu --model build/model --cpuset 1
  kvlease engine decode --model Qwen/Qwen3-8B --set retention_ttl=900 -- --tensor-parallel-size 2
  kvlease engine prefill --cpu --model build/model --print
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("role", type=click.Choice(["prefill", "decode"]))
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--model", required=True, help="The model's directory, or its name on a model hub.")
@click.option("--name", default="", help="What clients call the model. [default: directory's name]")
@click.option(
    "--engine-id", default="", help="Stays the same over restarts. [default: prefill-0 or decode-0]"
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where the HTTP server listens."
)
@click.option(
    "--advertise",
    default="",
    help="The host that routers and other engines reach it at. "
    "[default: --host, or this machine's name if that is 0.0.0.0]",
)
@click.option("--port", type=click.IntRange(1, 65535), help="HTTP port. [default: 8100 or 8200]")
@click.option(
    "--side-channel-port",
    type=click.IntRange(1, 65535),
    help="Port of NIXL's handshake. [default: 5600 or 5700]",
)
@click.option("--cpu", is_flag=True, help="For vLLM's CPU build: float32, one thread, no compiler.")
@click.option(
    "--nixl-backend",
    "nixl_backends",
    multiple=True,
    default=("UCX",),
    show_default=True,
    help="NIXL's transport (UCX, LIBFABRIC, ...); may be repeated.",
)
@click.option(
    "--cpuset", default="", metavar="CORES", help='Cores to run on, as in "0" or "0,2-3".'
)
@click.option(
    "--weights-version", default="", help="Tells leases of other weights of the same model apart."
)
@click.option(
    "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A setting of kvlease."
)
@click.option("--config", "config_file", metavar="FILE", help="Settings in a TOML file.")
@click.option("--print", "print_only", is_flag=True, help="Show the command; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Show it as JSON; start nothing.")
def engine(
    role: launch.Role,
    vllm_arguments: tuple[str, ...],
    model: str,
    name: str,
    engine_id: str,
    host: str,
    advertise: str,
    port: int | None,
    side_channel_port: int | None,
    cpu: bool,
    nixl_backends: tuple[str, ...],
    cpuset: str,
    weights_version: str,
    assignments: tuple[str, ...],
    config_file: str | None,
    print_only: bool,
    as_json: bool,
) -> None:
    """Starts vLLM as a prefill or decode engine of kvlease.

    What stands after -- goes to vLLM as it is and wins over what kvlease sets itself.
    """
    http_default, side_channel_default = _DEFAULT_PORTS[role]
    wanted = launch.Engine(
        role=role,
        model=model,
        engine_id=engine_id or f"{role}-0",
        incarnation=uuid.uuid4().hex,
        port=port or http_default,
        side_channel_port=side_channel_port or side_channel_default,
        name=name,
        host=host,
        advertise=advertise,
        cpu=cpu,
        nixl_backends=nixl_backends,
        weights_version=weights_version,
        settings=config.load(assignments, config_file=config_file),
        vllm_arguments=vllm_arguments,
    )
    cpus = parse_cpuset(cpuset)
    command = launch.build(wanted, env=os.environ, cpus=cpus)
    if as_json:
        click.echo(json.dumps({"argv": command.argv, "env": command.env, "cpus": cpus}, indent=2))
        return
    if print_only:
        click.echo(launch.shell_command(command))
        return
    launch.check(wanted, cpus=cpus)
    launch.execute(command)


def parse_cpuset(text: str) -> list[int]:
    """``"0,2-3"`` → [0, 2, 3]. Raises :class:`ConfigError`."""
    cores: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f'--cpuset {text!r} is not a list of cores such as "0" or "0,2-3"')
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)
