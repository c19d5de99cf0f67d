"""Tiny checkpoints whose linears are integers in int32, packed word by word as AutoAWQ's and AutoGPTQ's
`pack` do it, and what every weight of them is."""

import dataclasses
import json

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.family_rows import oracle

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": 64}


@dataclasses.dataclass(frozen=True)
class Integers:
    """Codes and zero points of a weight, before packing."""

    q_NK: Tensor
    z_GN: Tensor
    s_GN: Tensor
    group_K: Tensor

    @property
    def weight_NK(self) -> Tensor:
        z_KN, s_KN = self.z_GN[self.group_K].double(), self.s_GN[self.group_K].double()
        return ((self.q_NK.T.double() - z_KN) * s_KN).T.float()


def integers(weight_NK, group_size, *, bits=4, is_symmetric=False, seed=None) -> Integers:
    """Round to integers. seed: of a random order of inputs into groups (desc_act)."""
    k, top = weight_NK.shape[1], 2**bits - 1
    group_size = k if group_size == -1 else group_size
    group_K = torch.arange(k) // group_size
    if seed is not None:
        group_K = group_K[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
    low, high = torch.zeros(k // group_size, len(weight_NK)), torch.zeros(k // group_size, len(weight_NK))
    for group in range(k // group_size):
        inputs = weight_NK[:, group_K == group].float()
        low[group], high[group] = inputs.amin(1).clamp(max=0), inputs.amax(1).clamp(min=0)
    if is_symmetric:
        scale, zero = 2 * torch.maximum(-low, high) / top, torch.full_like(low, (top + 1) // 2)
    else:
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half()
    q_KN = (weight_NK.T.float() / scale.float()[group_K] + zero[group_K]).round().clamp(0, top)
    return Integers(q_KN.T.int(), zero.int(), scale, group_K)


def into_words(codes: Tensor, bits: int, order=None) -> Tensor:
    """Pack along the last axis: code order[i] of each 32 / bits into the bits from i * bits."""
    per_word = 32 // bits
    order = range(per_word) if order is None else order
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per_word, dtype=torch.int64)
    for place, index in enumerate(order):
        words |= codes[..., index::per_word].long() << (place * bits)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq_tensors(x: Integers) -> dict[str, Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": into_words(x.q_NK.T, 4, order),
        "qzeros": into_words(x.z_GN, 4, order),
        "scales": x.s_GN.clone(),
    }


def gptq_tensors(x: Integers, *, bits=4, is_v2=False, has_map=True) -> dict[str, Tensor]:
    stored = x.z_GN if is_v2 else (x.z_GN - 1) % 2**bits
    tensors = {
        "qweight": into_words(x.q_NK, bits).T.contiguous(),
        "qzeros": into_words(stored, bits),
        "scales": x.s_GN.clone(),
    }
    return tensors | ({"g_idx": x.group_K.int()} if has_map else {})


def write_quantized(folder, pack, config, *, family="Llama", skipped=(), more=None, **changes):
    """Write a model whose linears are what pack(weight) -> (tensors, value) gives; return the weights that it
    then has. skipped: parts of the names of linears that stay as they are."""
    model = oracle(family, **(SIZES | changes))
    tensors, weights = {}, {}
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        is_linear = "_proj.weight" in name and not any(part in name for part in skipped)
        if is_linear:
            stored, weights[name] = pack(value)
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}
        else:
            tensors[name] = weights[name] = value
    folder.mkdir(exist_ok=True)
    save_file(
        {key: t.contiguous() for key, t in (tensors | (more or {})).items()}, folder / "model.safetensors"
    )
    settings = model.config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return weights


def write_float(folder, weights, family="Llama", **changes):
    """Write the same weights in float32."""
    folder.mkdir(exist_ok=True)
    model = oracle(family, **(SIZES | changes))
    settings = model.config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder
