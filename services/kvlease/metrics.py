"""Prometheus metrics of the services, on ``/metrics`` of ``metrics_listen``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import (
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from kvlease import outcomes
from kvlease.config import ConfigError

# A second series for each counter, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

LEASES_GRANTED = Counter("kvlease_leases_granted", "Leases granted by this process.")

GRANTS_REFUSED = Counter(
    "kvlease_grants_refused", "Grants refused by this process, by ErrorInfo reason.", ["reason"]
)

CLAIMS = Counter("kvlease_claims", "Claims answered by this process, by outcome.", ["outcome"])

for _word in outcomes.ALL_WORDS:
    CLAIMS.labels(_word)  # so that the first of each is seen as an increase from 0

CLAIM_SECONDS = Histogram(
    "kvlease_claim_seconds",
    "Time from a claim's arrival to its answer, in seconds.",
    # A claim has 50 ms by default; one round trip to the store takes 1 to 5.
    buckets=(0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
)

LEASES_ENDED = Counter(
    "kvlease_leases_ended",
    "Leases that this process ended, by reason. Those that ended with their engine's session "
    "are not among them: see kvlease_engine_sessions_lost_total.",
    ["reason"],
)

LEASES = Gauge("kvlease_leases", "Leases that exist, by state, as this replica sees it.", ["state"])

ENGINES = Gauge(
    "kvlease_engines", "Engines that are registered, as this replica sees it.", ["role", "state"]
)

SESSIONS_LOST = Counter(
    "kvlease_engine_sessions_lost",
    "Engine sessions that ended without Deregister, as this replica saw it: crashes, hangs, "
    "restarts. Every replica counts each.",
    ["role"],
)

READY = Gauge(
    "kvlease_ready",
    "1 while this service can do its work, else 0: while its store does not answer, before that "
    "was asked, and when it stops.",
    ["service"],
)

COMMIT_CONFLICTS = Counter(
    "kvlease_commit_conflicts", "Writes that were decided again because another came first."
)


@contextlib.contextmanager
def serving(listen: str) -> Iterator[int]:
    """Serves ``/metrics`` on ``host:port`` from a thread of its own; yields the port, 0
    where ``listen`` is empty.

    Raises :class:`~kvlease.config.ConfigError` if the address cannot be listened on.
    """
    if not listen:
        yield 0
        return
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdigit():
        raise ConfigError(f"metrics_listen={listen!r} is not of the form host:port")
    try:
        server, thread = start_http_server(int(port), addr=host or "0.0.0.0")
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen} for metrics: {error.strerror}; set metrics_listen to "
            "another address, or to nothing"
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
