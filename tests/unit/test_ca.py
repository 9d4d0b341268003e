"""`kvlease ca`, and the settings that name its files."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from kvlease import tls
from kvlease.ca import Authority
from kvlease.cli.main import cli, main
from kvlease.config import ConfigError, Settings, load


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["ca", *arguments])
    assert result.exit_code == 0, result.output
    return str(result.output)


def names_in(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(name.value) for name in names.value}


def test_one_command_makes_all_certificates(tmp_path: Path) -> None:
    run(str(tmp_path), "--name", "lease-0,lease.internal,10.0.0.5", "--name", "router")

    local = {"localhost", "127.0.0.1", "::1"}
    assert names_in(tmp_path / "lease-0.pem") == {
        *("lease-0", "lease.internal", "10.0.0.5", "kvlease"),
        *local,
    }
    assert names_in(tmp_path / "router.pem") == {"router", "kvlease", *local}
    assert names_in(tmp_path / "etcd.pem") == {"etcd", *local}
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    for path in tmp_path.glob("*.pem"):
        x509.load_pem_x509_certificate(path.read_bytes()).verify_directly_issued_by(ca)
    keys = list(tmp_path.glob("*.key"))
    assert len(keys) == 4
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_the_next_run_makes_what_is_missing_and_changes_nothing(tmp_path: Path) -> None:
    run(str(tmp_path), "--name", "lease")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    said = json.loads(run(str(tmp_path), "--name", "lease", "--name", "router", "--json"))

    assert {name: row["made"] for name, row in said.items()} == {
        **dict.fromkeys(["ca", "lease", "etcd"], False),
        "router": True,
    }
    assert said["router"]["cert"] == str(tmp_path / "router.pem")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_another_certificate_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    content = authority.issue("lease", ["lease"]).cert.read_bytes()
    with pytest.raises(ConfigError, match="is for other names, and nothing is overwritten"):
        authority.issue("lease", ["lease", "lease.internal"])
    assert (tmp_path / "lease.pem").read_bytes() == content


def test_a_certificate_that_has_expired_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("lease", ["lease"], days=0)
    with pytest.raises(ConfigError, match="has expired"):
        authority.issue("lease", ["lease"])


def test_a_certificate_of_an_earlier_authority_is_told(tmp_path: Path) -> None:
    Authority(tmp_path).issue("lease", ["lease"])
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="is of another CA"):
        Authority(tmp_path).issue("lease", ["lease"])


@pytest.mark.parametrize("gone", ["ca.key", "lease.pem"])
def test_a_file_that_has_lost_its_other_half_is_told(tmp_path: Path, gone: str) -> None:
    run(str(tmp_path), "--name", "lease")
    (tmp_path / gone).unlink()
    with pytest.raises(ConfigError, match=r"one is missing"):
        Authority(tmp_path).issue("lease", ["lease"])


@pytest.mark.parametrize("name", ["../lease", "a b", "ca", "", "-x", "lease,,b"])
def test_a_name_that_cannot_be_one_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["ca", str(tmp_path / "ca"), f"--name={name}"])
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*.pem")} <= {"ca.pem"}


# Settings


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """They fit."""
    authority = Authority(tmp_path)
    pair = authority.issue("part", ["part"])
    return {
        "tls_ca": str(authority.cert),
        "tls_cert": str(pair.cert),
        "tls_key": str(pair.key),
    }


@pytest.mark.parametrize("missing", ["tls_ca", "tls_cert", "tls_key"])
def test_tls_settings_are_set_together(settings: dict[str, str], missing: str) -> None:
    del settings[missing]
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        load([f"{name}={value}" for name, value in settings.items()], env={})


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("tls_server_name=kvlease", "needs tls_ca, tls_cert and tls_key"),
        ("router_tls_cert=x.pem", "router_tls_cert and router_tls_key must be set together"),
    ],
)
def test_tls_settings_that_need_others(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load([assignment], env={})


def test_files_that_fit_are_taken_and_no_files_mean_plaintext(settings: dict[str, str]) -> None:
    found = tls.of(Settings(**settings))
    assert found is not None
    assert found.key == settings["tls_key"]
    assert tls.of(Settings()) is None


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tls_ca", None, "tls_ca=.* cannot be read: No such file"),
        ("tls_key", None, "tls_key=.* cannot be read: No such file"),
        ("tls_ca", "text", "holds no PEM certificate: name the CA that signed"),
        ("tls_cert", "text", "are not a PEM certificate and its unencrypted private key"),
        ("tls_key", "text", "are not a PEM certificate and its unencrypted private key"),
        ("tls_key", "ca.key", "are not a PEM certificate and its unencrypted private key"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    settings: dict[str, str], tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    path = Path(settings[name])
    other = tmp_path / (content or "none")
    replacement = other.read_bytes() if other.exists() else b"text"
    path.unlink()
    if content is not None:
        path.write_bytes(replacement)
    with pytest.raises(ConfigError, match=sentence):
        tls.of(Settings(**settings))


def test_a_certificate_that_has_expired_is_not_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("part", ["part"], days=0)
    settings = Settings(tls_ca=str(authority.cert), tls_cert=str(pair.cert), tls_key=str(pair.key))
    with pytest.raises(ConfigError, match=r"has expired on \d{4}-\d\d-\d\d: make a new one"):
        tls.of(settings)
