"""``kvlease renew`` and ``kvlease end``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import grpc

from kvlease import times
from kvlease.cli import services, tables
from kvlease.cli.engines import list_engines, registered, unknown_model
from kvlease.cli.text import clean
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc, registry_pb2_grpc

_RENEW_EXAMPLES = """\b
Examples:
  kvlease renew chat-42 --for 600
  kvlease renew chat-42 --for 600 --model Qwen/Qwen3-8B --tenant acme
"""

_END_EXAMPLES = """\b
Examples:
  kvlease end chat-42
  kvlease end chat-42 --model Qwen/Qwen3-8B --tenant acme
"""


def _names_a_conversation(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        services.options,
        click.option("--tenant", default="default", show_default=True),
        click.option("--model", default="", help="[default: the one model that is served]"),
        click.argument("conversation"),
    ):
        command = decorate(command)
    return command


@click.command(epilog=_RENEW_EXAMPLES, context_settings={"max_content_width": 100})
@click.option(
    "--for",
    "retention_s",
    type=click.FloatRange(min=0, min_open=True),
    required=True,
    metavar="SECONDS",
    help="How long from now; at most max_retention.",
)
@_names_a_conversation
def renew(
    addresses: services.Addresses, conversation: str, model: str, tenant: str, retention_s: float
) -> None:
    """Keeps the blocks of CONVERSATION for longer (or shorter), from now on: for a tool that
    runs for ten minutes."""
    named = _conversation(addresses, conversation, model, tenant)
    with addresses.lease_service.connection() as channel:
        try:
            lease = lease_pb2_grpc.LeaseServiceStub(channel).Renew(
                lease_pb2.RenewRequest(conversation=named, retention=times.duration(retention_s)),
                timeout=services.TIMEOUT_S,
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                _refuse_unknown(addresses, model)
            raise
    left_s = times.moment(lease.expire_time) - time.time()
    told = (
        f"renew: {lease.holder_engine_id} keeps the blocks of {conversation} for "
        f"{tables.duration(left_s)}"
    )
    # Two machines' clocks differ a little.
    if left_s < 0.99 * retention_s - 5:
        told += (
            f", less than the {tables.duration(retention_s)} asked for: the lease service's "
            "max_retention is the most"
        )
    click.echo(clean(told))


@click.command(epilog=_END_EXAMPLES, context_settings={"max_content_width": 100})
@_names_a_conversation
def end(addresses: services.Addresses, conversation: str, model: str, tenant: str) -> None:
    """Ends CONVERSATION: its blocks are freed as soon as nobody reads them, and turns that
    run now leave none behind."""
    named = _conversation(addresses, conversation, model, tenant)
    with addresses.lease_service.connection() as channel:
        answer = lease_pb2_grpc.LeaseServiceStub(channel).EndConversation(
            lease_pb2.EndConversationRequest(conversation=named), timeout=services.TIMEOUT_S
        )
    if answer.lease_ended:
        told = f"end: the lease of {conversation} is ended"
    else:
        _refuse_unknown(addresses, model)
        told = (
            f"end: {conversation} is ended; it held no lease (tenant {tenant}, model {named.model})"
        )
    click.echo(clean(told))


def _conversation(
    addresses: services.Addresses, conversation: str, model: str, tenant: str
) -> common_pb2.Conversation:
    return common_pb2.Conversation(
        tenant=tenant, model=model or _only_model(addresses), conversation_id=conversation
    )


def _refuse_unknown(addresses: services.Addresses, model: str) -> None:
    """For a conversation that has no lease: it may be the --model that is wrong. (What was
    kept by engines that are all down now has a model that nobody serves, too.)"""
    why = unknown_model(registered(addresses), model)
    if why:
        raise click.ClickException(why)


def _only_model(addresses: services.Addresses) -> str:
    with addresses.registry_service.connection() as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        models = sorted({engine.model for engine in list_engines(stub)})
    if len(models) != 1:
        names = clean(", ".join(models)) or "none"
        raise click.ClickException(f"name the model with --model; those served are: {names}")
    return models[0]
