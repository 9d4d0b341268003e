"""``kvlease engines`` and ``kvlease drain``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from rich.table import Table

from kvlease.cli import services, tables
from kvlease.cli.text import clean
from kvlease.v1 import registry_pb2, registry_pb2_grpc

_ENGINES_EXAMPLES = """\b
Examples:
  kvlease engines
  kvlease engines --dir build/stack --watch
  kvlease engines --json | jq '.[] | {engine_id, usage}'
"""

_DRAIN_EXAMPLES = """\b
Examples:
  kvlease drain decode-0
  kvlease drain decode-0 --dir build/stack
"""


@click.command(epilog=_ENGINES_EXAMPLES, context_settings={"max_content_width": 100})
@click.option("--model", default="", help="Only engines of this model.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, every field.")
@click.option("--watch", is_flag=True, help="Again every second, until Ctrl-C.")
@services.options
def engines(addresses: services.Addresses, model: str, as_json: bool, watch: bool) -> None:
    """Shows the registered engines and their KV blocks: in all, kept for leases, free."""
    registry = addresses.registry_service
    with registry.connection() as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        tables.show(
            lambda: list_engines(stub, model),
            _table,
            as_json=as_json,
            watch=watch,
            sentence=registry.sentence,
            nothing=lambda: unknown_model(list_engines(stub), model),
        )


def list_engines(
    stub: registry_pb2_grpc.RegistryStub, model: str = ""
) -> list[registry_pb2.Engine]:
    """All of them. Raises grpc.RpcError."""
    found: list[registry_pb2.Engine] = []
    token = ""
    while True:
        page = stub.ListEngines(
            registry_pb2.ListEnginesRequest(model=model, page_size=1000, page_token=token),
            timeout=services.TIMEOUT_S,
        )
        found += page.engines
        token = page.next_page_token
        if not token:
            return found


def registered(addresses: services.Addresses) -> list[registry_pb2.Engine]:
    """All engines; none where the registry does not answer."""
    try:
        with addresses.registry_service.connection() as channel:
            return list_engines(registry_pb2_grpc.RegistryStub(channel))
    except click.ClickException:
        return []


def unknown_model(everyone: Sequence[registry_pb2.Engine], model: str) -> str:
    """If there are engines and none serves ``model``: a sentence with those that are served."""
    known = {name for engine in everyone for name in (engine.model, *engine.other_models)}
    return _unknown("no engine serves the model", model, known)


def unknown_engine(everyone: Sequence[registry_pb2.Engine], engine_id: str) -> str:
    """If there are engines and none is called so: a sentence with those that there are."""
    return _unknown("there is no engine", engine_id, {engine.engine_id for engine in everyone})


def _unknown(what: str, name: str, known: set[str]) -> str:
    if not name or not known or name in known:
        return ""
    return clean(f"{what} {name!r}; there are: {', '.join(sorted(known))}")


def _table(found: list[registry_pb2.Engine]) -> Table:
    table = tables.new(
        *("engine", "role", "state", "model", "HTTP"),
        *("blocks", "retained", "free", "leases", "up for", "incarnation"),
        title=tables.count(len(found), "engine"),
        numbers=("blocks", "retained", "free", "leases", "up for"),
    )
    now_s = time.time()
    for engine in found:
        usage = engine.usage
        blocks = (
            [usage.total_blocks, usage.retained_blocks, usage.free_blocks, usage.retained_leases]
            if engine.HasField("usage")
            else ["-"] * 4
        )
        table.add_row(
            clean(engine.engine_id),
            role_word(engine.role),
            registry_pb2.EngineState.Name(engine.state).removeprefix("ENGINE_STATE_").lower(),
            "\n".join(map(clean, [engine.model, *engine.other_models])),
            clean(engine.http_address),
            *map(str, blocks),
            tables.ago(engine.register_time, now_s),
            engine.incarnation[:8],
        )
    return table


def role_word(role: registry_pb2.EngineRole.ValueType) -> str:
    """``"prefill"`` or ``"decode"``."""
    return registry_pb2.EngineRole.Name(role).removeprefix("ENGINE_ROLE_").lower()


@click.command(epilog=_DRAIN_EXAMPLES)
@click.argument("engine_id", metavar="ENGINE")
@click.option(
    "--role", type=click.Choice(["prefill", "decode"]), help="Where both roles have such an engine."
)
@services.options
def drain(addresses: services.Addresses, engine_id: str, role: str | None) -> None:
    """Takes ENGINE out of routing: it gets no new turns, its leases are not claimed any
    more, and what runs on it ends normally."""
    with addresses.registry_service.connection() as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        everyone = list_engines(stub)
        found = [
            engine
            for engine in everyone
            if engine.engine_id == engine_id and role in (None, role_word(engine.role))
        ]
        if not found:
            names = clean(", ".join(engine.engine_id for engine in everyone)) or "none"
            raise click.ClickException(f"there is no engine {engine_id!r}; there are: {names}")
        if len(found) > 1:
            raise click.ClickException(
                f"there is a prefill and a decode engine {engine_id!r}: name the one with --role"
            )
        stub.Drain(
            registry_pb2.DrainRequest(role=found[0].role, engine_id=engine_id),
            timeout=services.TIMEOUT_S,
        )
    click.echo(f"drain: {clean(engine_id)} gets no new turns")
