"""Moments and spans of time: seconds inside the services, protobuf's types outside.

A moment is a float: seconds since 1970, UTC, by the clock of the service that wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

Clock = Callable[[], float]

wall_clock: Clock = time.time

_NANOS = 1_000_000_000


def timestamp(moment: float) -> Timestamp:
    """Exact to the microsecond, which is what a float of this size can hold."""
    seconds, nanos = divmod(round(moment * 1e6) * 1000, _NANOS)
    return Timestamp(seconds=seconds, nanos=nanos)


def moment(stamp: Timestamp) -> float:
    """The inverse of :func:`timestamp`. An unset one is 0."""
    return stamp.seconds + stamp.nanos / _NANOS


def duration(seconds: float) -> Duration:
    """Exact to the microsecond."""
    micros = round(seconds * 1e6)
    whole, rest = divmod(abs(micros), 1_000_000)
    sign = -1 if micros < 0 else 1
    return Duration(seconds=sign * whole, nanos=sign * rest * 1000)


def seconds(span: Duration) -> float:
    """The inverse of :func:`duration`. An unset one is 0."""
    return span.seconds + span.nanos / _NANOS
