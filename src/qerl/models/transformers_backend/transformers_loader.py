"""Load a TransformersModel from a folder of safetensors: made on the meta device, filled tensor by tensor,
each linear packed as it is read.

    peak memory = the packed model + one parameter of it
    tests/models/transformers_backend/test_transformers_backend.py

No code of a checkpoint is ever run: a class that transformers does not have is refused (backend.py).
"""

import re
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as TEXT_MODELS
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from qerl.errors import UserError, naming
from qerl.formats import BF16, FORMATS
from qerl.models.checkpoint.encoding import SelectScales, default_scales, encode_weight
from qerl.models.checkpoint.layouts import with_layout
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.checkpoint.source import Checkpoint, ModelSource, PackedCheckpoint
from qerl.models.families import FAMILIES, MULTIMODAL, obstacle
from qerl.models.transformers_backend.backend import first_line, transformers_config
from qerl.models.transformers_backend.transformers_model import FloatHead, SequenceLinear, TransformersModel
from qerl.models.transformers_backend.transformers_weights import StreamedWeights, compute_buffers, fill

_UNPACKED = "gate", "router", "shared_expert_gate", "dt_proj"
"""Routers; a part of Mamba's layers whose weight its code reads."""
_SAME_PRODUCT = ("FalconLinear",)
"""Subclasses of nn.Linear that write its product in another way."""
_SHOWN = 3  # names in a line
_ROUNDING = 0.05  # of logits, as a part of them: 0.00 in others; 0.48 in PaliGemma, which looks ahead


def load_transformers_model(
    source: ModelSource,
    *,
    format: str,
    compute: torch.dtype,
    device: torch.device,
    resident: bool,
    scales: SelectScales = default_scales,
) -> TransformersModel:
    """Return the model with the linears of its layers in `format` and the rest in `compute`. Codes that
    a quantized checkpoint has in `format` are taken as they are, others are decoded."""
    model = _meta_model(source, compute)
    checkpoint = with_layout(SafetensorsFolder(source.path))
    compute_buffers(model, device)
    weights = StreamedWeights(model, checkpoint)
    linears = _replace_linears(model, compute, device)
    with naming(source.path):
        if not linears:
            name = type(model).__name__
            raise UserError(f"the layers of {name} have no torch.nn.Linear that can be packed")
        filled = _fill_packed(checkpoint, linears, format, device)
        weights.skip(filled)
        misfits = _fill(model, weights, linears, format, scales, compute, device, filled)
        _check_filled(model, weights.names, filled)
        model.tie_weights()
    for linear in linears.values() if resident else ():
        linear.make_resident()
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and compute != torch.float32:
        model.set_output_embeddings(FloatHead(head))
    policy = TransformersModel(model, compute, device)
    policy.notices = _notices(policy, format, misfits, weights.unused, obstacle(checkpoint.config))
    _try(policy)
    return policy


def linear_names(source: ModelSource) -> list[str]:
    """Return the names of the linears that may have an adapter; no weights are read."""
    return [name for name, _ in _layer_linears(_meta_model(source, torch.float32))]


def _meta_model(source: ModelSource, compute: torch.dtype) -> PreTrainedModel:
    config = transformers_config(source)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto = AutoModelForCausalLM if type(config) in TEXT_MODELS else AutoModelForImageTextToText
        return auto.from_config(config, dtype=compute).eval().requires_grad_(False)


def _replace_linears(
    model: PreTrainedModel, compute: torch.dtype, device: torch.device
) -> dict[str, SequenceLinear]:
    """Put an empty SequenceLinear in the place of each linear of a layer of the language model; return them
    by name. Linears for images and sound stay as they are: nothing runs them."""
    linears: dict[str, SequenceLinear] = {}
    for name, module in _layer_linears(model):
        k, n, has_bias = module.in_features, module.out_features, module.bias is not None
        linears[name] = SequenceLinear(k, n, has_bias=has_bias, compute=compute, device=device)
        model.set_submodule(name, linears[name])
    return linears


def _layer_linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Return each linear of a layer of the language model with its name."""
    lists = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    language = set(model.get_decoder().modules())
    linears = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if module not in language or last in _UNPACKED or not name.startswith(lists):
            continue
        is_product = type(module).__name__ in _SAME_PRODUCT
        if isinstance(module, nn.Linear) and (is_product or type(module).forward is nn.Linear.forward):
            linears.append((name, module))
    return linears


def _fill(
    model: PreTrainedModel,
    weights: StreamedWeights,
    linears: dict[str, SequenceLinear],
    format: str,
    scales: SelectScales,
    compute: torch.dtype,
    device: torch.device,
    filled: set[str],
) -> list[str]:
    """Fill what the checkpoint has, and add its names to `filled`; return the linears that do not fit the
    format's blocks and are bf16."""
    strict = "|".join(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) or "$^"
    misfits = []
    for name, tensor in weights:
        filled.add(name)
        module, _, last = name.rpartition(".")
        if module not in linears or last != "weight":
            dtype = torch.float32 if re.search(strict, name) else compute
            fill(model, name, tensor, device, dtype)
            continue
        linear = linears[module]
        if tensor.shape != (linear.out_width, linear.in_width):
            expected = [linear.out_width, linear.in_width]
            raise UserError(f"{name} is {list(tensor.shape)}, must be {expected}")
        tensor = tensor.to(device)
        try:
            linear.load_weight(encode_weight(tensor, FORMATS[format], scales))
        except UserError:  # the shape: read_float has checked the numbers
            misfits.append(module)
            linear.load_weight(BF16.encode(tensor))
    return misfits


def _fill_packed(
    checkpoint: Checkpoint, linears: dict[str, SequenceLinear], format: str, device: torch.device
) -> set[str]:
    """Fill linears whose codes the checkpoint has in this format; return the names of their weights."""
    filled: set[str] = set()
    if not isinstance(checkpoint, PackedCheckpoint):
        return filled
    for name, linear in linears.items():
        shape = linear.out_width, linear.in_width
        packed = checkpoint.packed(name) if checkpoint.shapes.get(f"{name}.weight") == shape else None
        if packed is not None and packed.name == format:
            linear.load_weight(packed.to(device))
            filled.add(f"{name}.weight")
    return filled


def _check_filled(model: PreTrainedModel, names: Iterable[str], filled: set[str]) -> None:
    """Raise UserError if the checkpoint lacks a tensor that is no other one's."""
    tied = model.all_tied_weights_keys
    if missing := [name for name in names if name not in filled and name not in tied]:
        raise UserError(f"has no tensor {_listed(missing)}")


def _notices(
    policy: TransformersModel, format: str, misfits: list[str], unused: list[str], obstacle: str | None
) -> list[str]:
    linears = [linear.num_bytes for _, linear in policy.linears()]
    packed = sum(linears)
    experts = [(n, p) for n, p in policy.model.named_parameters() if p.dim() == 3 and ".experts." in n]
    dtype = str(policy.compute).removeprefix("torch.")
    lines = [
        f"model.backend transformers: transformers' own code runs {policy.family}, correctly but slowly: no"
        " fused kernels, no paged KV cache, no packing",
        f"{len(linears)} linears are in {format} ({packed / 1e6:,.1f} MB); the other weights stay in {dtype}"
        f" ({(policy.num_bytes - packed) / 1e6:,.1f} MB)",
    ]
    if obstacle is not None and policy.family in FAMILIES.keys() | MULTIMODAL.keys():
        lines.append(f"our decoder does not run it: {obstacle}")
    if experts:
        size = sum(p.nbytes for _, p in experts) / 1e6
        lines.append(
            f"{len(experts)} tensors of fused experts stay in {dtype} ({size:,.1f} MB): this backend packs"
            f" linears only ({_listed([name for name, _ in experts])})"
        )
    if misfits:
        lines.append(f"{_listed(misfits)}: in bf16, as the shape does not fit the blocks of {format}")
    if unused:
        lines.append(f"{len(unused)} tensors of the checkpoint are not used: {_listed(unused)}")
    norms = f"{len(policy.norms)} RMSNorms of width {policy.width}" if policy.norms else "no RMSNorm"
    return [*lines, f"noise (AQN) applies to {norms} in the layers of {policy.family}"]


@torch.no_grad()
def _try(policy: TransformersModel) -> None:
    """Run a few tokens, so that code which reads a replaced linear's weight, or whose tokens see later ones,
    is refused before a run begins."""
    each_13 = torch.tensor([[[0, 1, 2]], [[0, 1, 3]]], device=policy.device)
    try:
        one, other = (policy.model(t, use_cache=i == 1).logits[0, :2].float() for i, t in enumerate(each_13))
    except Exception as error:  # of transformers' code
        raise UserError(
            f"{policy.family}: transformers' code does not run with quantized linears, choose another model:"
            f" {first_line(error)}"
        ) from error
    if (other - one).norm() > _ROUNDING * one.norm():
        raise UserError(f"{policy.family}: its tokens attend to later ones, so it cannot generate text")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
