"""Read a GGUF file (llama, qwen2 or qwen3): its metadata, and its tensors under Hugging Face's names.

    file = "GGUF" | version | counts | metadata (key, type, value) | tensor infos | padding | tensor data

Tensors are read by offset and decoded to float32 one at a time, by the `gguf` package's `dequantize`. The
metadata are parsed here, because the package's GGUFReader
    makes a numpy array of each token and merge: 1.8 s for SmolLM2's 98 MB file, where this takes 0.05 s;
    loops over an array's stored length without checking it: a damaged length of 2^40 does not return;
    maps the whole file, whose pages then count as the process's memory.

llama.cpp stores the q and k rows of a llama head in rotary pairs (0, H/2, 1, H/2 + 1, ...); Hugging Face in
halves (0, 1, ..., H/2, H/2 + 1, ...). qwen2 and qwen3 are stored as Hugging Face has them.
"""

import dataclasses
import io
import math
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.regular_file import open_regular

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CHUNK_BYTES = 1 << 20
_MAX_NUMBER = 1e12


@dataclasses.dataclass(frozen=True, slots=True)
class _GgufEntry:
    """Location and ggml type of one tensor."""

    ggml_name: str
    ggml_type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class GgufFile:
    """A Checkpoint in a GGUF file; `metadata` has its keys and values, `config` those of a config.json."""

    def __init__(self, file: Path):
        self.path = file
        self.metadata, entries = _parse(file)
        self._entries = {_hf_name(file, entry.ggml_name): entry for entry in entries}
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.config = _hf_config(file, self.metadata, self.shapes)

    def read(self, name: str) -> Tensor:
        """Return the tensor in float32 on the CPU, with rows in Hugging Face's order."""
        entry = self._entries[name]
        weight = torch.empty(math.prod(entry.shape[:-1]), entry.shape[-1])
        try:
            with open_regular(self.path) as file:
                file.seek(entry.begin)
                _decode_rows(file, entry, weight)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(f"{self.path}: {entry.ggml_name} cannot be read: {error}") from error
        weight = weight.view(entry.shape)
        heads = self._rotary_heads(name)
        return weight if heads is None else _pairs_to_halves(weight, heads)

    def _rotary_heads(self, name: str) -> int | None:
        """Return the number of heads in the tensor's rows if they are stored in rotary pairs, else None."""
        if self.config["model_type"] != "llama":
            return None
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in name else None


def _decode_rows(file: BinaryIO, entry: _GgufEntry, out: Tensor) -> None:
    """Decode a few rows at a time: on a whole tensor, `dequantize` takes three times its memory."""
    row_bytes = entry.num_bytes // len(out)
    for rows in out.split(max(1, _CHUNK_BYTES // row_bytes)):
        raw = np.fromfile(file, dtype=np.uint8, count=len(rows) * row_bytes).reshape(len(rows), row_bytes)
        rows.copy_(torch.from_numpy(gguf.dequantize(raw, entry.ggml_type)))


def _pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """[heads, H / 2, 2, ...] -> [heads, 2, H / 2, ...] along the rows of a weight or a bias."""
    paired = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


def _hf_name(file: Path, ggml_name: str) -> str:
    stem, _, kind = ggml_name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    if stem in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[stem]}.{kind}"
    if stem == "rope_freqs":
        raise UserError(
            f"{file}: rope_freqs (Llama 3's rope scaling) is not supported in GGUF; use the safetensors"
        )
    raise UserError(f"{file}: unexpected tensor {' '.join(ggml_name.split())}")


def _hf_config(file: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the entries of config.json that `architecture.from_hf_config` reads."""
    family = metadata["general.architecture"]
    if (num_parts := metadata.get("split.count", 0)) not in (0, 1):
        raise UserError(f"{file}: is one of {num_parts} parts; merge them with gguf-split first")
    if metadata.get(f"{family}.expert_count", 0) != 0:
        raise UserError(f"{file}: a mixture of experts is not supported")

    def positive(key: str, default: int | float | None = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise UserError(f"{file}: {family}.{key} must be one positive number, got {value!r}")
        return value

    if "model.embed_tokens.weight" not in shapes:
        raise UserError(f"{file}: has no tensor token_embd.weight")
    num_heads = positive("attention.head_count")
    head_size = positive("attention.key_length", positive("embedding_length") // num_heads)
    if positive("rope.dimension_count", head_size) != head_size:
        raise UserError(
            f"{file}: {family}.rope.dimension_count must be the head size {head_size};"
            " partial rotary embedding is not supported"
        )
    return {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "num_hidden_layers": positive("block_count"),
        "hidden_size": positive("embedding_length"),
        "intermediate_size": positive("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": positive("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "max_position_embeddings": positive("context_length"),
        # Stored in float32: 1e-5 would come back as 9.99999975e-06.
        "rms_norm_eps": float(str(np.float32(positive("attention.layer_norm_rms_epsilon")))),
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": positive("rope.freq_base", 10000.0)}
        | _rope_scaling(family, metadata),
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "dtype": "bfloat16",
    } | _token_ids(metadata)


def _rope_scaling(family: str, metadata: dict[str, Any]) -> dict[str, Any]:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    scaling = {"rope_type": kind, "factor": metadata.get(f"{family}.rope.scaling.factor", 1.0)}
    original = metadata.get(f"{family}.rope.scaling.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    ids = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in ids.items()}
    return {name: value for name, value in found.items() if value is not None}


def _parse(file: Path) -> tuple[dict[str, Any], list[_GgufEntry]]:
    try:
        with open_regular(file) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            return _parse_stream(file, GgufCursor(stream, file_bytes), file_bytes)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (_DamagedError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: damaged, or not a GGUF file: {reason}") from error


class _DamagedError(Exception):
    pass


class GgufCursor:
    """Read values in sequence; raise _DamagedError at the end of the file."""

    def __init__(self, stream: BinaryIO | io.BufferedReader, num_bytes: int):
        self.stream = stream
        self.num_bytes = num_bytes
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        self.offset += num_bytes
        if self.offset > self.num_bytes:
            raise _DamagedError(f"it ends before byte {self.offset}")
        return self.stream.read(num_bytes)

    def numbers(self, kind: npt.DTypeLike, count: int) -> list[Any]:
        dtype = np.dtype(kind).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def number(self, kind: npt.DTypeLike) -> Any:
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode("utf-8")

    def value(self, kind: int) -> Any:
        value_type = gguf.GGUFValueType(kind)
        if value_type == gguf.GGUFValueType.STRING:
            return self.string()
        if value_type != gguf.GGUFValueType.ARRAY:
            return self.number(gguf.GGUFReader.gguf_scalar_to_np[value_type])
        item_type, count = gguf.GGUFValueType(self.number("I")), self.number("Q")
        if item_type == gguf.GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if item_type == gguf.GGUFValueType.ARRAY:
            raise _DamagedError("it holds an array of arrays")
        return self.numbers(gguf.GGUFReader.gguf_scalar_to_np[item_type], count)


def _parse_stream(file: Path, cursor: GgufCursor, file_bytes: int) -> tuple[dict[str, Any], list[_GgufEntry]]:
    if cursor.take(4) != b"GGUF":
        raise _DamagedError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise _DamagedError(f"its version is {version}, 2 and 3 are supported")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    _check_family(file, metadata.get("general.architecture"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        infos.append((name, shape, gguf.GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _DamagedError(f"general.alignment is {alignment}")
    data_begin = math.ceil(cursor.offset / alignment) * alignment
    return metadata, [
        _entry(name, shape, kind, data_begin + at, file_bytes) for name, shape, kind, at in infos
    ]


def _check_family(file: Path, family: Any) -> None:
    """Raise UserError for an unsupported family, whose tensors have names and types of their own."""
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UserError(
            f"{file}: architecture {family!r} is not supported in GGUF; supported: {', '.join(_FAMILIES)}"
        )


def _entry(
    name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, begin: int, file_bytes: int
) -> _GgufEntry:
    if kind not in gguf.GGML_QUANT_SIZES:
        raise _DamagedError(f"{name} is of a type that holds no weights: {kind.name}")
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block_size:
        raise _DamagedError(f"{name} {list(shape)} does not divide into blocks of {block_size}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    if begin + num_bytes > file_bytes:
        raise _DamagedError(f"truncated: {name} ends at byte {begin + num_bytes}, the file has {file_bytes}")
    return _GgufEntry(name, kind, shape, begin, num_bytes)
