"""Begin to compile the kernels of a run while its weights are read.

The kernels follow from the configuration and the checkpoint's config.json: dry runs of a decoder without
memory list those of a decode step of each number of rows, then those of prefill and update. The cubins go to
the disk cache. A run that needs other kernels compiles them itself, also if this part fails.
"""

import torch

from qerl.config import AdapterConfig, ModelConfig, RunConfig
from qerl.engine.decode.planned_kernels import planned_kernels
from qerl.kernels.runtime.architectures import architecture_name
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler
from qerl.kernels.runtime.nvrtc import KernelVariant
from qerl.learner.planned_pass import pass_kernels
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.device import COMPUTE, Kernels, choose_kernels, has_tile_kernels
from qerl.models.meta_decoder import meta_decoder
from qerl.models.transformers_backend.backend import backend_of
from qerl.training.rollouts.rollout import sampling_of


def compile_while_loading(config: RunConfig, num_positions: int) -> BackgroundCompiler | None:
    """Start to compile in threads; None where no kernel of this project computes, as on a CPU.

    config.model has no `auto`; num_positions: of the longest prompt and sample that are expected."""
    device = torch.device(config.model.device)
    if not has_tile_kernels(device) or not _is_planned(config.model, config.adapter):
        return None
    card = architecture_name(torch.cuda.get_device_capability(device))

    def find() -> list[KernelVariant]:
        architecture = architecture_of(locate(config.model.path).open())
        kernels = choose_kernels(config.engine.kernels, device)
        return kernels_of_run(architecture, config, kernels, num_positions)

    compiler = BackgroundCompiler(find, card)
    compiler.start()
    return compiler


def _is_planned(model: ModelConfig, adapter: AdapterConfig) -> bool:
    """True for a model in tiles, or in BF16, that sampler and learner share."""
    is_shared = model.sampler_format is None and adapter.kind == "lora"
    is_bf16 = model.dtype == "bf16" and model.operand == "packed" and model.format != "fp8-flow"
    return is_shared and is_bf16 and backend_of(model) == "qerl"


def kernels_of_run(
    architecture: Architecture, config: RunConfig, kernels: Kernels, num_positions: int
) -> list[KernelVariant]:
    """Return the kernels of decode steps, then of prefill and update, on torch's current GPU."""
    model = config.model
    decoder = meta_decoder(
        architecture,
        format=model.format,
        head=model.head_format,
        compute=COMPUTE[model.dtype],
        adapter=config.adapter,
    )
    longest = min(num_positions, architecture.max_positions)
    decode = planned_kernels(decoder, config.engine, sampling_of(config), kernels, num_positions=longest)
    return [*decode, *pass_kernels(decoder, chunk_tokens=config.learn.logprob_chunk_tokens)]
