"""`docker compose` for tests. Skipped where Docker cannot run, unless engines are required."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose import docker_host
from compose.compose_stack import SERVICES, ComposeStack
from otlp_receiver import Receiver, receiving
from required import unavailable

# The first test of the stack builds the images and starts everything.
_TIMEOUT_S = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.compose)
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def docker() -> Iterator[None]:
    """`docker` and `docker compose` work."""
    try:
        with docker_host.docker():
            yield
    except docker_host.NoDocker as error:
        unavailable(str(error))


@pytest.fixture(scope="module")
def compose_receiver(docker: None) -> Iterator[Receiver]:
    """Receives the spans of everything in the stack."""
    with receiving(host=docker_host.gateway()) as receiver:
        yield receiver


@pytest.fixture(scope="module")
def compose_stack(docker: None, compose_receiver: Receiver) -> Iterator[ComposeStack]:
    """One stack for all tests of a file, built from the sources as they are."""
    docker_host.have_base_images()
    stack = ComposeStack(f"kvlease-test-{os.getpid()}", compose_receiver.endpoint)
    with docker_host.timed("building the images"):
        stack.compose("build", *(name for name in SERVICES if name != "etcd"))
    with docker_host.timed("writing the images to disk"):
        os.sync()  # else etcd would wait for gigabytes with every write
    try:
        with docker_host.timed("docker compose up"):
            stack.compose("up", "--detach", "--wait", *SERVICES)
        yield stack
    except BaseException:
        print(stack.logs(), file=sys.__stderr__)
        raise
    finally:
        stack.compose("down", "--volumes")
