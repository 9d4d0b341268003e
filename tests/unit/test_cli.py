"""The command line as such: help, errors, settings."""

from __future__ import annotations

import re
from pathlib import Path

import click
import grpc
import pytest
from click.testing import CliRunner
from rich.table import Table

from kvlease.cli import services, tables
from kvlease.cli.main import cli, main
from kvlease.cli.settings import all_settings, as_markdown
from kvlease.cli.text import clean
from kvlease.config import Settings
from kvlease.v1 import registry_pb2

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- kvlease settings --markdown -->", "<!-- end -->"


def _commands() -> list[str]:
    return cli.list_commands(click.Context(cli))


@pytest.mark.parametrize("name", _commands())
def test_every_command_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Examples:" in result.output


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert all(re.search(rf"^  {name} +\S", result.output, re.MULTILINE) for name in _commands())


def test_a_configuration_error_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["engines", "--set", "sesion_ttl=3"])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "kvlease: --set: there is no setting 'sesion_ttl'; did you mean session_ttl?\n"
    )


@pytest.mark.parametrize(
    "command",
    [["engines"], ["drain", "decode-0"], ["end", "chat-1"], ["renew", "chat-1", "--for", "60"]],
)
def test_an_unreachable_registry_is_one_sentence(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--set", "registry_endpoint=127.0.0.1:1"])
    assert exit_info.value.code == 1
    assert "no registry answers at 127.0.0.1:1: start it" in capsys.readouterr().err


def test_a_directory_without_a_stack_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["leases", "--dir", str(tmp_path)])
    assert exit_info.value.code == 2
    assert f"no stack runs in {tmp_path}" in capsys.readouterr().err


def test_settings_lists_all_of_them() -> None:
    assert [item["name"] for item in all_settings()] == list(Settings.model_fields)
    assert all(item["description"] for item in all_settings())


def test_the_readmes_table_of_settings_is_the_real_one() -> None:
    text = README.read_text()
    between = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert between == as_markdown(), "run `kvlease settings --markdown` and paste it"


def test_addresses_come_from_the_stack_in_the_current_directory_if_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".kvlease").mkdir()
    (tmp_path / ".kvlease" / "endpoints.json").write_text(
        '{"registry_grpc": "127.0.0.1:9", "lease_replicas_grpc": ["127.0.0.1:10", "127.0.0.1:11"]}'
    )
    monkeypatch.chdir(tmp_path)
    local = services.addresses(None, (), None)
    assert local == services.Addresses("127.0.0.1:9", "127.0.0.1:10,127.0.0.1:11")
    said = services.addresses(None, ("registry_endpoint=10.0.0.1:7401",), None)
    assert said.registry == "10.0.0.1:7401"


def test_json_has_numbers_as_numbers_and_every_field() -> None:
    engine = registry_pb2.Engine(
        engine_id="decode-0", usage=registry_pb2.BlockUsage(total_blocks=2**40)
    )
    value = services.as_dict(engine)
    assert value["usage"]["total_blocks"] == 2**40
    assert value["usage"]["retained_blocks"] == 0
    assert value["kv_bytes_per_token"] == 0
    assert value["http_address"] == ""
    assert list(value)[:2] == ["engine_id", "role"]


class Failed(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # grpc has no types
    """A call that has ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._ended = code, details

    def code(self) -> grpc.StatusCode:
        return self._ended[0]

    def details(self) -> str:
        return self._ended[1]

    def trailing_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "is not the registry"),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            "Received http2 header with status: 404",
            "is not the registry",
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "Received http2 header with status: 403",
            "is not the registry",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Received http2 header with status: 503", "no registry"),
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            "there is no 'a\x1b[2J'",
            r"refuses: there is no 'a\x1b",
        ),
    ],
)
def test_what_is_another_server_is_told_from_one_that_is_down(
    code: grpc.StatusCode, details: str, said: str
) -> None:
    service = services.Addresses("127.0.0.1:1", "127.0.0.1:2").registry_service
    sentence = service.sentence(Failed(code, details))
    assert said in sentence
    assert ("--set registry_endpoint=HOST:PORT (its default port is 7401)" in sentence) == (
        said == "is not the registry"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


def test_one_thing_is_not_called_many() -> None:
    assert tables.count(1, "lease") == "1 lease"
    assert tables.count(0, "lease") == "0 leases"


def test_a_conversation_id_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert clean("Grüße 漢字") == "Grüße 漢字"


def test_config_errors_of_stacks_name_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        ("--store", "memory", "--routers", "2"): "use --store etcd",
        ("--store", "memory", "--etcd", "127.0.0.1:1"): "--etcd goes with --store etcd",
        ("--etcd", "127.0.0.1:1"): "no etcd answers at 127.0.0.1:1",
        ("--set", "retention_ttl=3"): "raise retention_ttl",
        ("--engines", "cpu", "--model", str(tmp_path / "none")): "kvlease model make",
    }
    for arguments, sentence in cases.items():
        with pytest.raises(SystemExit) as exit_info:
            main(["up", "--dir", str(tmp_path / "stack"), "--engines", "none", *arguments])
        assert exit_info.value.code == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["up", "--dir", str(tmp_path / "stack"), "--engines", "none"])
    assert "there is no etcd in PATH" in capsys.readouterr().err


def test_a_watch_shows_what_it_knew_and_the_problem_during_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "_WATCH_EVERY_S", 0.0)
    steps = iter([["decode-0"], grpc.RpcError(), KeyboardInterrupt()])

    def fetch() -> list[str]:
        step = next(steps)
        if isinstance(step, BaseException):
            raise step
        return step

    def table(names: list[str]) -> Table:
        shown = tables.new("engine", title="engines")
        for name in names:
            shown.add_row(name)
        return shown

    with pytest.raises(KeyboardInterrupt):
        tables.show(
            fetch,
            table,
            as_json=False,
            watch=True,
            sentence=lambda _: "no registry answers",
            nothing=str,
        )
    shown = capsys.readouterr().out
    assert "decode-0" in shown
    assert "as it was before this: no registry answers" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prefill", "2"], "--prefill has no effect with --engines none"),
        (["--engine-arg", "--x"], "--engine-arg has no effect with --engines none"),
        (["--set", "router_listen=127.0.0.1:8000"], "router_listen has no effect on a local stack"),
        (["--set", "lease_endpoint=10.0.0.5:7402"], "lease_endpoint has no effect"),
        (["--set", "etcd_endpoints=10.0.0.5:2379"], "etcd that runs already with --etcd HOST:PORT"),
        (["--set", "etcd_ca=ca.pem"], "etcd that runs already with --etcd HOST:PORT"),
    ],
)
def test_up_refuses_what_would_have_no_effect(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stack = ["--store", "memory", "--engines", "none", "--dir", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_info:
        main(["up", *stack, *arguments])
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err
