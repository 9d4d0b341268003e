"""What tests of services share. Services run on uvloop (``kvlease serve``), so their tests
do too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop
from control_plane import ControlPlane
from otlp_receiver import Receiver, receiving

from kvlease.telemetry import ENDPOINT_ENV

StartPlane = Callable[..., Awaitable[ControlPlane]]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
def store_settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of each store; state is the test's own."""
    if request.param == "memory":
        return {}
    etcd = request.getfixturevalue("shared_etcd")
    return {"etcd_endpoints": etcd.endpoint, "etcd_prefix": f"/test/{uuid.uuid4().hex}"}


@pytest.fixture
async def start_plane(store_settings: dict[str, Any]) -> AsyncIterator[StartPlane]:
    """Starts a control plane with settings and replicas of the test's choice."""
    planes: list[ControlPlane] = []

    async def start(*, registries: int = 1, leases: int = 1, **overrides: Any) -> ControlPlane:
        plane = ControlPlane({**store_settings, **overrides}, registries=registries, leases=leases)
        planes.append(plane)
        await plane.start()
        return plane

    yield start
    for plane in planes:
        await plane.stop()


@pytest.fixture
async def plane(start_plane: StartPlane) -> ControlPlane:
    """One registry, one lease service."""
    return await start_plane()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Gets the spans of every service that the test starts after it."""
    with receiving() as started:
        monkeypatch.setenv(ENDPOINT_ENV, started.endpoint)
        yield started
