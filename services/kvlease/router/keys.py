"""The file of API keys: ``{"<api key>": "<tenant>"}``."""

from __future__ import annotations

import json
from pathlib import Path

from kvlease.config import ConfigError


def read_keys(path: str) -> dict[str, str] | None:
    """API key → tenant. None where ``path`` is empty: there are no API keys.

    Raises :class:`ConfigError`.
    """
    if not path:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"api_keys_file {path} cannot be read: {error.strerror}; mend the path or unset it"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f'api_keys_file {path} is not valid JSON ({error}); write {{"<api key>": "<tenant>"}}'
        ) from None
    good = isinstance(content, dict) and all(
        isinstance(tenant, str) and tenant and key for key, tenant in content.items()
    )
    if not good or not content:
        raise ConfigError(
            f'api_keys_file {path} must hold one JSON object {{"<api key>": "<tenant>"}} with '
            "at least one key"
        )
    return dict(content)
