"""`kvlease model make`."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from kvlease.cli.tiny_model import MARKER, Made, make_model
from kvlease.config import ConfigError

# What every machine makes. It may change with the model, never by itself: numbers in
# documents and in tests rest on these weights.
WEIGHTS_SHA256 = "88feb55d06dc46b2eb0bb244e2113bfe511ae05cca7b8825ee580f2fe76551e8"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "model"
    assert make_model(directory) is Made.NEW
    return directory


def test_the_weights_are_the_same_on_every_machine(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == WEIGHTS_SHA256


def test_the_weights_are_a_safetensors_file_with_all_its_tensors(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    spans = sorted(tensor["data_offsets"] for tensor in header.values())
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert spans[-1][1] == len(content) - 8 - length
    assert (
        sum(tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in header.values())
        == 2 * 24_397_312
    )


def test_transformers_reads_it_and_text_survives_its_tokenizer(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    text = "Grüße <|im_end|> \n\t 漢字"
    tokens = tokenizer(text).input_ids
    assert tokens.count(258) == 1  # <|im_end|>, one token
    assert len(tokens) == len(text.encode()) - len("<|im_end|>") + 1
    assert tokenizer.decode(tokens) == text


def test_its_chat_template_is_chatml_and_a_history_is_a_prefix_of_the_next_one(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model))
    messages = [{"role": "user", "content": "one"}]
    first = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert first == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    second = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert second.startswith(first + "two<|im_end|>\n")


def test_making_it_again_leaves_it_as_it_is(model: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert make_model(model) is Made.ALREADY
    assert (model / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / MARKER).write_text('{"sha256": {"config.json": "0"}}')
    assert make_model(directory) is Made.NEW
    assert make_model(directory) is Made.ALREADY


def test_a_directory_with_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        make_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_its_place_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        make_model(tmp_path / "model")
