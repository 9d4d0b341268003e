"""``kvlease leases`` and ``kvlease end``."""

from __future__ import annotations

import time

import click
from rich.table import Table

from kvlease.cli import services, tables
from kvlease.cli.engines import list_engines
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2_grpc

_LEASES_EXAMPLES = """\b
Examples:
  kvlease leases
  kvlease leases --engine decode-0 --watch
  kvlease leases --json | jq '.[].conversation'
"""

_END_EXAMPLES = """\b
Examples:
  kvlease end chat-42
  kvlease end chat-42 --model Qwen/Qwen3-8B --tenant acme
"""


@click.command(epilog=_LEASES_EXAMPLES, context_settings={"max_content_width": 100})
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option("--model", default="", help="Only this model's; needs --tenant.")
@click.option("--engine", "engine_id", default="", help="Only those that this engine holds.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, every field.")
@click.option("--watch", is_flag=True, help="Again every second, until Ctrl-C.")
@services.options
def leases(
    addresses: services.Addresses,
    tenant: str,
    model: str,
    engine_id: str,
    as_json: bool,
    watch: bool,
) -> None:
    """Shows which engine keeps the KV blocks of which conversation, and for how long."""
    if model and not tenant:
        raise click.UsageError("--model needs --tenant (the default one is called: default)")
    with services.connection("lease service", addresses.lease) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        wanted = lease_pb2.ListLeasesRequest(
            tenant=tenant, model=model, holder_engine_id=engine_id, page_size=1000
        )
        tables.show(lambda: _list_leases(stub, wanted), _table, as_json=as_json, watch=watch)


def _list_leases(
    stub: lease_pb2_grpc.LeaseServiceStub, wanted: lease_pb2.ListLeasesRequest
) -> list[lease_pb2.Lease]:
    found: list[lease_pb2.Lease] = []
    wanted.page_token = ""
    while True:
        page = stub.ListLeases(wanted, timeout=services.TIMEOUT_S)
        found += page.leases
        if not page.next_page_token:
            return found
        wanted.page_token = page.next_page_token


def _table(found: list[lease_pb2.Lease]) -> Table:
    table = tables.new(
        *("conversation", "tenant", "model", "turn", "state", "holder"),
        *("tokens", "blocks", "readers", "claims", "age", "expires in"),
        title=tables.count(len(found), "lease"),
        numbers=("turn", "tokens", "blocks", "readers", "claims", "age", "expires in"),
    )
    now_s = time.time()
    for lease in found:
        open_tickets = len(lease.tickets) + sum(len(old.tickets) for old in lease.retiring)
        table.add_row(
            tables.clean(lease.conversation.conversation_id),
            tables.clean(lease.conversation.tenant),
            tables.clean(lease.conversation.model),
            str(lease.turn),
            _state(lease),
            lease.holder_engine_id,
            *map(str, (lease.num_tokens, lease.num_blocks, open_tickets, lease.claim_count)),
            tables.ago(lease.grant_time, now_s),
            tables.until(lease.expire_time, now_s),
        )
    return table


def _state(lease: lease_pb2.Lease) -> str:
    word = lease_pb2.LeaseState.Name(lease.state).removeprefix("LEASE_STATE_").lower()
    if lease.end_reason == lease_pb2.END_REASON_UNSPECIFIED:
        return word
    reason = lease_pb2.EndReason.Name(lease.end_reason).removeprefix("END_REASON_").lower()
    return f"{word} ({reason.replace('_', ' ')})"


@click.command(epilog=_END_EXAMPLES)
@click.argument("conversation")
@click.option("--model", default="", help="[default: the one model that is served]")
@click.option("--tenant", default="default", show_default=True)
@services.options
def end(addresses: services.Addresses, conversation: str, model: str, tenant: str) -> None:
    """Ends CONVERSATION: its blocks are freed as soon as nobody reads them, and turns that
    run now leave none behind."""
    model = model or _only_model(addresses)
    with services.connection("lease service", addresses.lease) as channel:
        answer = lease_pb2_grpc.LeaseServiceStub(channel).EndConversation(
            lease_pb2.EndConversationRequest(
                conversation=common_pb2.Conversation(
                    tenant=tenant, model=model, conversation_id=conversation
                )
            ),
            timeout=services.TIMEOUT_S,
        )
    click.echo(
        f"end: the lease of {conversation} is ended"
        if answer.lease_ended
        else f"end: {conversation} is ended; it held no lease (tenant {tenant}, model {model})"
    )


def _only_model(addresses: services.Addresses) -> str:
    with services.connection("registry", addresses.registry) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        models = sorted({engine.model for engine in list_engines(stub)})
    if len(models) != 1:
        names = ", ".join(models) or "none"
        raise click.ClickException(f"name the model with --model; those served are: {names}")
    return models[0]
