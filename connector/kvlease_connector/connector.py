"""The class that vLLM loads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

from kvlease import logs
from kvlease_connector import options
from kvlease_connector.scheduler import KvLeaseScheduler
from kvlease_connector.worker import KvLeaseWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KvLeaseConnector(NixlBaseConnector):  # type: ignore[misc]
    """NIXL transfers under block leases.

    A prefill engine (``kv_role: kv_producer``) claims a lease before it reads a decode
    engine's blocks; a decode engine (``kv_consumer``) grants one when a turn ends. All
    calls to the services happen in a background thread: the engine never waits for them.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self.kv_transfer_config
        given = options.parse(
            transfer.kv_connector_extra_config,
            default_engine_id=transfer.engine_id,
            default_incarnation=vllm_config.instance_id,
        )
        role_name = "prefill" if transfer.kv_role == "kv_producer" else "decode"
        logs.configure_inside("vllm", given.settings, service=role_name, engine_id=given.engine_id)
        self.engine_id = given.transfer_engine_id
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvLeaseScheduler(vllm_config, kv_cache_config, given)
        else:
            self.connector_worker = KvLeaseWorker(vllm_config, kv_cache_config, given)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind(kv_cache_manager)

    def has_pending_block_frees(self) -> bool:
        assert self.connector_scheduler is not None
        return self.connector_scheduler.has_pending_block_frees()

    def take_events(self) -> Iterable[KVCacheEvent]:
        # There are none; but vLLM asks once a step, after all else.
        if self.connector_scheduler is not None:
            self.connector_scheduler.output_handled()
        events: Iterable[KVCacheEvent] = super().take_events()
        return events

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.connector_worker is not None
        self.connector_worker.start_load_kv(self._connector_metadata)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.connector_worker is not None
        return self.connector_worker.take_report()
