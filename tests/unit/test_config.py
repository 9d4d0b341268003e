"""Settings: what does not fit is said in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvlease.config import ConfigError, Settings, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("registry_listen=127.0.0.1:99999", "host:port with a port up to 65535"),
        ("metrics_listen=foo", "host:port"),
        ("lease_endpoint=a:b", "host:port"),
        ("registry_endpoint=http://127.0.0.1:7401", "without a scheme or a path, as in 127.0.0.1:"),
        ("lease_endpoint=a:7402,https://b:7402", "write host:port without a scheme"),
        ("metrics_listen=http://127.0.0.1:9100/metrics", "write host:port without a scheme"),
        ("jaeger_url=javascript:alert(1)", "must look like http://host:16686"),
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
        "jaeger_url=https://traces.example/jaeger/",
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


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("KVLEASE_RETENTOIN_TTL", r"is not a setting; did you mean KVLEASE_RETENTION_TTL\?"),
        ("KVLEASE_LEASE_ENDPOINTS", r"did you mean KVLEASE_LEASE_ENDPOINT\?"),
        ("KVLEASE_retention_ttl", r"did you mean KVLEASE_RETENTION_TTL\?"),
        ("KVLEASE_ZZZ", "the environment variable KVLEASE_ZZZ is not a setting; unset it"),
    ],
)
def test_a_variable_that_is_no_setting_is_named(variable: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(env={variable: "600"})


def test_variables_of_others_are_let_be() -> None:
    # Those that Kubernetes sets in every pod for a service named kvlease-lease.
    names = ["LEASE_SERVICE_HOST", "LEASE_SERVICE_PORT_GRPC", "LEASE_PORT", "LEASE_PORT_7402_TCP"]
    load(env={f"KVLEASE_{name}": "tcp://10.0.0.1:7402" for name in names})


@pytest.mark.parametrize("folder", ["compose", "tests", "scripts", ".ci"])
def test_variables_that_this_repository_names_are_known(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert files
    for path in files:
        if path.name != Path(__file__).name and path.suffix != ".pyc":
            text = path.read_text(errors="ignore")
            for name in re.findall(r"\bKVLEASE_[A-Z_]*[A-Z]\b", text):
                if name.removeprefix("KVLEASE_").lower() not in Settings.model_fields:
                    load(env={name: "1" if name != "KVLEASE_CONFIG" else ""})


def test_a_secret_that_cannot_be_used_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "kvlease.toml"
    file.write_text("etcd_password = 271828\n")
    with pytest.raises(ConfigError, match=r"etcd_password=\.\.\. cannot be used") as raised:
        load(config_file=str(file))
    assert "271828" not in str(raised.value)
