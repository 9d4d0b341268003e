"""Settings: what does not fit is said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlease.config import ConfigError, load


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("registry_listen=127.0.0.1:99999", "host:port with a port up to 65535"),
        ("metrics_listen=foo", "host:port"),
        ("lease_endpoint=a:b", "host:port"),
        ("etcd_prefix=foo", "must look like /name"),
        ("etcd_prefix=/a//b", "must look like /name"),
        ("max_retention=inf", "finite"),
        ("retention_ttl=5", "below session_ttl"),
        ("retentoin_ttl=5", "did you mean retention_ttl"),
        ("retention_ttl", "name=value"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load([assignment], env={})


@pytest.mark.parametrize(
    "assignment",
    [
        "etcd_endpoints=",
        "etcd_endpoints=etcd-0:2379, etcd-1:2379",
        "etcd_endpoints=http://127.0.0.1:2379/",
        "registry_listen=[::]:7401",
        "metrics_listen=",
        "etcd_prefix=/clusters/a/",
    ],
)
def test_a_setting_as_people_write_it_is_taken(assignment: str) -> None:
    load([assignment], env={})


def test_a_file_that_is_no_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "kvlease.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(env={}, config_file=str(path))


def test_an_assignment_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kvlease.toml"
    path.write_text("max_readers = 1\nsession_ttl = 5\nclaim_margin = 3\n")
    settings = load(
        ["max_readers=3"],
        env={"KVLEASE_MAX_READERS": "2", "KVLEASE_SESSION_TTL": "6"},
        config_file=str(path),
    )
    assert (settings.max_readers, settings.session_ttl, settings.claim_margin) == (3, 6, 3.0)
