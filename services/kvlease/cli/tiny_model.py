"""A small model, the same bytes on every machine.

Qwen3 architecture, 24 M parameters in bfloat16. Random weights compute like trained ones,
which is all that reuse of KV blocks needs. The initial spread of 0.08 (not Qwen's 0.02)
makes attention look at the history: with 0.02 the first token hardly depends on it, and
a test could not tell right blocks from wrong ones.

The files are written here rather than by transformers, whose weights and file formats
change from version to version.
"""

from __future__ import annotations

import enum
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlease.config import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MARKER = "kvlease-model.json"

_LAYERS, _HIDDEN, _INTERMEDIATE = 8, 512, 1536
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 2, 64
_SPREAD = 0.08
_SEED = 0
# Ids 0 to 255 are the bytes. The model can write every id below the vocabulary's size,
# so the tokenizer must know each of them.
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<|reserved_{i}|>" for i in range(5)),
)
_VOCABULARY = 256 + len(_SPECIAL)
_END_OF_TEXT, _END_OF_MESSAGE = 256, 258

_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class Made(enum.Enum):
    """What :func:`make_model` did."""

    NEW = enum.auto()
    ALREADY = enum.auto()


def make_model(directory: Path) -> Made:
    """Makes the model in ``directory``, all of it or nothing.

    A directory that already holds it is left as it is; one that holds it damaged is made
    anew. Raises :class:`ConfigError` if the directory is something else or cannot be
    written, or if numpy is missing.
    """
    if directory.exists():
        if not directory.is_dir():
            raise ConfigError(f"{directory} is a file: name a directory for the model")
        if (directory / MARKER).is_file():
            if _is_whole(directory):
                return Made.ALREADY
        elif any(directory.iterdir()):
            raise ConfigError(
                f"{directory} holds something else and is not overwritten: name a new or "
                "empty directory for the model"
            )
    try:
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(
            tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.absolute().parent)
        )
        try:
            _write(scratch)
            scratch.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"the model cannot be written to {directory}: {error.strerror}") from None
    return Made.NEW


def _write(directory: Path) -> None:
    files: dict[str, bytes] = {
        "config.json": _json(_config()),
        "generation_config.json": _json(
            {"eos_token_id": [_END_OF_MESSAGE, _END_OF_TEXT], "pad_token_id": _END_OF_TEXT}
        ),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
        "model.safetensors": _weights(),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    (directory / MARKER).write_bytes(_json({"made_by": "kvlease model make", "sha256": digests}))


def _is_whole(directory: Path) -> bool:
    try:
        digests = json.loads((directory / MARKER).read_text())["sha256"]
        return bool(digests) and all(
            hashlib.sha256((directory / Path(name).name).read_bytes()).hexdigest() == digest
            for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": _END_OF_MESSAGE,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": _SPREAD,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": 65536,
        "max_window_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": _VOCABULARY,
    }


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's
    ``bytes_to_unicode``, which `tokenizers` decodes with)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 65536,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (_HIDDEN,),
            prefix + "self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            prefix + "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
            prefix + "self_attn.q_norm.weight": (_HEAD_DIM,),
            prefix + "self_attn.k_norm.weight": (_HEAD_DIM,),
            prefix + "post_attention_layernorm.weight": (_HIDDEN,),
            prefix + "mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
            prefix + "mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        }
    return shapes | {
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
    }


def _weights() -> bytes:
    """A safetensors file: length of the header (8 bytes, little-endian), header (JSON),
    tensors. https://github.com/huggingface/safetensors#format"""
    try:
        import numpy as np
    except ImportError:
        raise ConfigError(
            "making the model needs numpy: run `make install`, or `pip install numpy`"
        ) from None
    # RandomState and not default_rng: its stream is frozen for all versions of numpy.
    random = np.random.RandomState(_SEED)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    offset = 0
    for name, shape in _shapes().items():
        if len(shape) == 1:
            values = np.ones(shape, dtype=np.float32)
        else:
            values = random.standard_normal(shape).astype(np.float32) * np.float32(_SPREAD)
        data = _bfloat16(values)
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *parts])


def _bfloat16(values: NDArray[np.float32]) -> bytes:
    """The upper halves of the float32 values, rounded to nearest, ties to even."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()
