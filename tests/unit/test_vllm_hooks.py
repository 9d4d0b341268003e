"""The connector's hooks against the sources of each supported vLLM."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvlease_connector.compat import SUPPORTED_SERIES, UnsupportedVllm, check_version
from kvlease_connector.hooks import HOOKS, TEXTS, missing_hooks

NEWEST = "0.33.0"
CACHE = Path(__file__).parents[2] / "build" / "vllm-sources"


def installed_sources() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.fail("vLLM is not installed: run `make install`")
    return Path(spec.origin).parents[1]


def released_sources(version: str) -> Path:
    """The hooked files out of a released wheel, kept in build/."""
    root = CACHE / version
    wanted = {item.path for item in (*HOOKS, *TEXTS)}
    if all((root / path).exists() for path in wanted):
        return root
    download = root / "wheel"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--dest", str(download), f"vllm=={version}"),
        ],
        check=True,
        timeout=170,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in wanted & names:
            archive.extract(path, root)
    wheel.unlink()
    return root


def test_the_installed_vllm_has_every_hook() -> None:
    assert missing_hooks(installed_sources()) == []


def test_the_newest_supported_vllm_has_every_hook() -> None:
    assert missing_hooks(released_sources(NEWEST)) == []


def test_a_changed_signature_is_found(tmp_path: Path) -> None:
    # given the installed sources with one method renamed and one parameter gone
    for item in (*HOOKS, *TEXTS):
        target = tmp_path / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((installed_sources() / item.path).read_text())
    pool = tmp_path / "vllm/v1/core/block_pool.py"
    pool.write_text(
        pool.read_text()
        .replace("def touch(", "def keep(")
        .replace("ordered_blocks: Iterable", "blocks: Iterable")
    )
    # then both are reported, in words
    assert missing_hooks(tmp_path) == [
        "vllm/v1/core/block_pool.py: BlockPool.touch does not exist",
        "vllm/v1/core/block_pool.py: BlockPool.free_blocks takes (blocks), "
        "not (ordered_blocks, ...)",
    ]


@pytest.mark.parametrize("series", SUPPORTED_SERIES)
def test_a_supported_version_is_accepted(series: tuple[int, int]) -> None:
    check_version(f"{series[0]}.{series[1]}.1+cpu")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "nightly"])
def test_another_version_is_refused_with_the_supported_range(version: str) -> None:
    with pytest.raises(UnsupportedVllm, match=r"vLLM 0\.32 to 0\.33"):
        check_version(version)


def test_a_missing_vllm_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(UnsupportedVllm, match="pip install"):
        check_version(None)
