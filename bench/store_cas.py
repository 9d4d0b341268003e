"""Commits a second through the etcd store, against the same transactions sent with
etcd's bare gRPC stubs: what the store's guarantees cost.

    python bench/store_cas.py [--endpoint HOST:PORT] [--seconds S] [--value-bytes N]

Without ``--endpoint`` it starts an etcd of its own from PATH, with its data on disk.
Each task updates a key of its own by compare-and-swap. Rounds alternate, so that both
see the same machine; the median of three is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc.aio

from kvlease.config import Settings
from kvlease.store.base import Committed, Put
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_api import at_revision, pb

IN_FLIGHT = (1, 64)
ROUNDS = 3

Swap = Callable[[str, int, bytes], Awaitable[int]]
"""Writes a key that is at a revision; returns the new revision."""


@contextmanager
def own_etcd() -> Iterator[str]:
    """An etcd with its defaults; yields its endpoint."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    client, peer = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [
                "etcd",
                f"--data-dir={directory}/data",
                f"--listen-client-urls=http://127.0.0.1:{client}",
                f"--advertise-client-urls=http://127.0.0.1:{client}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"127.0.0.1:{client}"
        finally:
            process.terminate()
            process.wait()


def through_store(store: EtcdStore) -> Swap:
    async def swap(key: str, revision: int, value: bytes) -> int:
        result = await store.commit({key: revision}, [Put(key, value)])
        assert isinstance(result, Committed)
        return result.revision

    return swap


def through_stubs(channel: grpc.aio.Channel, prefix: str) -> Swap:
    stub = pb.KVStub(channel)

    async def swap(key: str, revision: int, value: bytes) -> int:
        raw = (prefix + key).encode()
        request = pb.TxnRequest(
            compare=[at_revision(raw, revision)],
            success=[pb.RequestOp(request_put=pb.PutRequest(key=raw, value=value))],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=raw))],
        )
        response = await stub.Txn(request, timeout=5)
        assert response.succeeded
        return int(response.header.revision)

    return swap


async def rate(swap: Swap, in_flight: int, seconds: float, value_bytes: int) -> tuple[float, float]:
    """Commits a second, and milliseconds of this process's CPU a commit."""
    done = 0
    end = time.perf_counter() + seconds
    filling = os.urandom(value_bytes - 8)

    async def work() -> None:
        nonlocal done
        key, revision, turn = f"/bench/{uuid.uuid4().hex}", 0, 0
        while time.perf_counter() < end:
            turn += 1
            revision = await swap(key, revision, turn.to_bytes(8, "big") + filling)
            done += 1

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return done / elapsed, cpu / done * 1000


async def compare(endpoint: str, seconds: float, value_bytes: int) -> None:
    prefix = f"/bench/{uuid.uuid4().hex}"
    store = EtcdStore(Settings(etcd_endpoints=endpoint, etcd_prefix=prefix))
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        swaps = {"store": through_store(store), "stubs": through_stubs(channel, prefix)}
        print(f"{'in flight':>9}  {'':5}  {'commits/s':>9}  {'CPU ms each':>11}")
        for in_flight in IN_FLIGHT:
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in swaps}
            for _ in range(ROUNDS):
                for name, swap in swaps.items():
                    results[name].append(await rate(swap, in_flight, seconds, value_bytes))
            for name, rounds in results.items():
                per_s = statistics.median(each for each, _ in rounds)
                cpu_ms = statistics.median(each for _, each in rounds)
                print(f"{in_flight:>9}  {name:5}  {per_s:>9.0f}  {cpu_ms:>11.3f}")
    await store.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--endpoint", help="etcd to use, host:port")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--value-bytes", type=int, default=2048)
    arguments = parser.parse_args()
    if arguments.endpoint:
        await compare(arguments.endpoint, arguments.seconds, arguments.value_bytes)
        return
    with own_etcd() as endpoint:
        await compare(endpoint, arguments.seconds, arguments.value_bytes)


if __name__ == "__main__":
    asyncio.run(main())
