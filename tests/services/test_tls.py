"""Mutual TLS between all parts: what works with it, and what is said where it does not."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner, Result
from control_plane import (
    CALL_S,
    ControlPlane,
    claim_request,
    complete_request,
    grant_request,
    until,
)
from cryptography import x509
from decode_engine import DecodeEngine
from etcd_server import Etcd, ServerTls
from grpcurl import Grpcurl, grpcurl_binary
from router_stack import Stack, running
from test_serve import serving

from kvlease import rpc, tls
from kvlease.ca import Authority, Pair
from kvlease.cli.main import cli
from kvlease.config import ConfigError, Settings
from kvlease.store import open_store
from kvlease.tls import Tls
from kvlease.v1 import (
    lease_pb2,
    lease_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)
from kvlease_connector.holder import Holders, HolderServer
from kvlease_connector.retention import Phase

HERE = ["127.0.0.1", "localhost"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def part(authority: Authority) -> Pair:
    return authority.issue("part", [*HERE, "kvlease"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Of another deployment."""
    return Authority(tmp_path_factory.mktemp("other"))


def settings_of(authority: Authority, pair: Pair) -> dict[str, str]:
    return {
        "tls_ca": str(authority.cert),
        "tls_cert": str(pair.cert),
        "tls_key": str(pair.key),
    }


@pytest.fixture
async def plane(authority: Authority, part: Pair) -> AsyncIterator[ControlPlane]:
    started = ControlPlane(settings_of(authority, part))
    await started.start()
    yield started
    await started.stop()


async def kvlease(plane: ControlPlane, *command: str, **settings: str) -> Result:
    addresses = {f"{kind}_endpoint": plane.addresses[kind][0] for kind in ("registry", "lease")}
    said = [f"--set={name}={value}" for name, value in {**addresses, **settings}.items()]
    return await asyncio.to_thread(CliRunner().invoke, cli, [*command, *said])


# What works


@pytest.fixture
async def deployment(
    authority: Authority, part: Pair, start_etcd: Callable[..., Etcd]
) -> AsyncIterator[Stack]:
    """Registry, lease service and router over an etcd that wants client certificates, too."""
    pair = authority.issue("etcd", HERE)
    etcd = start_etcd(
        tls=ServerTls(authority.cert, pair.cert, pair.key),
        flags=["--client-cert-auth", f"--trusted-ca-file={authority.cert}"],
    )
    own = settings_of(authority, part)
    client = {name.replace("tls", "etcd"): path for name, path in own.items()}
    settings: dict[str, Any] = {**own, **client, "etcd_endpoints": etcd.endpoint}
    async with running(open_store(Settings(**settings)), **settings) as stack:
        await stack.add("prefill", "prefill-0")
        await stack.add("decode", "decode-0")
        yield stack


async def test_a_conversation_with_tls_everywhere(deployment: Stack) -> None:
    stack = deployment
    leases = lease_pb2_grpc.LeaseServiceStub(stack.lease_channel)
    watch = leases.WatchLeases(lease_pb2.WatchLeasesRequest(), timeout=CALL_S)
    body = {"model": "sim", "messages": [], "conversation_id": "c"}
    async with stack.client.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
    await stack.grant(stack.engines["decode-0"], "c", 1)
    while not (event := await watch.read()).HasField("lease"):
        pass
    watch.cancel()

    router = router_pb2_grpc.RouterStub(stack.router_channel)
    plan = await router.Plan(
        router_pb2.PlanRequest(model="sim", conversation_id="c"), timeout=CALL_S
    )

    assert plan.decode.engine_id == "decode-0"
    assert plan.lease.lease_id == event.lease.lease_id


async def test_a_lease_is_granted_claimed_and_completed(plane: ControlPlane) -> None:
    request = grant_request(await plane.register())
    await plane.lease.Grant(request, timeout=CALL_S)
    claim = await plane.lease.Claim(claim_request(), timeout=CALL_S)
    await plane.lease.Complete(complete_request(claim), timeout=CALL_S)

    wanted = lease_pb2.GetLeaseRequest(conversation=request.conversation)
    assert not (await plane.lease.GetLease(wanted, timeout=CALL_S)).tickets


async def test_commands_reach_services(
    plane: ControlPlane, authority: Authority, part: Pair
) -> None:
    await plane.register()
    result = await kvlease(plane, "engines", **settings_of(authority, part))
    assert "decode-0" in result.output


async def test_grpcurl_with_a_certificate_and_without(
    plane: ControlPlane, authority: Authority, part: Pair
) -> None:
    tool = Grpcurl(grpcurl_binary())
    options = [f"-cacert={authority.cert}", f"-cert={part.cert}", f"-key={part.key}"]
    address, method = plane.addresses["registry"][0], "kvlease.v1.Registry/ListEngines"
    await plane.register()

    answer = await asyncio.to_thread(tool.at(address, *options).call, method)
    assert [engine["engine_id"] for engine in answer["engines"]] == ["decode-0"]
    refused = await asyncio.to_thread(
        tool.at(address, options[0], "-connect-timeout=1").error, method
    )
    assert "Failed to dial" in refused


async def test_a_holder_confirms_to_readers_with_a_certificate_only(
    authority: Authority, part: Pair
) -> None:
    secured = Tls(str(authority.cert), str(part.cert), str(part.key))
    server = HolderServer(lambda lease_id, ticket_id: 30.0, secured)
    holder = registry_pb2.Engine(holder_address=await server.start("127.0.0.1"))
    try:
        assert await Holders(CALL_S, secured).confirm(holder, "l", "t") == 30
        with pytest.raises(grpc.aio.AioRpcError):
            await Holders(CALL_S).confirm(holder, "l", "t")
    finally:
        await server.stop()


async def test_an_engine_registers_and_grants(plane: ControlPlane) -> None:
    addresses = {f"{kind}_endpoint": plane.addresses[kind][0] for kind in ("registry", "lease")}
    engine = DecodeEngine(plane.settings.model_copy(update=addresses))
    await engine.start()
    try:
        await until(lambda: engine.has_session)
        engine.turn("c")
        await until(lambda: engine.phases.get("c") is Phase.HELD)
    finally:
        await engine.stop()


async def test_replicas_at_several_hosts_share_a_name(
    plane: ControlPlane, authority: Authority, part: Pair
) -> None:
    port = plane.addresses["registry"][0].rpartition(":")[2]
    several = f"127.0.0.1:{port},localhost:{port}"
    own = Tls(str(authority.cert), str(part.cert), str(part.key))
    with pytest.raises(ConfigError, match="set tls_server_name"):
        rpc.channel(several, own)

    named = Tls(own.ca, own.cert, own.key, server_name="kvlease")
    async with rpc.aio_channel(several, named) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        await stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=CALL_S)


def test_all_in_one_process_with_tls_for_http_too(authority: Authority, part: Pair) -> None:
    http = {"router_tls_cert": part.cert, "router_tls_key": part.key}
    with serving("all", **settings_of(authority, part), **http) as served:
        address = served.wait_for("ready")["router_http"]
        context = ssl.create_default_context(cafile=authority.cert)
        with urllib.request.urlopen(f"https://{address}/health", context=context) as page:
            assert page.status == 200
        assert served.end()[0] == 0


# Certificates that are replaced


@pytest.fixture
def replaced(authority: Authority, tmp_path: Path) -> tuple[Pair, Callable[..., None]]:
    """A pair of files, and what puts another certificate there (or one of its files)."""
    current = Pair(tmp_path / "now.pem", tmp_path / "now.key")

    def put(name: str, *, key: bool = True) -> None:
        new = authority.issue(name, HERE)
        shutil.copy(new.cert, current.cert)
        if key:
            shutil.copy(new.key, current.key)

    put("first")
    return current, put


def shown(address: str, authority: Authority, client: Pair | None) -> str:
    """The name in the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=authority.cert)
    context.set_alpn_protocols(["h2", "http/1.1"])
    if client:
        context.load_cert_chain(client.cert, client.key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), CALL_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
    return certificate.subject.rfc4514_string()


async def test_new_connections_get_a_new_certificate(
    authority: Authority, part: Pair, replaced: tuple[Pair, Callable[..., None]]
) -> None:
    current, put = replaced
    settings = {
        **settings_of(authority, current),
        "router_tls_cert": str(current.cert),
        "router_tls_key": str(current.key),
    }
    with serving("all", **settings) as served:
        ready = served.wait_for("ready")

        def both() -> set[str]:
            names = ("lease", "router_http")
            return {shown(ready[name], authority, part) for name in names}

        assert await asyncio.to_thread(both) == {"CN=first"}
        put("second", key=False)  # its key is still on the way
        assert await asyncio.to_thread(both) == {"CN=first"}
        put("second")
        assert await asyncio.to_thread(both) == {"CN=second"}


# What is refused, in a sentence


async def test_a_client_without_a_certificate(plane: ControlPlane) -> None:
    result = await kvlease(plane, "leases")
    assert result.exit_code == 1
    assert "takes TLS only, with a client certificate: set tls_ca, tls_cert and tls_key" in (
        result.output
    )


async def test_a_client_of_another_authority(
    plane: ControlPlane, authority: Authority, other: Authority
) -> None:
    stranger = other.issue("stranger", HERE)
    settings = {**settings_of(other, stranger), "tls_ca": str(authority.cert)}
    result = await kvlease(plane, "leases", **settings)
    assert "does not accept this client's certificate" in result.output
    assert str(stranger.cert) in result.output


async def test_a_server_of_another_authority(
    plane: ControlPlane, part: Pair, other: Authority
) -> None:
    result = await kvlease(plane, "leases", **settings_of(other, part))
    assert f"tls_ca={other.cert} must be the CA that signed it" in result.output


async def test_a_server_under_a_name_that_its_certificate_lacks(
    plane: ControlPlane, authority: Authority, part: Pair
) -> None:
    own = settings_of(authority, part)
    result = await kvlease(plane, "leases", **own, tls_server_name="lease.example")
    assert "is not for 'lease.example'" in result.output


async def test_a_server_without_tls(authority: Authority, part: Pair) -> None:
    plain = ControlPlane({})
    await plain.start()
    try:
        result = await kvlease(plain, "leases", **settings_of(authority, part))
    finally:
        await plain.stop()
    assert "does not speak TLS" in result.output


def test_where_nobody_listens_tls_is_not_blamed(authority: Authority, part: Pair) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        secured = Tls(str(authority.cert), str(part.cert), str(part.key))
        assert tls.explain(address, secured) == ""
        assert tls.explain(address, None) == ""


async def test_a_router_says_why_it_reaches_nobody(plane: ControlPlane) -> None:
    addresses = {f"{kind}_endpoint": plane.addresses[kind][0] for kind in ("registry", "lease")}

    def said() -> str:
        with serving("router", **addresses) as router:
            return str(router.wait_for("no connection")["reason"])

    assert "takes TLS only" in await asyncio.to_thread(said)
