"""``kvlease leases``."""

from __future__ import annotations

import time

import click
from rich.table import Table

from kvlease.cli import services, tables
from kvlease.cli.engines import registered, unknown_engine, unknown_model
from kvlease.cli.text import clean
from kvlease.v1 import lease_pb2, lease_pb2_grpc

_LEASES_EXAMPLES = """\b
Examples:
  kvlease leases
  kvlease leases --engine decode-0 --watch
  kvlease leases --json | jq '.[].conversation'
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
    service = addresses.lease_service
    with service.connection() as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        wanted = lease_pb2.ListLeasesRequest(
            tenant=tenant, model=model, holder_engine_id=engine_id, page_size=1000
        )
        tables.show(
            lambda: _list_leases(stub, wanted),
            _table,
            as_json=as_json,
            watch=watch,
            sentence=service.sentence,
            nothing=lambda: _unknown(addresses, model, engine_id),
        )


def _unknown(addresses: services.Addresses, model: str, engine_id: str) -> str:
    """Whether a name is the reason that there are no leases; empty if not."""
    if not (model or engine_id):
        return ""
    everyone = registered(addresses)
    return unknown_engine(everyone, engine_id) or unknown_model(everyone, model)


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
            clean(lease.conversation.conversation_id),
            clean(lease.conversation.tenant),
            clean(lease.conversation.model),
            str(lease.turn),
            _state(lease),
            clean(lease.holder_engine_id),
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
