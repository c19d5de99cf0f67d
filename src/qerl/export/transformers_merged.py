"""Write the merged model of a run whose model transformers runs, as transformers saves it."""

from pathlib import Path

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from qerl.config import RunConfig
from qerl.learner import checkpoint
from qerl.models import hf_writer
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.layouts import without_quantization
from qerl.models.checkpoint.source import locate
from qerl.models.packed_writer import with_dtype
from qerl.models.peft.adapter import add_adapter, load_adapter, merged_weight
from qerl.models.transformers_backend.transformers_loader import load_transformers_model
from qerl.models.transformers_backend.transformers_model import TransformersModel


def write_transformers_merged(
    run: Path, config: RunConfig, out: Path, dtype: torch.dtype, *, has_adapter: bool = True
) -> None:
    """Write round(W + scaling * B @ A) of each linear, or round(W) without the adapter, and the model's other
    tensors; all are in memory."""
    source, format = locate(config.model.path), config.model.format
    model = load_transformers_model(
        source,
        format=format,
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=False,
        scales=SCALES[config.model.block_scales],
    )
    if has_adapter:
        add_adapter(model, config.adapter, seed=config.seed)
        load_adapter(model, checkpoint.latest_adapter(run / "checkpoints"))
    tensors = revert_weight_conversion(model.model, _merged(model, dtype))
    with hf_writer.atomic_folder(out) as folder:
        hf_writer.write_shards(folder, ((name, tensor.contiguous()) for name, tensor in tensors.items()))
        hf_config = without_quantization(source.open().config)
        hf_writer.write_json(folder / "config.json", with_dtype(hf_config, dtype))
        hf_writer.write_tokenizer(folder, source)


def _merged(model: TransformersModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors by the names that transformers' model has for them, tied ones once."""
    linears = dict(model.linears())
    tied = model.model.all_tied_weights_keys
    tensors = {f"{name}.weight": merged_weight(linear).to(dtype) for name, linear in linears.items()}
    for name, tensor in model.model.state_dict().items():
        is_own = name.rpartition(".")[0] not in linears or name.endswith(".bias")
        if is_own and name not in tied:
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors
