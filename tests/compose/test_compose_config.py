"""Every combination of the compose files is valid, and says nothing about it."""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from compose.compose_stack import DIRECTORY
from compose.docker_host import BASE_IMAGES, run

from kvlease import __version__

OVERRIDES = ("compose.ha.yaml", "compose.gpu.yaml", "compose.tls.yaml")

COMBINATIONS = [files for count in range(4) for files in itertools.combinations(OVERRIDES, count)]

ROOT = DIRECTORY.parent


def config(*overrides: str) -> dict[str, dict[str, object]]:
    """The services of compose.yaml and ``overrides``."""
    files = [f for name in ("compose.yaml", *overrides) for f in ("-f", str(DIRECTORY / name))]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    ended = run("docker", "compose", *files, "config", "--format", "json", env=env)
    assert ended.stderr == ""
    services: dict[str, dict[str, object]] = json.loads(ended.stdout)["services"]
    return services


@pytest.mark.parametrize("overrides", COMBINATIONS, ids="+".join)
def test_files_fit_together(docker: None, overrides: tuple[str, ...]) -> None:
    services = config(*overrides)
    for name, service in services.items():
        image = str(service["image"])
        assert re.fullmatch(r".+:v?\d[\w.-]+|python:3.11-slim-bookworm", image), image
        assert not image.startswith("kvlease/") or image.endswith(f":{__version__}")
        assert {"mem_limit", "pids_limit", "logging", "security_opt"} <= set(service), name
        assert service["init"] is (not name.startswith("etcd"))
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        if name != "ca":  # ends by itself
            assert service["restart"] == "unless-stopped"
            assert "healthcheck" in service


def test_three_members_know_each_other(docker: None) -> None:
    services = config("compose.ha.yaml", "compose.tls.yaml")
    members = {name: each for name, each in services.items() if name.startswith("etcd")}
    assert len(members) == 3
    assert all(member["scale"] == 1 for name, member in members.items() if name != "etcd")
    environments = [member["environment"] for member in members.values()]
    assert len({env["ETCD_INITIAL_CLUSTER"] for env in environments}) == 1  # type: ignore[index]
    assert {env["ETCD_PEER_CLIENT_CERT_AUTH"] for env in environments} == {"true"}  # type: ignore[index]
    volumes = [member["volumes"][0]["source"] for member in members.values()]  # type: ignore[index]
    assert len(set(volumes)) == 3


@pytest.mark.parametrize("overrides", COMBINATIONS, ids="+".join)
def test_what_a_turn_needs_brings_all_members(docker: None, overrides: tuple[str, ...]) -> None:
    # `up front` starts what it depends on: one member of three would wait for the others.
    services = config(*overrides)
    needed, new = set[str](), {"front"}
    while new:
        needed |= new
        new = {on for name in new for on in services[name].get("depends_on", {})} - needed  # type: ignore[attr-defined]
    running = {name for name, each in services.items() if each.get("scale", 1) != 0}
    assert {name for name in running if name.startswith("etcd")} <= needed
    assert needed <= running


def test_an_engine_on_a_gpu_has_it_for_itself(docker: None) -> None:
    services = config("compose.gpu.yaml")
    gpus = []
    for name in ("prefill", "decode"):
        assert str(services[name]["image"]).startswith("kvlease/engine-gpu")
        assert "--cpu" not in services[name]["command"]  # type: ignore[operator]
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]  # type: ignore[index]
        gpus += device["device_ids"]
    assert sorted(gpus) == ["0", "1"]


def test_versions_are_those_of_the_local_installation() -> None:
    """What a Dockerfile pins is written down in scripts/install and pyproject.toml, too."""
    install = Path(ROOT / "scripts/install").read_text()
    wanted = dict(re.findall(r"^(TORCH|VLLM|NIXL)=(\S+)$", install, re.MULTILINE))
    dockerfile = (DIRECTORY / "Dockerfile.cpu").read_text()
    assert dict(re.findall(r"^ARG (TORCH|VLLM|NIXL)=(\S+)$", dockerfile, re.MULTILINE)) == wanted
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wanted["VLLM"] in extras["optional-dependencies"]["engine-cpu"]


def test_stand_ins_are_for_the_images_that_are_used(docker: None) -> None:
    assert config()["etcd"]["image"] == BASE_IMAGES["etcd"]
    for name in ("Dockerfile", "Dockerfile.cpu"):
        bases = re.findall(r"^FROM (\S+)", (DIRECTORY / name).read_text(), re.MULTILINE)
        assert set(bases) == {BASE_IMAGES["python"]}
