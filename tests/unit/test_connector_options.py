"""What the connector takes from vLLM's extra config."""

from __future__ import annotations

import pytest

from kvlease.config import ConfigError
from kvlease_connector.options import parse


def test_identity_and_settings_come_from_the_extra_config() -> None:
    options = parse(
        {
            "kvlease": {
                "engine_id": "decode-0",
                "incarnation": "i1",
                "http_address": "http://10.0.0.7:8000/",
                "settings": {"retention_ttl": 900},
            }
        },
        default_engine_id="uuid",
        default_incarnation="abcde",
    )
    assert options.engine_id == "decode-0"
    assert options.http_address == "http://10.0.0.7:8000"
    assert options.settings.retention_ttl == 900


def test_two_starts_of_one_engine_have_different_transfer_ids() -> None:
    ids = {
        parse(
            {"kvlease": {"engine_id": "decode-0", "incarnation": incarnation}},
            default_engine_id="",
            default_incarnation="",
        ).transfer_engine_id
        for incarnation in ("i1", "i2")
    }
    assert ids == {"decode-0-i1", "decode-0-i2"}


def test_a_transfer_id_that_names_the_incarnation_already_is_kept() -> None:
    options = parse({}, default_engine_id="decode-0-i1", default_incarnation="i1")
    assert options.transfer_engine_id == "decode-0-i1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kvlease": {"engine": "x"}}, "did you mean engine_id"),
        ({"kvlease": {"settings": {"retentoin_ttl": 5}}}, "did you mean retention_ttl"),
        ({"kvlease": {"settings": {"retention_ttl": 5}}}, "below session_ttl"),
        ({"kvlease": "decode-0"}, "must be an object"),
    ],
)
def test_a_mistake_is_named_in_a_sentence(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(given, default_engine_id="e", default_incarnation="i")
