"""Moments and spans, there and back."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from kvlease import times


@given(st.floats(0, 4e9))
def test_a_moment_survives_to_the_microsecond(moment: float) -> None:
    stamp = times.timestamp(moment)
    assert 0 <= stamp.nanos < 1_000_000_000
    assert times.moment(stamp) == pytest.approx(moment, abs=1e-6)


@given(st.floats(-1e6, 1e6))
def test_a_span_survives_to_the_microsecond(seconds: float) -> None:
    span = times.duration(seconds)
    span.ToTimedelta()  # raises if seconds and nanos disagree in sign
    assert times.seconds(span) == pytest.approx(seconds, abs=1e-6)


def test_unset_ones_are_zero() -> None:
    assert times.moment(Timestamp()) == 0.0
    assert times.seconds(Duration()) == 0.0
