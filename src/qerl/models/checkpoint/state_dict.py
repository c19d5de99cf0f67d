"""Names and shapes of a checkpoint's tensors, as Hugging Face writes them, and checks against them.

model.embed_tokens.weight [V, D]      model.norm.weight [D]      lm_head.weight [V, D], unless tied
model.layers.{i}.self_attn.{q,k,v,o}_proj      .mlp.{gate,up,down}_proj      .weight [N, K], .bias [N]
model.layers.{i}.input_layernorm.weight [D]    .post_attention_layernorm.weight [D]
model.layers.{i}.self_attn.{q,k}_norm.weight [H], if the family has q/k norms
model.layers.{i}.linear_attn.in_proj_{qkv,z,b,a}, .out_proj, .conv1d.weight [C, 1, W], .A_log, .dt_bias [N],
.norm.weight [V] in the place of self_attn, in layers with Gated DeltaNet
model.layers.{i}.mlp.router, with experts (expert_names.py); .self_attn.sinks [N]
"""

import dataclasses

import torch
from torch import Tensor

from qerl.errors import UserError, naming
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.expert_names import expert_shapes, has_blocks
from qerl.models.checkpoint.source import Checkpoint, layout_of, stored_weight
from qerl.models.families import from_hf_config
from qerl.models.layer_spec import LayerSpec, layer_specs

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = ".rotary_emb.inv_freq", ".input_global_scale"  # computed here; activations stay 16-bit


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Parse the checkpoint's config; errors name its path."""
    with naming(checkpoint.path):
        architecture = from_hf_config(checkpoint.config)
        # Before anything is listed layer by layer: a config may say 2^31.
        num_layers, num_tensors = architecture.num_layers, len(checkpoint.shapes)
        if num_layers > num_tensors:
            raise UserError(f"num_hidden_layers is {num_layers:,}, but it has only {num_tensors} tensors")
    mixture = architecture.mixture
    if mixture is not None and mixture.stored == "transposed" and has_blocks(checkpoint.shapes):
        mixture = dataclasses.replace(mixture, stored="blocks")
        architecture = dataclasses.replace(architecture, mixture=mixture)
    if layout_of(checkpoint) is not None:
        architecture = dataclasses.replace(architecture, bf16_linears=_bf16_linears(checkpoint, architecture))
    if architecture.part_of is None:
        return architecture
    # a multimodal config's tie_word_embeddings is not reliable
    is_untied = any(name.startswith(HEAD) for name in checkpoint.shapes)
    return dataclasses.replace(architecture, tied_head=not is_untied)


def _bf16_linears(checkpoint: Checkpoint, architecture: Architecture) -> frozenset[str]:
    """Return the linears in full precision of a quantized checkpoint, without those that always are."""
    names = {linear for group in linear_groups(architecture) for linear in group}
    plain = (x for x in names - unquantized_linears(architecture) if stored_weight(checkpoint, x) is None)
    return frozenset(name.removeprefix("model.") for name in plain)


def linear_groups(architecture: Architecture) -> list[tuple[str, ...]]:
    """Return the names of all linears, without ".weight", grouped by the input that they read."""
    return [
        tuple(f"model.layers.{layer}.{linear.name}" for linear in group.linears)
        for layer, spec in enumerate(layer_specs(architecture))
        for group in spec.groups
    ]


def unquantized_linears(architecture: Architecture) -> set[str]:
    """Return the names of linears that stay in BF16, without ".weight": routers and bf16_linears."""
    return {
        f"model.layers.{layer}.{linear.name}"
        for layer, spec in enumerate(layer_specs(architecture))
        for linear in spec.linears
        if not linear.is_quantized
    }


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a checkpoint of this architecture has, by name."""
    width, vocab_size = architecture.width, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size, width)}
    for layer, spec in enumerate(layer_specs(architecture)):
        layer_shapes = _layer_shapes(spec) | expert_shapes(architecture, spec)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    shapes["model.norm.weight"] = (width,)
    return shapes if architecture.tied_head else shapes | {HEAD: (vocab_size, width)}


def _layer_shapes(spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    return (
        {f"{name}.weight": (width,) for name, width in spec.norm_widths.items()}
        | spec.other_shapes
        | {f"{linear.name}.weight": (linear.out_width, linear.in_width) for linear in spec.linears}
        | {f"{linear.name}.bias": (linear.out_width,) for linear in spec.linears if linear.has_bias}
    )


def check_tensors(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless the checkpoint has exactly the expected tensors, each with its shape."""
    shapes = checkpoint.shapes
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise UserError(f"{checkpoint.path}: {name} is {list(shapes[name])}, must be {list(shape)}")
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise UserError(f"{checkpoint.path}: has no tensor {_first(missing)}")
    unexpected = [name for name in shapes if name not in expected and not name.endswith(_IGNORED)]
    if HEAD not in expected and HEAD in unexpected:
        _check_tied(checkpoint)
        unexpected.remove(HEAD)
    if unexpected:
        raise UserError(f"{checkpoint.path}: unexpected tensor {_first(unexpected)}")


def read_float(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a floating-point tensor of at least 16 bits; raise UserError for other types, NaN or infinity."""
    return check_float(checkpoint, name, checkpoint.read(name))


def check_float(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, as `read_float` checks it."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{checkpoint.path}: {name} is {dtype}, must be a float")
    if not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise UserError(f"{checkpoint.path}: {name} holds NaN or infinity")
    return tensor


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_tied(checkpoint: Checkpoint) -> None:
    if not torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        raise UserError(f"{checkpoint.path}: tie_word_embeddings is true, but {HEAD} and {EMBEDDING} differ")
