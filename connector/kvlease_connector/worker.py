"""The worker side of the connector: vLLM's NIXL worker, on hosts it does not know about
and for readers it does not expect."""

from __future__ import annotations

import os
import time
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
from kvlease_connector.orders import WorkerOrders, WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        ReqMeta,
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
        self._read_timeout_s = options.settings.pull_timeout
        self._ticket_ends: dict[str, float] = {}
        self._report = WorkerReport()
        self._started: dict[str, float] = {}
        self._stuck: dict[str, list[int]] = {}
        """Handles of reads that were given up and may still write."""
        self._stuck_engines: dict[str, str] = {}
        delay_us = options.progress_thread_delay_us
        if delay_us is None and current_platform.device_type == "cpu":
            delay_us = CPU_PROGRESS_DELAY_US
        with _own_affinity(), _progress_thread_delay(delay_us):
            super().__init__(vllm_config, options.transfer_engine_id, kv_cache_config)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        now = time.monotonic()
        orders = getattr(metadata, "kvlease", None)
        if isinstance(orders, WorkerOrders):
            for request_id, seconds in orders.read_within_s.items():
                self._ticket_ends[request_id] = now + seconds
        super().start_load_kv(metadata)

    def take_report(self) -> WorkerReport | None:
        """What has happened since the last call; None if nothing has."""
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def get_transfer_results(self) -> Any:
        self._give_up_late_reads()
        self._look_at_stuck_reads()
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            self._started.pop(request_id, None)
            self._ticket_ends.pop(request_id, None)
        return results

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
                    self._report.read_by_peers[request_id] += 1
        return set()

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """A read that ended after its ticket may have met blocks in other use: it counts
        as failed."""
        done, failed = super()._pop_done_transfers(transfers)
        now = time.monotonic()
        for request_id in done - failed:
            if now > self._ticket_ends.get(request_id, now):
                log.warning("a read ended after its ticket", request_id=request_id)
                failed.add(request_id)
        return done, failed

    def _give_up_late_reads(self) -> None:
        """A read that hangs must not hang its request: it counts as failed after the pull
        timeout. But neither releasing its handle nor removing the peer stops the bytes, so
        its blocks stay out of use until NIXL says that it is done or has failed; the
        scheduler is told."""
        late = time.monotonic() - self._read_timeout_s
        for request_id, started in list(self._started.items()):
            if started > late or not self._recving_transfers.get(request_id):
                continue
            meta = self._recving_metadata[request_id]
            assert meta.remote is not None
            log.warning(
                "a read was given up",
                request_id=request_id,
                source=meta.remote.engine_id,
                seconds=self._read_timeout_s,
            )
            del self._started[request_id]
            self._stuck[request_id] = self._recving_transfers.pop(request_id)
            self._stuck_engines[request_id] = meta.remote.engine_id
            self._report.given_up[request_id] += 1
            self._handle_failed_transfer(request_id, None, self._recv_failures)

    def _look_at_stuck_reads(self) -> None:
        """Whether NIXL has made an end of the reads that were given up."""
        if not self._stuck:
            return
        done, _ = super()._pop_done_transfers(self._stuck)
        for request_id in done:
            del self._stuck_engines[request_id]
            self._report.settled[request_id] += 1

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        super()._read_blocks_for_req(req_id, meta)
        if self._recving_transfers.get(req_id):
            # The handshake, if there was one, is over: the read runs from here.
            self._started[req_id] = time.monotonic()

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        """Not while a read that was given up still uses what is known of the engine."""
        if engine_id not in self._stuck_engines.values():
            super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

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
