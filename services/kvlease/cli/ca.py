"""``kvlease ca``: certificates for mutual TLS between all parts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvlease.ca import LEAF_DAYS, Authority, Pair

LOCAL = ("localhost", "127.0.0.1", "::1")
"""In every certificate: healthchecks and people on the host itself connect to these."""

SHARED = "kvlease"
"""In every certificate but etcd's: replicas at several hosts have this name in common."""

_EXAMPLES = """\b
Examples:
  kvlease ca certs --name registry --name lease --name router --name prefill-0 --name decode-0
  kvlease ca certs --name lease-0,10.0.0.5,lease.internal --name operator
  kvlease ca certs --etcd etcd-0,etcd-1,etcd-2 --json
  kvlease serve lease --set tls_ca=certs/ca.pem --set tls_cert=certs/lease-0.pem \\
      --set tls_key=certs/lease-0.key
"""


@click.command(epilog=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST[,HOST...]",
    help="A part of the deployment: the host that others reach it at, which also names its "
    "files; other names and IP addresses of it may follow. Repeatable.",
)
@click.option(
    "--etcd",
    default="etcd",
    show_default=True,
    metavar="HOST[,HOST...]",
    help="The hosts of etcd's members, which share one certificate; empty: none.",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=LEAF_DAYS,
    show_default=True,
    help="How long new certificates are valid; the CA itself: ten years.",
)
@click.option("--json", "as_json", is_flag=True, help="The files as JSON.")
def ca(directory: Path, names: tuple[str, ...], etcd: str, days: int, as_json: bool) -> None:
    """Makes a certificate authority in DIR, if there is none, and a certificate with its key
    for each name: NAME.pem and NAME.key, for servers and clients alike.

    Run again it makes what is missing, and overwrites nothing. DIR/ca.key stays with you; each
    part gets ca.pem and its own two files.
    """
    authority = Authority(directory)
    made: dict[str, Pair] = {}
    for each in names:
        hosts = _hosts(each, "--name")
        made[hosts[0]] = authority.issue(hosts[0], [*hosts, SHARED, *LOCAL], days=days)
    if etcd:
        made["etcd"] = authority.issue("etcd", [*_hosts(etcd, "--etcd"), *LOCAL], days=days)
    everything = {"ca": authority.pair, **made}
    if as_json:
        click.echo(json.dumps({name: _row(pair) for name, pair in everything.items()}, indent=2))
        return
    for name, pair in everything.items():
        click.echo(f"ca: {name}: {'made' if pair.is_new else 'kept'} {pair.cert} and {pair.key}")


def _row(pair: Pair) -> dict[str, object]:
    return {"cert": str(pair.cert), "key": str(pair.key), "made": pair.is_new}


def _hosts(text: str, option: str) -> list[str]:
    hosts = [host.strip() for host in text.split(",")]
    if not all(hosts):
        raise click.BadParameter(f"{text!r} holds an empty name", param_hint=option)
    return hosts
