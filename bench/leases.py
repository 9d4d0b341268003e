"""10,000 leases, held by 100 sessions, on one registry, one lease service and one etcd, each
a process of its own: what holding them costs, how fast they are granted, claimed and completed
next to bare compare-and-swap transactions on the same etcd, and how long a restart takes.

    python bench/leases.py [--leases 10000] [--sessions 100] [--tokens 8000] [--json FILE]

The load comes from this process, over gRPC for asyncio, for both sides of the comparison:
as many calls in flight, values of the same size. A grant, a claim and a complete are one
etcd transaction each (a grant writes two records), so what is compared is lease operations
a second with transactions a second. Rounds alternate; medians are shown. Sessions are kept
alive, and each holder watches its leases, as decode engines do, in every phase.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import statistics
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import uvloop
from store_cas import own_etcd, through_stubs

from kvlease import prefix, rpc
from kvlease.v1 import lease_pb2, lease_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvlease.v1.common_pb2 import OUTCOME_HIT, Conversation

BLOCK = 16
CHUNK = prefix.chunk_tokens_for(BLOCK)
SESSION_TTL_S = 15  # the default; engines renew every third of it
RESTARTS = 3

Call = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Service:
    """A running `kvlease serve`."""

    process: psutil.Process
    address: str
    ready_s: float


@contextlib.asynccontextmanager
async def serving(name: str, settings: Mapping[str, str]) -> AsyncIterator[Service]:
    """``name`` on a free port; ends it at the end."""
    values = {f"{name}_listen": "127.0.0.1:0", "log_format": "json", **settings}
    assignments = [f"--set={key}={value}" for key, value in values.items()]
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvlease.cli", "serve", name, *assignments),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        log = list[str]()
        async for line in process.stderr:
            log.append(line.decode())
            if '"event": "ready"' in log[-1]:
                break
        else:
            sys.exit(f"leases: `kvlease serve {name}` did not start:\n" + "".join(log))
        ready_s = time.perf_counter() - started
        yield Service(psutil.Process(process.pid), json.loads(log[-1])[name], ready_s)
    finally:
        process.terminate()
        await process.communicate()


class Holder:
    """A decode engine's session and leases."""

    def __init__(self, number: int, registry: Any) -> None:
        self.engine = registry_pb2.Engine(
            engine_id=f"decode-{number}",
            role=registry_pb2.ENGINE_ROLE_DECODE,
            incarnation=uuid.uuid4().hex,
            model="qwen",
            http_address="http://127.0.0.1:8200",
            side_channel_host="127.0.0.1",
            side_channel_port=5600,
            block_size=BLOCK,
            compatibility_hash="hash",
        )
        self._registry = registry

    async def register(self) -> None:
        request = registry_pb2.RegisterRequest(engine=self.engine)
        self.engine = (await self._registry.Register(request)).engine

    async def keep_alive(self) -> None:
        request = registry_pb2.KeepAliveRequest(
            session_id=self.engine.session_id,
            role=self.engine.role,
            engine_id=self.engine.engine_id,
            incarnation=self.engine.incarnation,
        )
        while True:
            await asyncio.sleep(SESSION_TTL_S / 3)
            await self._registry.KeepAlive(request)

    async def watch(self, channel: grpc.aio.Channel) -> None:
        request = lease_pb2.WatchLeasesRequest(holder_session_id=self.engine.session_id)
        watch = channel.unary_stream("/kvlease.v1.LeaseService/WatchLeases")
        async for _ in watch(request.SerializeToString()):
            pass


class Load:
    """Calls of the lease service, with requests that are mostly serialized beforehand: a
    message's serialized form may be given in pieces."""

    def __init__(self, channel: grpc.aio.Channel, tokens: int, holders: Sequence[Holder]) -> None:
        service = "/kvlease.v1.LeaseService/"
        self._grant: Call = channel.unary_unary(service + "Grant")
        self._claim: Call = channel.unary_unary(service + "Claim")
        self._complete: Call = channel.unary_unary(service + "Complete")
        proof = prefix.prove(
            range(tokens), seed=prefix.seed_for("bench", "qwen", "", "", ""), chunk_tokens=CHUNK
        )
        blocks = -(-tokens // BLOCK)
        params = json.dumps({"remote_block_ids": [list(range(1000, 1000 + blocks))]})
        digests = proof.chunk_digests
        held = lease_pb2.PrefixProof(
            chunk_tokens=CHUNK, chunk_digests=digests, tail_digest=proof.tail_digest
        )
        self._grants = [
            lease_pb2.GrantRequest(
                engine_id=holder.engine.engine_id,
                incarnation=holder.engine.incarnation,
                session_id=holder.engine.session_id,
                num_tokens=tokens,
                num_blocks=blocks,
                block_size=BLOCK,
                compatibility_hash="hash",
                proof=held,
                kv_transfer_params_json=params,
            ).SerializeToString()
            for holder in holders
        ]
        self._claims = lease_pb2.ClaimRequest(
            reader_engine_id="prefill-0",
            reader_incarnation="p1",
            compatibility_hash="hash",
            proof=lease_pb2.PrefixProof(chunk_tokens=CHUNK, chunk_digests=digests),
            num_prompt_tokens=tokens,
            min_tokens=64,
        ).SerializeToString()
        self.value_bytes = len(self._grants[0])
        """About what a stored lease has."""

    async def grant(self, number: int) -> str:
        """Grants conversation ``number`` a new lease; returns its id."""
        rest = lease_pb2.GrantRequest(conversation=_conversation(number), lease_id=uuid.uuid4().hex)
        await self._grant(self._grants[number % len(self._grants)] + rest.SerializeToString())
        return rest.lease_id

    async def claim(self, number: int) -> str:
        """Opens a ticket; returns its id."""
        rest = lease_pb2.ClaimRequest(
            conversation=_conversation(number), ticket_id=uuid.uuid4().hex
        )
        answer = await self._claim(self._claims + rest.SerializeToString())
        outcome = lease_pb2.ClaimResponse.FromString(answer).outcome
        assert outcome == OUTCOME_HIT, outcome
        return rest.ticket_id

    async def complete(self, number: int, lease_id: str, ticket_id: str) -> None:
        request = lease_pb2.CompleteRequest(
            conversation=_conversation(number),
            lease_id=lease_id,
            ticket_id=ticket_id,
            result=lease_pb2.READ_RESULT_DONE,
        )
        await self._complete(request.SerializeToString())


def _conversation(number: int) -> Conversation:
    return Conversation(tenant="bench", model="qwen", conversation_id=f"c{number}")


class Meter:
    """CPU time of the processes, and proposals that etcd has applied, since :meth:`start`."""

    def __init__(self, processes: Mapping[str, Sequence[psutil.Process]], etcd: str) -> None:
        self._processes = processes
        self._etcd = etcd

    async def start(self) -> None:
        self._proposals = await self._read_proposals()
        self._cpu = self._read_cpu()
        self._started = time.perf_counter()

    async def stop(self) -> tuple[float, dict[str, float], float]:
        """Seconds, seconds of CPU by process, proposals."""
        seconds = time.perf_counter() - self._started
        cpu = {name: now - self._cpu[name] for name, now in self._read_cpu().items()}
        return seconds, cpu, await self._read_proposals() - self._proposals

    def _read_cpu(self) -> dict[str, float]:
        return {
            name: sum(sum(process.cpu_times()[:2]) for process in processes)
            for name, processes in self._processes.items()
        }

    async def _read_proposals(self) -> float:
        def read() -> str:
            with urllib.request.urlopen(f"http://{self._etcd}/metrics") as response:
                return str(response.read().decode())

        found = re.search(
            r"^etcd_server_proposals_applied_total (\S+)", await asyncio.to_thread(read), re.M
        )
        assert found is not None
        return float(found[1])


@dataclass(frozen=True)
class Round:
    """One measurement of one kind of load; times in seconds."""

    per_s: float
    cpu: Mapping[str, float]
    """Of each process, for one operation."""
    proposals: float
    """For one operation."""
    waits: Mapping[str, list[float]]


async def measure(
    meter: Meter, in_flight: int, seconds: float, steps: Callable[[], Iterator[Step]]
) -> Round:
    """Repeats the steps, ``in_flight`` tasks at once."""
    waits: dict[str, list[float]] = {}
    await meter.start()
    end = time.perf_counter() + seconds

    async def work() -> None:
        for name, step in steps():
            started = time.perf_counter()
            if started >= end:
                return
            await step()
            waits.setdefault(name, []).append(time.perf_counter() - started)

    await asyncio.gather(*(work() for _ in range(in_flight)))
    taken, cpu, proposals = await meter.stop()
    count = sum(map(len, waits.values()))
    each = {name: spent / count for name, spent in cpu.items()}
    return Round(count / taken, each, proposals / count, waits)


Step = tuple[str, Callable[[], Awaitable[None]]]


def lease_steps(loads: Sequence[Load], numbers: Iterator[int]) -> Callable[[], Iterator[Step]]:
    """Grant, claim and complete of one conversation after the other."""
    in_turn = itertools.cycle(loads)

    def steps() -> Iterator[Step]:
        load = next(in_turn)
        lease_id = ticket_id = ""
        number = 0

        async def grant() -> None:
            nonlocal lease_id
            lease_id = await load.grant(number)

        async def claim() -> None:
            nonlocal ticket_id
            ticket_id = await load.claim(number)

        async def complete() -> None:
            await load.complete(number, lease_id, ticket_id)

        for number in numbers:  # noqa: B007  # the steps use it
            yield "grant", grant
            yield "claim", claim
            yield "complete", complete

    return steps


def swap_steps(channel: grpc.aio.Channel, value_bytes: int) -> Callable[[], Iterator[Step]]:
    """Bare transactions: each task writes a key of its own by compare-and-swap."""
    swap = through_stubs(channel, f"/bench/{uuid.uuid4().hex}")
    filling = bytes(value_bytes - 8)

    def steps() -> Iterator[Step]:
        key, revision, turn = f"/{uuid.uuid4().hex}", 0, 0

        async def once() -> None:
            nonlocal revision
            revision = await swap(key, revision, turn.to_bytes(8, "big") + filling)

        for turn in itertools.count():  # noqa: B007  # the step uses it
            yield "swap", once

    return steps


async def grant_all(load: Load, leases: int) -> None:
    numbers = iter(range(leases))

    async def work() -> None:
        for number in numbers:
            await load.grant(number)

    await asyncio.gather(*(work() for _ in range(32)))


async def run(options: argparse.Namespace, etcd: str) -> dict[str, Any]:
    settings = {"etcd_endpoints": etcd, "etcd_timeout": "10", "session_ttl": str(SESSION_TTL_S)}
    async with (
        serving("registry", settings) as registry,
        rpc.aio_channel(registry.address) as engines,
        asyncio.TaskGroup() as alive,
    ):
        stub = registry_pb2_grpc.RegistryStub(engines)
        holders = [Holder(number, stub) for number in range(options.sessions)]
        tasks = []
        for holder in holders:
            await holder.register()
            tasks.append(alive.create_task(holder.keep_alive()))
        async with contextlib.AsyncExitStack() as stack:
            replicas = [
                await stack.enter_async_context(serving("lease", settings))
                for _ in range(options.replicas)
            ]
            processes = {
                "lease service": [replica.process for replica in replicas],
                "registry": [registry.process],
                "etcd": [psutil.Process(etcd_pid())],
                "load": [psutil.Process()],
            }
            addresses = [replica.address for replica in replicas]
            report = await under_load(options, addresses, holders, Meter(processes, etcd), etcd)
        report["ready_s"] = [await restart(settings, options.leases) for _ in range(RESTARTS)]
        for task in tasks:
            task.cancel()
    return report


def etcd_pid() -> int:
    return next(child.pid for child in psutil.Process().children() if child.name() == "etcd")


async def under_load(
    options: argparse.Namespace,
    addresses: Sequence[str],
    holders: Sequence[Holder],
    meter: Meter,
    etcd: str,
) -> dict[str, Any]:
    """Grants all leases, then measures while they are held, and under load."""
    async with (
        contextlib.AsyncExitStack() as stack,
        grpc.aio.insecure_channel(etcd) as bare,
        asyncio.TaskGroup() as group,
    ):
        channels = [
            await stack.enter_async_context(rpc.aio_channel(address)) for address in addresses
        ]
        watching = [
            group.create_task(holder.watch(channels[number % len(channels)]))
            for number, holder in enumerate(holders)
            if options.watches
        ]
        loads = [Load(channel, options.tokens, holders) for channel in channels]
        await grant_all(loads[0], options.leases)
        report = {"steady": await steady(meter, options.steady)}
        report |= await throughput(options, meter, loads, bare)
        for task in watching:
            task.cancel()
    return report


async def restart(settings: Mapping[str, str], leases: int) -> float:
    """Seconds from the start of the process until it can work, with all leases there."""
    async with serving("lease", settings) as lease, rpc.aio_channel(lease.address) as channel:
        found = await count(channel)
    assert found == leases, f"{found} leases are left"
    return lease.ready_s


async def count(channel: grpc.aio.Channel) -> int:
    stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
    found, token = 0, ""
    while True:
        page = await stub.ListLeases(lease_pb2.ListLeasesRequest(page_size=1000, page_token=token))
        found, token = found + len(page.leases), page.next_page_token
        if not token:
            return found


async def steady(meter: Meter, seconds: float) -> dict[str, float]:
    """The part of a core that each process takes while leases are only held."""
    await asyncio.sleep(2)
    await meter.start()
    await asyncio.sleep(seconds)
    taken, cpu, _ = await meter.stop()
    return {name: spent / taken for name, spent in cpu.items()}


async def throughput(
    options: argparse.Namespace, meter: Meter, loads: Sequence[Load], bare: grpc.aio.Channel
) -> dict[str, Any]:
    numbers = itertools.cycle(range(options.leases))
    kinds = {
        "transactions": swap_steps(bare, loads[0].value_bytes),
        "lease operations": lease_steps(loads, numbers),
    }
    rounds: dict[str, list[Round]] = {kind: [] for kind in kinds}
    for number in range(options.rounds + 1):
        for kind, steps in kinds.items():
            seconds = options.seconds if number else 1.0  # the first round warms up
            result = await measure(meter, options.in_flight, seconds, steps)
            if number:
                rounds[kind].append(result)
    return {
        "value_bytes": loads[0].value_bytes,
        "ratio": statistics.median(
            ours.per_s / bare.per_s
            for ours, bare in zip(rounds["lease operations"], rounds["transactions"], strict=True)
        ),
        "load": {kind: summary(found) for kind, found in rounds.items()},
    }


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over rounds; percentiles are each round's own."""
    median = statistics.median

    def percentile(name: str, part: float) -> float:
        return median(sorted(r.waits[name])[int(len(r.waits[name]) * part)] for r in rounds)

    return {
        "per_s": median(r.per_s for r in rounds),
        "per_s_of_rounds": [r.per_s for r in rounds],
        "proposals_each": median(r.proposals for r in rounds),
        "cpu_us_each": {name: 1e6 * median(r.cpu[name] for r in rounds) for name in rounds[0].cpu},
        "wait_ms": {
            name: {"p50": 1e3 * percentile(name, 0.5), "p99": 1e3 * percentile(name, 0.99)}
            for name in rounds[0].waits
        },
    }


def show(report: Mapping[str, Any], options: argparse.Namespace) -> None:
    print(f"{options.leases} leases of {options.tokens} tokens, {options.sessions} sessions")
    print("only held, % of a core: ", end="")
    print(", ".join(f"{name} {100 * part:.1f}" for name, part in report["steady"].items()))
    print(f"{options.in_flight} in flight:")
    for kind, found in report["load"].items():
        print(f"  {kind:16} {found['per_s']:6.0f}/s, {found['proposals_each']:.2f} proposals each")
        cpu = ", ".join(f"{name} {us:.0f}" for name, us in found["cpu_us_each"].items())
        print(f"    us of CPU each: {cpu}")
        for name, wait in found["wait_ms"].items():
            print(f"    {name:9} p50 {wait['p50']:6.1f} ms  p99 {wait['p99']:6.1f} ms")
    print(f"  lease operations / transactions: {report['ratio']:.2f}")
    print("restart to ready: " + ", ".join(f"{s:.2f} s" for s in report["ready_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--leases", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of each lease")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    parser.add_argument("--steady", type=float, default=30.0, help="seconds of only holding")
    parser.add_argument("--replicas", type=int, default=1, help="of the lease service")
    parser.add_argument("--no-watches", dest="watches", action="store_false")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with own_etcd() as etcd:
        report = uvloop.run(run(options, etcd))
    show(report, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
