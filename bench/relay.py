"""What the router adds to a stream: the same stream straight from a (simulated) engine and
through the router, in alternation.

    python bench/relay.py [--streams 8] [--chunks 200] [--bytes 200] [--rounds 4]

Prints the delay of the first chunk for both ways and the router's CPU time a chunk, and
the same for a whole turn (with a prefill half that is answered at once).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import psutil
import uvloop
from aiohttp import web

from kvlease import rpc
from kvlease.v1 import registry_pb2, registry_pb2_grpc

PATH = "/v1/completions"
INTERVAL_S = 0.002
"""Between two chunks: long enough that each is relayed by itself."""


@dataclass
class Run:
    """One round of streams."""

    first_s: list[float]
    chunks: int
    cpu_s: float


def engine(pipe: Connection, chunks: int, size: int) -> None:
    """A process that streams events to whoever asks, and hands prompts over at once."""
    event = b"data: " + b"x" * (size - 8) + b"\n\n"
    handoff = {"do_remote_prefill": True, "kvlease": {"outcome": "miss_no_lease"}}

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response({"kv_transfer_params": handoff})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(chunks):
            await response.write(event)
            await asyncio.sleep(INTERVAL_S)
        await response.write_eof()
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_post(PATH, serve)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    uvloop.run(run())


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [made.getsockname()[1] for made in sockets]
    for made in sockets:
        made.close()
    return ports


async def register(address: str, http: str) -> None:
    """The same engine in both roles."""
    async with rpc.aio_channel(address) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        for role in (registry_pb2.ENGINE_ROLE_PREFILL, registry_pb2.ENGINE_ROLE_DECODE):
            record = registry_pb2.Engine(
                engine_id=f"sim-{role}",
                role=role,
                incarnation=f"sim-{role}",
                model="sim",
                http_address=http,
                side_channel_host="127.0.0.1",
                side_channel_port=1,
                block_size=16,
                compatibility_hash="sim",
            )
            request = registry_pb2.RegisterRequest(engine=record)
            await stub.Register(request, timeout=10, wait_for_ready=True)


async def one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first chunk, and chunks."""
    began = time.perf_counter()
    first, count = 0.0, 0
    async with session.post(url + PATH, json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content.iter_any():
            first = first or time.perf_counter() - began
            count += 1
    return first, count


async def streams(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], count: int, process: Any
) -> Run:
    before = process.cpu_times()
    results = await asyncio.gather(*(one(session, url, body) for _ in range(count)))
    after = process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return Run([first for first, _ in results], sum(chunks for _, chunks in results), cpu)


async def measure(
    arguments: argparse.Namespace, url: str, direct: str, process: Any
) -> dict[str, Any]:
    relayed = {"model": "sim", "prompt": ["a", "b"], "stream": True}  # unsplit: decode only
    turn = {"model": "sim", "prompt": "a", "stream": True}
    runs: dict[str, list[Run]] = {"direct": [], "relayed": [], "turn": []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(arguments.rounds + 1):
            for name, where, body in (
                ("direct", direct, relayed),
                ("relayed", url, relayed),
                ("turn", url, turn),
            ):
                runs[name].append(await streams(session, where, body, arguments.streams, process))
        for _ in range(2 * arguments.rounds):  # one at a time: the delay without a queue
            for name, where, body in (
                ("direct", direct, relayed),
                ("relayed", url, relayed),
                ("turn", url, turn),
            ):
                single = await streams(session, where, body, 1, process)
                runs.setdefault(f"{name}, alone", []).append(single)
    result: dict[str, Any] = {}
    for name, found in runs.items():
        kept = found[1:]  # the first warms connections up
        result[name] = {
            "first_chunk_ms": round(1e3 * statistics.median(s for r in kept for s in r.first_s), 3),
            "router_cpu_us_per_chunk": round(
                1e6 * sum(r.cpu_s for r in kept) / sum(r.chunks for r in kept), 1
            ),
        }
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    pipe, child = multiprocessing.Pipe()
    simulated = multiprocessing.Process(
        target=engine, args=(child, arguments.chunks, arguments.bytes)
    )
    simulated.start()
    direct = f"http://127.0.0.1:{pipe.recv()}"
    registry, lease, http, grpc = free_ports(4)
    settings = {
        "registry_listen": f"127.0.0.1:{registry}",
        "lease_listen": f"127.0.0.1:{lease}",
        "router_listen": f"127.0.0.1:{http}",
        "router_grpc_listen": f"127.0.0.1:{grpc}",
        "session_ttl": "300",  # the simulated engine renews nothing
    }
    command = ["-m", "kvlease.cli", "serve", "all"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    services = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        await register(f"127.0.0.1:{registry}", direct)
        await asyncio.sleep(0.5)
        url = f"http://127.0.0.1:{http}"
        result = await measure(arguments, url, direct, psutil.Process(services.pid))
        print(json.dumps(result, indent=2))
    finally:
        services.terminate()
        await services.wait()
        pipe.send("stop")
        simulated.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    uvloop.run(main())
