"""What the connector needs to know of the model and its KV cache."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    compute_nixl_compatibility_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvlease.v1 import registry_pb2

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvlease_connector.options import Options


def unsupported_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why leases cannot be exact for this model; empty if they can.

    A proven prefix can be cut to the block only if each token's KV stands by itself in one
    list of blocks. Sliding windows and state spaces keep only the end of a sequence; and
    with several groups vLLM cannot recompute after a failed read (0.32:
    ``Scheduler._handle_invalid_blocks`` raises).
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"its KV cache has {len(groups)} groups"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        return f"its KV cache is of kind {type(spec).__name__}"
    if vllm_config.speculative_config is not None:
        return "it decodes speculatively, and the drafter's state is not leased"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "its KV cache is split over decode context parallel ranks"
    return ""


def unsupported_request(request: Request) -> str:
    """Why a request's prompt is not described by its token ids; empty if it is."""
    if request.mm_features:
        return "the prompt has images, audio or video"
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return "the prompt is given as embeddings"
    if request.skip_reading_prefix_cache:
        return "the request asks for the whole prompt to be computed (prompt logprobs)"
    return ""


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a KV block of the first group."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def kv_bytes_per_token(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of KV cache of one token on one rank, over all layers."""
    size = sum(int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors)
    return size // max(1, int(kv_cache_config.num_blocks) * block_size(kv_cache_config))


def served_model_name(vllm_config: VllmConfig) -> str:
    """The first name under which clients know the model."""
    name: Any = vllm_config.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def compatibility_hash(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Equal in two engines that can read each other's leased blocks: what NIXL's own
    handshake compares (without the attention backend, which only workers know and which
    the handshake still checks), and the block size, by which leases are cut."""
    factors = {
        "nixl": compute_nixl_compatibility_hash(vllm_config, attn_backend_name=""),
        "block_size": block_size(kv_cache_config),
        "groups": len(kv_cache_config.kv_cache_groups),
    }
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:32]


def describe_engine(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: Options,
    *,
    is_prefill: bool,
    side_channel: tuple[str, int],
) -> registry_pb2.Engine:
    """What the registry is told of this start of an engine."""
    parallel = vllm_config.parallel_config
    host, port = side_channel
    return registry_pb2.Engine(
        engine_id=options.engine_id,
        role=(registry_pb2.ENGINE_ROLE_PREFILL if is_prefill else registry_pb2.ENGINE_ROLE_DECODE),
        incarnation=options.incarnation,
        model=served_model_name(vllm_config),
        weights_version=options.weights_version,
        http_address=options.http_address,
        side_channel_host=host,
        side_channel_port=port,
        block_size=block_size(kv_cache_config),
        parallelism=registry_pb2.Parallelism(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            data=parallel.data_parallel_size,
        ),
        kv_bytes_per_token=kv_bytes_per_token(kv_cache_config) * parallel.tensor_parallel_size,
        compatibility_hash=compatibility_hash(vllm_config, kv_cache_config),
        engine_version=vllm_version,
    )
