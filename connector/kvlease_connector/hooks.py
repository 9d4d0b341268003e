"""What the connector relies on in vLLM, as a list that can be held against its sources.

The check reads sources and imports nothing, so it runs on versions that cannot run here
(``tests/unit/test_vllm_hooks.py`` holds it against each supported series).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FILES = {
    "nixl": "vllm/distributed/kv_transfer/kv_connector/v1/nixl",
    "v1": "vllm/distributed/kv_transfer/kv_connector/v1",
    "core": "vllm/v1/core",
    "config": "vllm/config",
    "vllm": "vllm/v1",
}

_SIGNATURES = """
nixl/connector.py       NixlBaseConnector.__init__(vllm_config, role, kv_cache_config)
nixl/connector.py       NixlBaseConnector.update_connector_output(connector_output)
nixl/connector.py       NixlBaseConnector.request_finished_all_groups(request, block_ids)
nixl/connector.py       NixlBaseConnector.get_transfer_results(finished_req_ids)
nixl/connector.py       NixlPullConnector.start_load_kv(forward_context)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.__init__(vllm_config, engine_id, kv_cache_config)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.on_new_request(request)
nixl/base_scheduler.py  NixlBaseConnectorScheduler._stop_heartbeat(req_id)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.set_xfer_handshake_metadata(metadata)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.build_connector_meta(scheduler_output)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.update_connector_output(connector_output)
nixl/base_scheduler.py  NixlBaseConnectorScheduler.shutdown()
nixl/pull_scheduler.py  NixlPullConnectorScheduler.get_num_new_matched_tokens(request, num_computed_tokens)
nixl/pull_scheduler.py  NixlPullConnectorScheduler.update_state_after_alloc(request, blocks, num_external_tokens)
nixl/pull_scheduler.py  NixlPullConnectorScheduler.request_finished(request, block_ids)
nixl/pull_worker.py     NixlPullConnectorWorker.__init__(vllm_config, engine_id, kv_cache_config)
nixl/pull_worker.py     NixlPullConnectorWorker.start_load_kv(metadata)
nixl/pull_worker.py     NixlPullConnectorWorker._get_new_notifs()
nixl/base_worker.py     NixlBaseConnectorWorker._nixl_handshake(host, port)
nixl/base_worker.py     NixlBaseConnectorWorker._pop_done_transfers(transfers)
nixl/metadata.py        compute_nixl_compatibility_hash(vllm_config, attn_backend_name)
v1/base.py              KVConnectorBase_V1.bind_kv_cache_manager(kv_cache_manager)
v1/base.py              KVConnectorBase_V1.build_connector_worker_meta()
v1/base.py              KVConnectorBase_V1.has_pending_block_frees()
v1/base.py              KVConnectorBase_V1.take_events()
v1/base.py              KVConnectorWorkerMetadata.aggregate(other)
core/block_pool.py      BlockPool.touch(blocks)
core/block_pool.py      BlockPool.free_blocks(ordered_blocks)
core/block_pool.py      BlockPool.get_num_free_blocks()
core/kv_cache_manager.py KVCacheManager.get_blocks(request_id)
"""  # noqa: E501
"""File, then class and method (or function) with the parameters that we pass or take."""

_TEXTS = """
nixl/base_scheduler.py  self.decoder_kv_blocks_ttl
nixl/base_scheduler.py  self.kv_recompute_threshold
nixl/base_scheduler.py  self.is_bidirectional_kv_xfer_enabled
nixl/base_scheduler.py  self._reqs_need_send
nixl/base_worker.py     current_platform.discover_numa_topology()
nixl/base_worker.py     self.consumer_notification_counts_by_req
nixl/pull_worker.py     "{remote_request_id}:{expected_consumers}"
nixl/pull_scheduler.py  "_remote_blocks_processed"
nixl/metadata.py        GET_META_MSG
nixl/metadata.py        self.reqs_in_batch
nixl/metadata.py        self.reqs_not_processed
core/sched/scheduler.py self.connector.bind_kv_cache_manager(self.kv_cache_manager)
core/sched/scheduler.py self.connector.on_new_request(request)
core/sched/scheduler.py if ext_tokens is None:
core/sched/scheduler.py self.connector.take_events()
core/sched/scheduler.py self.connector.has_pending_block_frees()
core/sched/output.py    scheduled_new_reqs
core/sched/output.py    scheduled_cached_reqs
core/sched/output.py    num_computed_tokens
vllm/outputs.py         kv_connector_worker_meta
vllm/outputs.py         failed_recving
vllm/request.py         self.skip_reading_prefix_cache
vllm/request.py         self.kv_transfer_params
vllm/request.py         self.arrival_time
config/kv_transfer.py   kv_connector_module_path
config/vllm.py          instance_id
"""
"""File, then a field, attribute or line that must occur in it."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A method or function with the parameters we pass or take, in order."""

    path: str
    owner: str
    """Class, or "" for a module's function."""
    name: str
    parameters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Text:
    """Something that must occur in a file."""

    path: str
    text: str


def _rows(table: str) -> Iterator[tuple[str, str]]:
    for line in table.strip().splitlines():
        file, content = line.split(None, 1)
        folder, _, name = file.partition("/")
        yield f"{_FILES[folder]}/{name}", content


def _hook(path: str, signature: str) -> Hook:
    name, _, parameters = signature.rstrip(")").partition("(")
    owner, _, function = name.rpartition(".")
    return Hook(path, owner, function, [p for p in parameters.split(", ") if p])


HOOKS: Sequence[Hook] = [_hook(*row) for row in _rows(_SIGNATURES)]
TEXTS: Sequence[Text] = [Text(*row) for row in _rows(_TEXTS)]


def missing_hooks(root: Path) -> list[str]:
    """What the vLLM sources under ``root`` (the folder that holds ``vllm/``) lack, a
    sentence each; empty if the connector finds all it needs."""
    problems = []
    trees: dict[str, ast.Module] = {}
    for path in sorted({hook.path for hook in HOOKS} | {text.path for text in TEXTS}):
        try:
            trees[path] = ast.parse((root / path).read_text())
        except FileNotFoundError:
            problems.append(f"{path} does not exist")
    for hook in HOOKS:
        if hook.path in trees:
            problems += _check(hook, trees[hook.path])
    for text in TEXTS:
        if text.path in trees and text.text not in (root / text.path).read_text():
            problems.append(f"{text.path} has no {text.text}")
    return problems


def _check(hook: Hook, tree: ast.Module) -> list[str]:
    where = f"{hook.path}: {hook.owner + '.' if hook.owner else ''}{hook.name}"
    body: list[ast.stmt] = tree.body
    if hook.owner:
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == hook.owner]
        if not classes:
            return [f"{hook.path} has no class {hook.owner}"]
        body = classes[0].body
    functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == hook.name]
    if not functions:
        return [f"{where} does not exist"]
    names = [a.arg for a in functions[0].args.args if a.arg != "self"]
    if names[: len(hook.parameters)] != list(hook.parameters):
        return [f"{where} takes ({', '.join(names)}), not ({', '.join(hook.parameters)}, ...)"]
    return []
