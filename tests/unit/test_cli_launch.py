"""`kvlease engine`: the command, environment and transfer configuration of an engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvlease import config
from kvlease.cli import launch
from kvlease.cli.engine import parse_cpuset
from kvlease.cli.main import cli
from kvlease.config import ConfigError, Settings
from kvlease_connector import compat


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "a-model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 4096}')
    return directory


def engine(model: Path | str, **changes: Any) -> launch.Engine:
    values: dict[str, Any] = {
        "role": "decode",
        "model": str(model),
        "engine_id": "decode-7",
        "incarnation": "1f" * 16,
        "port": 8201,
        "side_channel_port": 5701,
        "cpu": True,
    }
    return launch.Engine(**{**values, **changes})


def option(built: launch.Launch, name: str) -> str:
    """The last value: the one that argparse takes."""
    indices = [index for index, word in enumerate(built.argv) if word == name]
    return built.argv[indices[-1] + 1]


def test_a_decode_engine_consumes_and_a_prefill_engine_produces(model: Path) -> None:
    assert launch.transfer_config(engine(model))["kv_role"] == "kv_consumer"
    assert launch.transfer_config(engine(model, role="prefill"))["kv_role"] == "kv_producer"


def test_the_transfer_configuration_is_the_one_the_connector_reads(model: Path) -> None:
    from kvlease_connector.options import parse

    settings = config.load(["retention_ttl=30", "etcd_endpoints=10.0.0.1:2379"], env={})
    built = launch.build(engine(model, settings=settings), env={})
    transfer = json.loads(option(built, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "KvLeaseConnector"
    assert transfer["kv_connector_module_path"] == "kvlease_connector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_buffer_device"] == "cpu"
    assert transfer["engine_id"] == "decode-7-" + "1f" * 16
    options = parse(
        transfer["kv_connector_extra_config"], default_engine_id="", default_incarnation=""
    )
    assert options.engine_id == "decode-7"
    assert options.incarnation == "1f" * 16
    assert options.http_address == "http://127.0.0.1:8201"
    assert options.settings.retention_ttl == 30


def test_etcd_and_its_password_stay_out_of_an_engines_command_line(model: Path) -> None:
    settings = config.load(
        ["etcd_endpoints=10.0.0.1:2379", "etcd_user=root", "etcd_password=hunter2"], env={}
    )
    built = launch.build(engine(model, settings=settings), env={})
    assert "hunter2" not in " ".join(built.argv)
    assert "10.0.0.1" not in " ".join(built.argv)


def test_the_users_own_arguments_come_last_and_so_win(model: Path) -> None:
    built = launch.build(engine(model, vllm_arguments=("--max-model-len", "1000")), env={})
    assert option(built, "--max-model-len") == "1000"


def test_the_context_is_no_longer_than_the_model_allows(model: Path) -> None:
    assert option(launch.build(engine(model), env={}), "--max-model-len") == "4096"


def test_variables_that_the_user_has_set_are_left_alone(model: Path) -> None:
    built = launch.build(engine(model), env={"UCX_TLS": "tcp", "OMP_NUM_THREADS": "2"})
    assert built.env["UCX_TLS"] == "tcp"
    assert built.env["OMP_NUM_THREADS"] == "2"
    assert built.env["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_a_gpu_engine_gets_no_cpu_options(model: Path) -> None:
    built = launch.build(engine(model, cpu=False), env={})
    assert "--enforce-eager" not in built.argv
    assert "UCX_TLS" not in built.env
    assert "kv_buffer_device" not in launch.transfer_config(engine(model, cpu=False))


def test_vllm_traces_where_kvlease_does(model: Path) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    built = launch.build(engine(model), env=env)
    assert option(built, "--otlp-traces-endpoint") == "http://collector:4317"
    assert built.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "grpc"
    assert "--otlp-traces-endpoint" not in launch.build(engine(model), env={}).argv


def test_an_engine_that_listens_everywhere_is_advertised_by_a_name(model: Path) -> None:
    everywhere = engine(model, host="0.0.0.0")
    assert everywhere.http_address == f"http://{socket.gethostname()}:8201"
    named = engine(model, host="0.0.0.0", advertise="decode-7.internal")
    assert named.http_address == "http://decode-7.internal:8201"
    assert launch.build(named, env={}).env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "decode-7.internal"


def test_a_model_of_a_hub_keeps_its_whole_name() -> None:
    built = launch.build(engine("Qwen/Qwen3-8B", cpu=False), env={})
    assert option(built, "--served-model-name") == "Qwen/Qwen3-8B"
    assert "HF_HUB_OFFLINE" not in built.env


def test_the_printed_command_runs_in_a_shell_with_a_new_incarnation_each_time(model: Path) -> None:
    awkward = engine(model, vllm_arguments=("--chat-template", 'it\'s "quoted" $HOME'))
    built = launch.build(awkward, env={})
    # `echo` in python's place: what the shell makes of each word.
    script = launch.shell_command(built).replace(f" {built.argv[0]} -m ", " printf '%s\\n' -m ", 1)
    runs = [
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    words = [run.splitlines() for run in runs]
    transfer = [json.loads(w[w.index("--kv-transfer-config") + 1]) for w in words]
    incarnations = [t["kv_connector_extra_config"]["kvlease"]["incarnation"] for t in transfer]
    assert incarnations[0] != incarnations[1]
    assert all(len(incarnation) == 32 for incarnation in incarnations)
    assert transfer[0]["engine_id"] == f"decode-7-{incarnations[0]}"
    assert words[0][-1] == 'it\'s "quoted" $HOME'


def test_print_starts_nothing(model: Path) -> None:
    result = CliRunner().invoke(
        cli, ["engine", "decode", "--cpu", "--model", str(model), "--print", "--", "--seed", "1"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith("INCARNATION=")
    assert result.output.rstrip().endswith("--seed 1")


def test_a_missing_model_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"kvlease model make {tmp_path}/none"):
        launch.check(engine(tmp_path / "none"))


def test_a_name_of_a_hub_is_taken_on_gpus_only() -> None:
    launch.check_model("Qwen/Qwen3-8B", cpu=False)
    with pytest.raises(ConfigError, match="there is no model"):
        launch.check_model("Qwen/Qwen3-8B", cpu=True)


def test_a_directory_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        launch.check(engine(tmp_path))


def test_an_unsupported_vllm_names_the_supported_range(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.29.1")
    with pytest.raises(ConfigError, match=r"0\.29\.1.*0\.32 to 0\.33"):
        launch.check(engine(model))


def test_no_vllm_says_how_to_install_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: None)
    with pytest.raises(ConfigError, match="pip install"):
        launch.check(engine(model))


@pytest.mark.parametrize("option_name", ["--port", "--side-channel-port"])
def test_a_taken_port_names_the_option_to_change(model: Path, option_name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = {option_name.strip("-").replace("-", "_"): port}
        with pytest.raises(ConfigError, match=f"port {port} .* is taken.* {option_name}"):
            launch.check(engine(model, **{"port": 0, "side_channel_port": 0, **taken}))


def test_a_core_that_is_not_there_is_a_sentence(model: Path) -> None:
    missing = max(os.sched_getaffinity(0)) + 1000
    with pytest.raises(ConfigError, match=f"core {missing} is not one"):
        launch.check(engine(model, port=0, side_channel_port=0), cpus=[missing])


def test_cpusets_are_lists_and_ranges() -> None:
    assert parse_cpuset("0,2-3") == [0, 2, 3]
    assert parse_cpuset("") == []
    with pytest.raises(ConfigError, match="not a list of cores"):
        parse_cpuset("0-x")


def test_default_settings_need_no_words(model: Path) -> None:
    transfer = launch.transfer_config(engine(model, settings=Settings()))
    assert transfer["kv_connector_extra_config"]["kvlease"]["settings"] == {}
