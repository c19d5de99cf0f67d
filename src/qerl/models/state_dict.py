"""The name and shape of each tensor of a checkpoint, as Hugging Face writes them, and the check against it.

model.embed_tokens.weight [V, D]      model.norm.weight [D]      lm_head.weight [V, D], unless tied
model.layers.{i}.self_attn.{q,k,v,o}_proj      .mlp.{gate,up,down}_proj      .weight [N, K], .bias [N]
model.layers.{i}.input_layernorm.weight [D]    .post_attention_layernorm.weight [D]
model.layers.{i}.self_attn.{q,k}_norm.weight [H], where heads are normed
"""

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.models.architecture import Architecture, from_hf_config
from qerl.models.source import Checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = (".rotary_emb.inv_freq", ".input_global_scale")  # computed here; of activations, which stay 16-bit


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    try:
        return from_hf_config(checkpoint.config)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error


def linear_groups(architecture: Architecture) -> list[tuple[str, ...]]:
    """Every linear, without ".weight"; those that multiply the same input are together."""
    groups = ("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",))
    return [
        tuple(f"model.layers.{layer}.{block}.{name}_proj" for name in names)
        for layer in range(architecture.num_layers)
        for block, names in groups
    ]


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    width, vocab_size = architecture.width, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, width)}
    for layer in range(architecture.num_layers):
        within = _layer_shapes(architecture)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    shapes["model.norm.weight"] = (width,)
    return shapes if architecture.tied_head else shapes | {HEAD: (vocab_size, width)}


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q_width, kv_width = a.num_heads * a.head_size, a.num_kv_heads * a.head_size
    linears = {
        "self_attn.q_proj": (q_width, a.width, a.qkv_bias),
        "self_attn.k_proj": (kv_width, a.width, a.qkv_bias),
        "self_attn.v_proj": (kv_width, a.width, a.qkv_bias),
        "self_attn.o_proj": (a.width, q_width, a.output_bias),
        "mlp.gate_proj": (a.ff_width, a.width, a.mlp_bias),
        "mlp.up_proj": (a.ff_width, a.width, a.mlp_bias),
        "mlp.down_proj": (a.width, a.ff_width, a.mlp_bias),
    }
    norms = ("self_attn.q_norm", "self_attn.k_norm") if a.qk_norm else ()
    return (
        {"input_layernorm.weight": (a.width,), "post_attention_layernorm.weight": (a.width,)}
        | {f"{name}.weight": (a.head_size,) for name in norms}
        | {f"{name}.weight": (n, k) for name, (n, k, _) in linears.items()}
        | {f"{name}.bias": (n,) for name, (n, _, has_bias) in linears.items() if has_bias}
    )


def check_tensors(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Every expected tensor is there in its shape and nothing else is; said before the first one is read."""
    found = checkpoint.shapes
    wrong = [name for name in expected if found.get(name, expected[name]) != expected[name]]
    if wrong:
        name = wrong[0]
        raise UserError(f"{checkpoint.path}: {name} is {list(found[name])}, must be {list(expected[name])}")
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(f"{checkpoint.path}: has no tensor {_first(missing)}")
    unexpected = [name for name in found if name not in expected and not name.endswith(_IGNORED)]
    if HEAD not in expected and HEAD in unexpected:
        _check_tied(checkpoint)
        unexpected.remove(HEAD)
    if unexpected:
        raise UserError(f"{checkpoint.path}: unexpected tensor {_first(unexpected)}")


def read_float(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor of 16 bits or more, finite."""
    tensor = checkpoint.read(name)
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise UserError(
            f"{checkpoint.path}: {name} is {str(tensor.dtype).removeprefix('torch.')}, no float weight"
        )
    if not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise UserError(f"{checkpoint.path}: {name} holds NaN or infinity")
    return tensor


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_tied(checkpoint: Checkpoint) -> None:
    if not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        raise UserError(f"{checkpoint.path}: config.json ties {HEAD} to {EMBEDDING}, but they differ")
