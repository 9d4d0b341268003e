"""What all services share of their Prometheus metrics: where they are served, and those
that every process has. A service's own are in its ``metrics.py``; docs/metrics.md lists
them all.

Labels are bounded: outcomes, reasons, and the names of engines and models; never a
conversation, a tenant or a request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import REGISTRY, Gauge, disable_created_metrics, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvlease import listening

# A second series for each counter, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

BUILD_INFO = Gauge("kvlease_build_info", "Always 1; the version is in the label.", ["version"])
BUILD_INFO.labels(version("kvlease")).set(1)

READY = Gauge(
    "kvlease_ready",
    "1 while this service can do its work, else 0: while its store does not answer, before that "
    "was asked, and when it stops.",
    ["service"],
)

MILLISECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
"""Buckets, in seconds, for what takes one or a few round trips within a data centre. A
claim has 50 ms by default."""


def render(registry: Collector, accept: str) -> tuple[bytes, str]:
    """A scrape's answer and its Content-Type: OpenMetrics, which carries exemplars, where
    the Accept header asks for it, else Prometheus' text format."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Shows what ``collector`` collects, in this process. Of several replicas in one
    process (tests) the first is shown."""
    try:
        REGISTRY.register(collector)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


@contextlib.contextmanager
def serving(listen: str) -> Iterator[int]:
    """Serves ``/metrics`` on ``host:port`` from threads of its own, so that a scraper that
    does not read holds up nobody; yields the port, 0 where ``listen`` is empty.

    Raises :class:`~kvlease.config.ConfigError` if the address cannot be listened on.
    """
    if not listen:
        yield 0
        return
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), addr=host or "0.0.0.0", registry=REGISTRY)
    except OSError as error:
        raise listening.refused("metrics_listen", listen, error) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
