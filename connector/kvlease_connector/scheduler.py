"""The scheduler side of the connector: vLLM's hooks, mapped to the parts that do the work.

Built on vLLM's ``NixlPullConnectorScheduler`` (vllm/distributed/kv_transfer/kv_connector/
v1/nixl/pull_scheduler.py), which still plans every read; see docs/connector.md for which
of its behaviours are replaced, and why.
"""

from __future__ import annotations

import json
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import structlog
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from kvlease import logs, prefix
from kvlease.v1 import common_pb2, registry_pb2
from kvlease_connector import model
from kvlease_connector.blocks import BlockHolder
from kvlease_connector.claims import Answer, Ask
from kvlease_connector.control import ControlPlane
from kvlease_connector.decode import DecodeSide
from kvlease_connector.grants import Finished
from kvlease_connector.handoffs import Handoffs
from kvlease_connector.orders import WorkerOrders, WorkerReport
from kvlease_connector.prefill import PrefillSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvlease_connector.options import Options

log = structlog.get_logger("kvlease.connector")

HANDOFF_MARGIN = 0.1
"""Part of the handoff TTL that a decode engine leaves for its read to end before the
prefill engine frees the blocks."""


class KvLeaseScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Claims on a prefill engine, grants on a decode engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        options: Options,
    ) -> None:
        super().__init__(vllm_config, options.transfer_engine_id, kv_cache_config)
        self.options = options
        self.settings = options.settings
        assert vllm_config.kv_transfer_config is not None
        self.is_prefill = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        # Reads of leased blocks go through vLLM's own bidirectional path, whatever the
        # extra config says; the threshold and the expiry are the lease's, not vLLM's.
        self.is_bidirectional_kv_xfer_enabled = True
        self.kv_recompute_threshold = 0
        self.decoder_kv_blocks_ttl = (
            self.settings.max_retention + 2 * self.settings.claim_grace + 60
        )
        self._unsupported = model.unsupported_model(vllm_config, kv_cache_config)
        if self._unsupported:
            log.warning("turns of this model are not reused", reason=self._unsupported)
        self._model = model.served_model_name(vllm_config)
        self._block_size = model.block_size(kv_cache_config)
        self._chunk_tokens = prefix.chunk_tokens_for(self._block_size)
        self._engine = model.describe_engine(
            vllm_config,
            kv_cache_config,
            options,
            is_prefill=self.is_prefill,
            side_channel=(self.side_channel_host, self.side_channel_port),
        )
        self._num_workers = vllm_config.parallel_config.world_size
        self._control: ControlPlane | None = None
        self._handoffs: Handoffs | None = None
        self._holder: BlockHolder | None = None
        self._handoff_deadlines: dict[str, float] = {}
        self._loading: set[str] = set()
        self._orders = WorkerOrders()
        self._quarantined: dict[str, list[Any]] = {}
        """Blocks of reads that were given up, and how many workers may still write."""

    # --- start and stop ---------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """The scheduler has made its block pool."""
        self._holder = BlockHolder(manager)
        self._handoffs = Handoffs(self._holder)

    def set_xfer_handshake_metadata(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers are up and the side channel listens: time to join."""
        super().set_xfer_handshake_metadata(metadata)
        assert self._holder is not None
        self._control = ControlPlane(
            self._engine,
            self.options,
            self._holder,
            chunk_tokens=self._chunk_tokens,
            usage=self.usage,
        )
        if threading.current_thread() is threading.main_thread():
            self._control.leave_when_told_to_end()

    @property
    def _prefill(self) -> PrefillSide | None:
        return self._control.prefill if self._control else None

    @property
    def _decode(self) -> DecodeSide | None:
        return self._control.decode if self._control else None

    def shutdown(self) -> None:
        if self._control is not None:
            self._control.stop()
            self._control = None
        super().shutdown()

    def usage(self) -> registry_pb2.BlockUsage:
        """The engine's blocks, for the registry. Any thread."""
        if self._decode is not None:
            return self._decode.usage()
        if self._holder is None or self._handoffs is None:
            return registry_pb2.BlockUsage()
        now = time.monotonic()
        over = self._handoffs.expired_blocks(now)
        return registry_pb2.BlockUsage(
            total_blocks=self._holder.total_blocks,
            free_blocks=self._holder.free_blocks + over,
            retained_blocks=max(0, self._handoffs.retained_blocks - over),
            retained_leases=max(0, len(self._handoffs) - self._handoffs.expired(now)),
        )

    # --- hooks of the scheduler -------------------------------------------------------

    def _drain(self) -> None:
        if self._handoffs is not None:
            self._handoffs.drain(time.monotonic())
        if self._decode is not None:
            self._decode.drain()

    def on_new_request(self, request: Request) -> None:
        self._drain()
        params = request.kv_transfer_params
        told = _told(params)
        if params and params.get("do_remote_prefill"):
            remaining = told.get("handoff_remaining_s")
            if remaining is not None:
                self._handoff_deadlines[request.request_id] = time.monotonic() + float(remaining)
        super().on_new_request(request)
        # vLLM's heartbeats prolong vLLM's own leases on a prefill engine's blocks. Those
        # are held by reference here, for a fixed time that the request is told.
        self._stop_heartbeat(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._drain()
        if self._decode is not None:
            self._decode.make_room(
                math.ceil(request.num_tokens / self._block_size),
                num_computed_tokens // self._block_size,
                request.request_id,
            )
        params = request.kv_transfer_params
        if not params:
            return 0, False
        if params.get("do_remote_decode"):
            # Only a lease says what may be read here, never the request itself.
            if self._prefill is None or "kvlease" not in params:
                return 0, False
            count = self._prefill.match(
                request.request_id,
                params,
                request.num_prompt_tokens,
                num_computed_tokens,
                lambda: self._ask(request, num_computed_tokens),
            )
            return count, bool(count)
        deadline = self._handoff_deadlines.get(request.request_id)
        if params.get("do_remote_prefill") and deadline is not None:
            margin = HANDOFF_MARGIN * self.settings.effective_handoff_ttl
            if time.monotonic() + margin >= deadline:
                log.warning(
                    "the prompt's blocks are about to be freed; computing it here",
                    request_id=request.request_id,
                    **_ids(params),
                )
                params["do_remote_prefill"] = False
                return 0, False
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, is_async

    def _ask(self, request: Request, num_local_tokens: int) -> Ask | Answer:
        """What to claim for a request, or why nothing is claimed."""
        told = _told(request.kv_transfer_params)
        if not told.get("conversation_id"):
            return Answer(common_pb2.OUTCOME_OFF, "the request names no conversation")
        if not told.get("reuse", True):
            return Answer(common_pb2.OUTCOME_OFF, "reuse was turned off for this turn")
        reason = self._unsupported or model.unsupported_request(request)
        if reason:
            return Answer(common_pb2.OUTCOME_MISS_UNSUPPORTED, reason)
        assert self._prefill is not None
        conversation = self._conversation(request, told)
        return Ask(
            conversation=conversation,
            token_ids=request.prompt_token_ids or [],
            seed=self._seed(request, conversation),
            chunk_tokens=self._chunk_tokens,
            block_size=self._block_size,
            min_tokens=num_local_tokens + self._prefill.policy.min_tokens,
            num_local_tokens=num_local_tokens,
            traceparent=told.get("traceparent") or "",
        )

    def _conversation(self, request: Request, told: dict[str, Any]) -> common_pb2.Conversation:
        lora = request.lora_request
        return common_pb2.Conversation(
            tenant=told.get("tenant") or "default",
            model=told.get("model") or (lora.lora_name if lora else self._model),
            conversation_id=told["conversation_id"],
        )

    def _seed(self, request: Request, conversation: common_pb2.Conversation) -> bytes:
        return prefix.seed_for(
            tenant=conversation.tenant,
            model=self._model,
            weights_version=self.options.weights_version,
            lora_name=request.lora_request.lora_name if request.lora_request else "",
            cache_salt=request.cache_salt or "",
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and self._prefill is not None:
            read_by = self._prefill.allocated(request.request_id, num_external_tokens)
            if read_by is not None:
                self._orders.read_within_s[request.request_id] = read_by - time.monotonic()
            elif not params.get("_remote_blocks_processed"):
                # Nothing to read: leave no trace for vLLM's own path to act on.
                params["remote_block_ids"] = None
        if num_external_tokens > 0:
            self._loading.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._drain()
        meta = super().build_connector_meta(scheduler_output)
        # Blocks are held by reference, not by the worker's table of delayed frees.
        meta.reqs_to_send = {}
        meta.reqs_in_batch = set()
        meta.reqs_not_processed = set()
        meta.kvlease = self._orders
        self._orders = WorkerOrders()
        if self._decode is not None:
            self._decode.keep_reserve()
        if self._prefill is not None:
            self._prefill.meter.planned(scheduler_output)
        return meta

    def output_handled(self) -> None:
        """vLLM has done with the output of the oldest step in flight."""
        if self._prefill is not None:
            self._prefill.meter.handled()

    def has_pending_block_frees(self) -> bool:
        """A running request gets no block: whether retained ones come back for it, before
        vLLM preempts anybody."""
        return self._decode is not None and self._decode.room_is_coming()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport) and self._handoffs is not None:
            self._handoffs.read(report.read_by_peers)
            # Before vLLM gives the blocks of a failed read back to the pool.
            self._quarantine(report)
        finished = connector_output.finished_recving or set()
        self._loading.difference_update(finished)
        if self._prefill is not None and finished:
            self._prefill.received(finished, connector_output.failed_recving)

    def _quarantine(self, report: WorkerReport) -> None:
        """Keeps blocks to which a read that was given up may still write."""
        assert self._holder is not None
        for request_id, count in report.given_up.items():
            held = self._quarantined.get(request_id)
            if held is None:
                groups = self._holder.num_blocks(request_id)
                held = self._quarantined[request_id] = [self._holder.hold(request_id, groups), 0]
            held[1] += count
        for request_id, count in report.settled.items():
            held = self._quarantined[request_id]
            held[1] -= count
            if held[1] <= 0:
                self._holder.release(held[0])
                del self._quarantined[request_id]

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._drain()
        self._handoff_deadlines.pop(request.request_id, None)
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            return False, self._finish_prefill(request, block_ids)
        return False, self._finish_decode(request, block_ids)

    def _finish_prefill(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        _, answer = super().request_finished(request, block_ids)
        self._reqs_need_send.pop(request.request_id, None)
        assert self._handoffs is not None
        told = _told(request.kv_transfer_params)
        report: dict[str, Any] = {}
        if self._prefill is not None:
            if answer is not None:
                # The output of the step that ended the request is being handled.
                self._prefill.meter.output()
            report = self._prefill.finished(request.request_id, request.num_prompt_tokens)
        if answer is None:
            return None
        ttl = self.settings.effective_handoff_ttl
        if answer["remote_block_ids"]:
            self._handoffs.hold(
                request.request_id,
                [len(group) for group in block_ids],
                reads=self._num_workers * max(1, int(told.get("readers") or 1)),
                free_at=time.monotonic() + ttl,
            )
        return {**answer, "kvlease": {**report, "handoff_ttl_s": ttl}}

    def _finish_decode(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        told = _told(request.kv_transfer_params)
        answer = self._transfer_params(request, block_ids)
        if (
            answer is None
            or self._decode is None
            or self._unsupported
            or not told.get("conversation_id")
            or model.unsupported_request(request)
        ):
            return None
        # The KV of the last token has not been computed: it was sampled, not read.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if num_tokens <= 0:
            return None
        conversation = self._conversation(request, told)
        self._decode.finished(
            request.request_id,
            Finished(
                conversation=conversation,
                turn=int(told.get("turn") or 0),
                token_ids=list(request.all_token_ids[:num_tokens]),
                seed=self._seed(request, conversation),
                transfer_params_json=json.dumps(answer),
                traceparent=told.get("traceparent") or "",
                retention_s=min(
                    float(told.get("retain_s") or self.settings.retention_ttl),
                    self.settings.max_retention,
                ),
                end=bool(told.get("end")),
                seconds_since_arrival=max(0.0, time.time() - request.arrival_time),
            ),
            [math.ceil(num_tokens / self._block_size) for _ in block_ids],
        )
        return None

    def _transfer_params(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """What vLLM would have its client send back on the next turn; None where it keeps
        nothing. Also for a request that was ended from outside after its first token, as
        vLLM ends one whose text has met a stop string."""
        status = request.status
        if (
            status == RequestStatus.FINISHED_ABORTED
            and request.num_output_tokens > 0
            and request.request_id not in self._loading
        ):
            request.status = RequestStatus.FINISHED_STOPPED
        try:
            _, answer = super().request_finished(request, block_ids)
        finally:
            request.status = status
        self._reqs_need_send.pop(request.request_id, None)
        return answer if answer and answer.get("remote_block_ids") else None


def _ids(params: dict[str, Any] | None) -> dict[str, str]:
    """For a log line."""
    told = _told(params)
    return logs.turn_ids(str(told.get("conversation_id", "")), str(told.get("traceparent", "")))


def _told(params: dict[str, Any] | None) -> dict[str, Any]:
    """What the router says of a request; empty where it says nothing."""
    told = (params or {}).get("kvlease")
    return told if isinstance(told, dict) else {}
