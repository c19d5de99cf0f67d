"""Which tensor of a GGUF file, which of its rows and in which order, is each tensor of the decoder.

paired q and k      rows (0, H/2, 1, H/2 + 1, ...) of each head      -> (0, 1, ..., H/2, H/2 + 1, ...)
attn_qkv, ffn_up    rows of q | k | v, of gate | up                  -> one tensor each
Gated DeltaNet      value head j of key head i at j * key heads + i  -> at i * values per key + j
                    ssm_a = -exp(A_log)                              -> A_log
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.models.checkpoint.gguf_families import FAMILIES, ROPE_TENSORS, TOP_LEVEL_NAMES, GgufKeys

_UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")  # of old converters: computed here


@dataclasses.dataclass(frozen=True, slots=True)
class GgufPlace:
    """A tensor of the decoder: rows of the file's tensor, all of them without `rows`, then `change`."""

    ggml_name: str
    shape: tuple[int, ...]
    rows: slice | None = None
    change: Callable[[Tensor], Tensor] | None = None


def places(keys: GgufKeys, config: dict[str, Any]) -> dict[str, GgufPlace]:
    """Return the place of each tensor by its name in the decoder; raise UserError for an unknown one."""
    delta = _delta_places(config) if "linear_num_key_heads" in config else {}
    places: dict[str, GgufPlace] = {}
    for ggml_name in keys.shapes:
        if ggml_name not in ROPE_TENSORS and not _UNUSED.fullmatch(ggml_name):
            places |= _places_of(ggml_name, keys, delta)
    return places


def _places_of(
    ggml_name: str, keys: GgufKeys, delta: dict[str, tuple[str, Callable[[Tensor], Tensor]]]
) -> dict[str, GgufPlace]:
    shape, family = keys.shapes[ggml_name], FAMILIES[keys.family]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)(\.weight|\.bias)?", ggml_name)
    stem, _, kind = ggml_name.rpartition(".")
    if stem in TOP_LEVEL_NAMES:
        return {f"{TOP_LEVEL_NAMES[stem]}.{kind}": GgufPlace(ggml_name, shape)}
    if layer is None:
        raise UserError(f"{keys.file}: unexpected tensor {' '.join(ggml_name.split())}")
    if int(layer[1]) >= keys.num_layers and keys.get("nextn_predict_layers"):
        return {}
    at, short, suffix = f"model.layers.{layer[1]}.", layer[2], layer[3] or ""
    if short in delta:
        name, change = delta[short]
        is_conv = short == "ssm_conv1d" and len(shape) == 2
        hf_shape = (shape[0], 1, shape[1]) if is_conv else shape
        return {f"{at}linear_attn.{name}": GgufPlace(ggml_name, hf_shape, None, change)}
    if short not in family.names or not suffix:
        raise UserError(f"{keys.file}: unexpected tensor {' '.join(ggml_name.split())}")
    parts = _parts(family.names[short], keys)
    if len(parts) > 1 and shape[0] != sum(parts.values()):
        raise UserError(f"{keys.file}: {ggml_name} is {list(shape)}, must have {sum(parts.values())} rows")
    return {
        f"{at}{name}{'' if name == 'layer_scalar' else suffix}": GgufPlace(
            ggml_name,
            shape if rows is None else (rows.stop - rows.start, *shape[1:]),
            rows,
            _unpaired(keys, name) if family.is_paired else None,
        )
        for name, rows in _row_slices(parts)
    }


def _parts(name: str, keys: GgufKeys) -> dict[str, int]:
    """Return the linears that a stored one holds and their rows."""
    if name == "self_attn.qkv_proj":
        heads = {"q_proj": keys.num_heads, "k_proj": keys.num_kv_heads(), "v_proj": keys.num_kv_heads()}
        return {f"self_attn.{part}": number * keys.head_size for part, number in heads.items()}
    if name == "mlp.gate_up_proj":
        return dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), keys.count("feed_forward_length"))
    return {name: 0}


def _row_slices(parts: dict[str, int]) -> Iterator[tuple[str, slice | None]]:
    start = 0
    for name, num_rows in parts.items():
        yield name, slice(start, start + num_rows) if len(parts) > 1 else None
        start += num_rows


def _unpaired(keys: GgufKeys, name: str) -> Callable[[Tensor], Tensor] | None:
    heads = {"self_attn.q_proj": keys.num_heads, "self_attn.k_proj": keys.num_kv_heads()}.get(name)
    return None if heads is None else lambda weight: _pairs_to_halves(weight, heads)


def _pairs_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """[heads, H / 2, 2, ...] -> [heads, 2, H / 2, ...] along the rows of a weight or a bias."""
    paired = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return paired.transpose(1, 2).reshape(weight.shape)


def _delta_places(config: dict[str, Any]) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Return the name and the change of each tensor of Gated DeltaNet, by its short name."""
    heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_size, num_keys = config["linear_value_head_dim"], 2 * heads[0] * config["linear_key_head_dim"]

    def grouped(weight: Tensor, size: int, start: int = 0, dim: int = 0) -> Tensor:
        """Order the value heads, which are behind `start`, by their key heads."""
        others, tiled = weight.tensor_split([start], dim)
        tiled = tiled.unflatten(dim, (heads[1] // heads[0], heads[0], size))
        return torch.cat((others, tiled.transpose(dim, dim + 1).flatten(dim, dim + 2)), dim)

    return {
        "attn_qkv": ("in_proj_qkv.weight", lambda weight: grouped(weight, value_size, num_keys)),
        "attn_gate": ("in_proj_z.weight", lambda weight: grouped(weight, value_size)),
        "ssm_alpha": ("in_proj_a.weight", lambda weight: grouped(weight, 1)),
        "ssm_beta": ("in_proj_b.weight", lambda weight: grouped(weight, 1)),
        "ssm_out": ("out_proj.weight", lambda weight: grouped(weight, value_size, dim=1)),
        "ssm_conv1d": ("conv1d.weight", lambda weight: grouped(weight, value_size, num_keys).unsqueeze(1)),
        "ssm_a": ("A_log", lambda minus_a: grouped(minus_a.neg().log(), 1)),
        "ssm_dt": ("dt_bias", lambda bias: grouped(bias, 1)),
        "ssm_norm": ("norm.weight", lambda weight: weight),
    }
