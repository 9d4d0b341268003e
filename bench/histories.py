"""What the record of conversations' last turns costs: writing it, and listing the latest
conversations for /ui, with many of them. A lease service in another process, a real etcd.

    .venv/bin/python bench/histories.py [--conversations 10000] [--etcd HOST:PORT]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator

import psutil
from claims import etcd_at, services

from kvlease import rpc, times
from kvlease.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvlease.v1.lease_pb2 import RecordTurnsRequest

TURNS, BATCH, LISTS = 16, 64, 20


def batches(conversations: int) -> Iterator[RecordTurnsRequest]:
    """Turn by turn, as routers under load tell of them."""
    for turn in range(1, TURNS + 1):
        for first in range(0, conversations, BATCH):
            numbers = range(first, min(first + BATCH, conversations))
            yield RecordTurnsRequest(entries=[entry(number, turn) for number in numbers])


def entry(number: int, turn: int) -> RecordTurnsRequest.Entry:
    """A turn as it usually is."""
    return RecordTurnsRequest.Entry(
        conversation=common_pb2.Conversation(
            tenant="bench", model="qwen3-8b", conversation_id=f"conversation-{number:06}"
        ),
        turn=lease_pb2.TurnRecord(
            turn=turn,
            start_time=times.timestamp(time.time()),
            outcome=common_pb2.OUTCOME_HIT,
            detail="2,048 of 3,016 kept tokens are proven equal: the prompt first differs within "
            "its tokens 2,049 to 2,304",
            end=lease_pb2.TURN_END_OK,
            prompt_tokens=3_600,
            reused_tokens=2_048,
            computed_tokens=1_552,
            ttft=times.duration(0.25),
            prefill_engine_id="prefill-0",
            decode_engine_id="decode-0",
            trace_id=f"{number:016x}{turn:016x}",
        ),
    )


async def measure(address: str, pid: int, conversations: int) -> None:
    process = psutil.Process(pid)
    async with rpc.aio_channel(address) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        before, started = process.cpu_times().user, time.perf_counter()
        for request in batches(conversations):
            await stub.RecordTurns(request, timeout=10)
        seconds = time.perf_counter() - started
        turns = conversations * TURNS
        cpu = (process.cpu_times().user - before) / turns
        print(
            f"record: {turns / seconds:,.0f} turns/s, one call at a time, {BATCH} a call; ", end=""
        )
        print(f"{cpu * 1e6:.0f} us of CPU a turn in the lease service")
        await listing(stub, process)


async def listing(stub: lease_pb2_grpc.LeaseServiceStub, process: psutil.Process) -> None:
    request = lease_pb2.ListConversationsRequest()
    memory, started = process.memory_info().rss, time.perf_counter()
    answer = await stub.ListConversations(request, timeout=30)
    first_s, before = time.perf_counter() - started, process.cpu_times().user
    for _ in range(LISTS):
        await stub.ListConversations(request, timeout=30)
    cpu_s = (process.cpu_times().user - before) / LISTS
    grown = (process.memory_info().rss - memory) / 2**20
    print(
        f"list of {answer.total_size:,}: the first takes {first_s:.2f} s, each later one ", end=""
    )
    print(f"{cpu_s * 1e3:.1f} ms of CPU in the lease service; {grown:.0f} MiB while anyone looks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--etcd", default="")
    arguments = parser.parse_args()
    with etcd_at(arguments.etcd) as endpoint, services({"etcd_endpoints": endpoint}) as started:
        asyncio.run(measure(started["lease"], started["pid"], arguments.conversations))


if __name__ == "__main__":
    main()
