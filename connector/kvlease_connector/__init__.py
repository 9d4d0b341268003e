"""The vLLM connector of kvlease: NIXL transfers under block leases.

vLLM loads it through ``kv_connector: KvLeaseConnector`` and ``kv_connector_module_path:
kvlease_connector``; ``kvlease engine`` writes that configuration. vLLM is imported only
when the class is asked for, so the rules in this package can be used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlease_connector.connector import KvLeaseConnector

__all__ = ["KvLeaseConnector"]


def __getattr__(name: str) -> object:
    if name != "KvLeaseConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvlease_connector.compat import require_supported_vllm

    require_supported_vllm()
    from kvlease_connector.connector import KvLeaseConnector

    return KvLeaseConnector
