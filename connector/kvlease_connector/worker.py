"""The worker side of the connector: vLLM's NIXL worker, on hosts it does not know about
and for readers it does not expect."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.platforms import current_platform
from vllm.utils.network_utils import make_zmq_path

from kvlease_connector.options import CPU_PROGRESS_DELAY_US
from kvlease_connector.orders import ReadsSeen, WorkerOrders

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvlease_connector.options import Options

log = structlog.get_logger("kvlease.connector.worker")


class KvLeaseWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Reads leased blocks; tells the scheduler when its own blocks have been read."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
    ) -> None:
        self._options = options
        self._connect_timeout_s = options.settings.connect_timeout
        self._read_deadlines: dict[str, float] = {}
        self._reads_seen: Counter[str] = Counter()
        delay_us = options.progress_thread_delay_us
        if delay_us is None and current_platform.device_type == "cpu":
            delay_us = CPU_PROGRESS_DELAY_US
        with _own_affinity(), _progress_thread_delay(delay_us):
            super().__init__(vllm_config, options.transfer_engine_id, kv_cache_config)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        orders = getattr(metadata, "kvlease", None)
        if isinstance(orders, WorkerOrders):
            now = time.monotonic()
            for request_id, seconds in orders.read_within_s.items():
                self._read_deadlines[request_id] = now + seconds
        super().start_load_kv(metadata)

    def take_reads_seen(self) -> ReadsSeen | None:
        """Reads by peers since the last call; None if there were none."""
        if not self._reads_seen:
            return None
        seen, self._reads_seen = self._reads_seen, Counter()
        return ReadsSeen(seen)

    def _get_new_notifs(self) -> set[str]:
        """Peers' messages that they have read a request's blocks ("<request>:<consumers>",
        pull_worker.py). vLLM's worker takes them for delayed frees that it knows; here
        blocks are held by the scheduler, and may be read any number of times."""
        for notifications in self.nixl_wrapper.get_new_notifs().values():
            for notification in notifications:
                message = notification.decode()
                if message.startswith("HB:"):
                    continue
                request_id, _, consumers = message.rpartition(":")
                self.consumer_notification_counts_by_req[request_id] += 1
                if self.consumer_notification_counts_by_req[request_id] >= int(consumers):
                    del self.consumer_notification_counts_by_req[request_id]
                    self._reads_seen[request_id] += 1
        return set()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """A read that ended after its ticket's deadline may have met blocks in other use:
        it counts as failed."""
        done, failed = super()._pop_done_transfers(transfers)
        now = time.monotonic()
        for request_id in done:
            deadline = self._read_deadlines.pop(request_id, None)
            if deadline is not None and now > deadline and request_id not in failed:
                log.warning("a read ended after its ticket", request_id=request_id)
                failed.add(request_id)
        return done, failed

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        """In a thread of the handshake executor. vLLM waits 5 s for a peer that is dead;
        one that does not answer a first message in time is not waited for."""
        _require_answer(host, port, self._connect_timeout_s)
        return super()._nixl_handshake(host, port, *args, **kwargs)


def _require_answer(host: str, port: int, timeout_s: float) -> None:
    """Raises ``zmq.Again`` if the side channel at ``host:port`` does not answer in time."""
    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", host, port)) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        sock.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        sock.recv_multipart()


@contextmanager
def _own_affinity() -> Iterator[None]:
    """Keeps the process on the cores it was given.

    On CPU hosts vLLM's worker moves itself to the last core of each NUMA node
    (base_worker.py), which puts every engine of a machine on the same core, and fails in a
    container that may not use it.
    """
    if current_platform.device_type != "cpu" or not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    with _replaced(current_platform, "discover_numa_topology", lambda: [sorted(cores)]):
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)


@contextmanager
def _progress_thread_delay(delay_us: int | None) -> Iterator[None]:
    """Has NIXL's progress thread pause between polls.

    NIXL's Python API sets ``pthrDelay = 0`` itself (nixl._api), which takes a whole core
    for ever. The only handle is the config class that it looks up.
    """
    if not delay_us:
        yield
        return
    import nixl._api as api

    config_class = api.nixlBind.nixlAgentConfig

    class Config(config_class):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    with _replaced(api.nixlBind, "nixlAgentConfig", Config):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, for as long as the block runs."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
