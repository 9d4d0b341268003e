"""How long a claim takes, as a prefill engine sees it: gRPC client in this process, the
services in another (`kvlease serve all`), on the embedded store and on a real etcd.

    python bench/claims.py [--calls 3000] [--tokens 8000] [--etcd HOST:PORT]

Every claim is a hit that opens a ticket; it is completed afterwards, outside of the
time that is measured but inside of the load. With `etcd` in PATH and no --etcd, one is
started on a directory of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc.aio
import psutil
import uvloop

from kvlease import prefix, rpc
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease.v1.common_pb2 import Conversation

BLOCK = 16
CHUNK = prefix.chunk_tokens_for(BLOCK)
CONVERSATIONS = 256
SEED = prefix.seed_for("bench", "qwen", "", "", "")
LISTEN = ("registry_listen", "lease_listen", "router_listen", "router_grpc_listen")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def etcd_at(endpoint: str) -> Iterator[str]:
    """``endpoint``, or an etcd of our own."""
    if endpoint:
        yield endpoint
        return
    binary = shutil.which("etcd")
    if binary is None:
        sys.exit("claims: no etcd in PATH: install etcd-server or give --etcd HOST:PORT")
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [
                *(binary, f"--data-dir={directory}/data", "--log-level=error"),
                *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                f"--initial-cluster=default={peer}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield client.removeprefix("http://")
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def services(settings: dict[str, str]) -> Iterator[dict[str, Any]]:
    """`kvlease serve all`; yields its addresses and pid."""
    fixed = {"log_format": "json", "session_ttl": "400"}  # nobody keeps the engine alive
    values = {**dict.fromkeys(LISTEN, "127.0.0.1:0"), **fixed, **settings}
    command = [sys.executable, "-m", "kvlease.cli", "serve", "all"]
    command += [f"--set={name}={value}" for name, value in values.items()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        else:
            sys.exit("claims: the services did not start")
        yield {**event, "pid": process.pid}
    finally:
        process.terminate()
        process.stderr.close()
        process.wait()


class Load:
    """One decode engine's leases, and readers that claim them."""

    def __init__(self, lease: grpc.aio.Channel, registry: grpc.aio.Channel, tokens: int) -> None:
        self._lease: Any = lease_pb2_grpc.LeaseServiceStub(lease)
        self._registry: Any = registry_pb2_grpc.RegistryStub(registry)
        self._tokens = range(tokens)
        proof = prefix.prove(self._tokens, seed=SEED, chunk_tokens=CHUNK)
        self._held = lease_pb2.PrefixProof(
            chunk_tokens=CHUNK, chunk_digests=proof.chunk_digests, tail_digest=proof.tail_digest
        )
        self._asked = lease_pb2.PrefixProof(chunk_tokens=CHUNK, chunk_digests=proof.chunk_digests)

    async def grant_all(self) -> None:
        engine = registry_pb2.Engine(
            engine_id="decode-0",
            role=registry_pb2.ENGINE_ROLE_DECODE,
            incarnation=uuid.uuid4().hex,
            model="qwen",
            http_address="http://127.0.0.1:8200",
            side_channel_host="127.0.0.1",
            side_channel_port=5600,
            block_size=BLOCK,
            compatibility_hash="hash",
        )
        request = registry_pb2.RegisterRequest(engine=engine)
        stored = (await self._registry.Register(request)).engine
        blocks = -(-len(self._tokens) // BLOCK)
        for number in range(CONVERSATIONS):
            await self._lease.Grant(
                lease_pb2.GrantRequest(
                    conversation=_conversation(number),
                    lease_id=uuid.uuid4().hex,
                    engine_id=stored.engine_id,
                    incarnation=stored.incarnation,
                    session_id=stored.session_id,
                    num_tokens=len(self._tokens),
                    num_blocks=blocks,
                    block_size=BLOCK,
                    compatibility_hash="hash",
                    proof=self._held,
                    kv_transfer_params_json=json.dumps(
                        {"remote_block_ids": [list(range(1000, 1000 + blocks))]}
                    ),
                )
            )

    async def claims(self, calls: int, in_flight: int, conversations: int) -> list[float]:
        """Seconds that each of ``calls`` claims took."""
        taken: list[float] = []
        numbers = iter(range(calls))

        async def reader() -> None:
            for number in numbers:
                conversation = _conversation(number % conversations)
                request = lease_pb2.ClaimRequest(
                    conversation=conversation,
                    ticket_id=uuid.uuid4().hex,
                    reader_engine_id="prefill-0",
                    reader_incarnation="p1",
                    compatibility_hash="hash",
                    proof=self._asked,
                    num_prompt_tokens=len(self._tokens),
                    min_tokens=64,
                )
                started = time.perf_counter()
                answer = await self._lease.Claim(request)
                taken.append(time.perf_counter() - started)
                assert answer.outcome == 1, answer
                await self._lease.Complete(
                    lease_pb2.CompleteRequest(
                        conversation=conversation,
                        lease_id=answer.lease_id,
                        ticket_id=request.ticket_id,
                        result=lease_pb2.READ_RESULT_DONE,
                    )
                )

        await asyncio.gather(*(reader() for _ in range(in_flight)))
        return taken


def _conversation(number: int) -> Conversation:
    return Conversation(tenant="bench", model="qwen", conversation_id=f"c{number}")


async def measure(name: str, addresses: dict[str, Any], calls: int, tokens: int) -> None:
    server = psutil.Process(addresses["pid"])
    async with (
        rpc.aio_channel(addresses["lease"]) as lease,
        rpc.aio_channel(addresses["registry"]) as registry,
    ):
        load = Load(lease, registry, tokens)
        await load.grant_all()
        await load.claims(500, 8, CONVERSATIONS)  # warm up
        for in_flight, conversations in ((1, CONVERSATIONS), (64, CONVERSATIONS), (64, 1)):
            started, cpu = time.perf_counter(), server.cpu_times()
            taken = sorted(await load.claims(calls, in_flight, conversations))
            rate = calls / (time.perf_counter() - started)
            spent = sum(server.cpu_times()[:2]) - sum(cpu[:2])
            leases = f"{conversations} leases" if conversations > 1 else "one lease"
            print(
                f"{name:7} {in_flight:3} in flight on {leases:11}"
                f"  p50 {1e3 * taken[len(taken) // 2]:6.2f} ms"
                f"  p99 {1e3 * taken[len(taken) * 99 // 100]:6.2f} ms"
                f"  {rate:5.0f} claims and completes/s,"
                f" {1e6 * spent / calls / 2:4.0f} us of CPU each"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of each lease")
    parser.add_argument("--etcd", default="", metavar="HOST:PORT")
    options = parser.parse_args()
    with services({}) as addresses:
        uvloop.run(measure("memory", addresses, options.calls, options.tokens))
    with (
        etcd_at(options.etcd) as etcd,
        services(
            {"etcd_endpoints": etcd, "etcd_prefix": f"/bench/{uuid.uuid4().hex}"}
        ) as addresses,
    ):
        uvloop.run(measure("etcd", addresses, options.calls, options.tokens))


if __name__ == "__main__":
    main()
