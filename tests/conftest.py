"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import Etcd, EtcdCluster

_ETCD_FIXTURES = {"etcd", "shared_etcd", "etcd_cluster", "start_etcd"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _ETCD_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.etcd)


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for all tests that leave it as it is; each takes a prefix of its own."""
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of the test's own, to be killed, paused, restarted or compacted."""
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[Callable[..., Etcd]]:
    """Starts an etcd with flags, TLS or ports of the test's choice."""
    servers: list[Etcd] = []

    def start(**options: object) -> Etcd:
        server = Etcd(tmp_path, name=f"own-{len(servers)}", **options)  # type: ignore[arg-type]
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def etcd_cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members of the test's own."""
    cluster = EtcdCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
