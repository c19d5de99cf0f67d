"""The parts of the GPU memory that a training step takes, computed from the model's shape and the config.

    peak = what is always allocated + the largest of what sampling, a teacher and learning allocate besides

Assumed: the KV cache and the learner use the same memory in turns (kernels/runtime/virtual_memory.py),
weights are packed, and all samples have the maximum length. Shorter samples fill
learn.max_tokens_per_microbatch better. W weights a layer, n weights in the adapter, T rows in a micro-batch;
D F N K H V as in types.py. Sizes are for bf16; with model.dtype fp32 (`element_bytes`; not measured yet)
everything that is not packed takes 4 bytes instead of 2:

    weights          bytes_per_weight * W * L, 4 for each output    embedding 2 V D, head the same
    adapter          masters 4 n, working copies 2 n, the decode step's stacked copies 2 n, not of experts;
                     BF16 weights hold b behind their rows, with zeros between the linears of a group
    gradients        4 n                                            moments           8 n, or 2 n + n / 32
    KV cache         all samples at once, up to engine.max_num_seqs or engine.kv_cache_gb; with branches, the
                     pages of all samples in addition; recurrent states of samples and prompts
    activations      of the layers, by learn.gradient_checkpointing  unpacked         operands of one layer
    head             logits of a chunk and their gradient, fp32 [T, D], a slice of a packed head unpacked

A bf16 head that is tied to the embedding takes nothing, a packed head V D in its format, tied or not.

tests/learner/test_plan.py checks each part by hand and the sum against benchmarks. Learning from 8,192 rows
at the 7B shape on an H200, model included, took 41.19 GB with gradient_checkpointing none and 13.19 GB with
layer; the plan says 42.4 and 14.2, of which the 0.6 GB of CUDA itself were not measured.
"""

import dataclasses
import math
from typing import Literal

import torch

from qerl.config import RunConfig
from qerl.engine.cache.budget import free_bytes
from qerl.engine.cache.kv_cache import FP8
from qerl.engine.cache.size import CacheSize
from qerl.engine.cache.state_cache import slot_bytes
from qerl.engine.schedule.cache_space import Space
from qerl.engine.schedule.page_pool import num_pages, own_pages
from qerl.formats import FORMATS
from qerl.kernels.head.head_operand import slice_columns
from qerl.kernels.linear.fused_linear import WIDE_ROWS
from qerl.kernels.linear.int8_codes import code_bytes, row_code_bytes
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.learner.plan import mixture
from qerl.learner.plan.activations import (
    compute_dtype,
    element_bytes,
    host_bytes,
    is_chunked,
    kept_bytes,
    layer_bytes,
    row_width,
    saves_up,
)
from qerl.learner.plan.rows import microbatch_rows
from qerl.learner.plan.teacher import planned_teacher
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import LayerSpec, LinearGroupSpec, adapter_targets, counted_specs
from qerl.models.lm_head import packed_width

CONTEXT_BYTES = 0.6e9  # CUDA, its libraries and the kernels
_CHECKPOINTING_MODES = "none", "layer", "offload"
USABLE_SHARE = 0.95  # torch's blocks hold unused memory that no part counts
_TILED_BYTES = {"mxfp4": 0.5625, "nf4": 0.5625}  # of a weight in tiles (models/packed_linear.py)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: float
    when: Literal["always", "sampling", "teaching", "learning", "on the host"]


def weight_bytes(a: Architecture, format: str) -> float:
    """Return the bytes of the packed linears, their biases, one factor for each output, of routers in BF16
    and of experts. In tiles for the formats that have them."""
    return sum(count * _layer_weight_bytes(spec, format) for spec, count in counted_specs(a))


def _layer_weight_bytes(spec: LayerSpec, format: str) -> float:
    linears = [linear for group in spec.groups if group.is_quantized for linear in group.linears]
    plain = [linear for group in spec.groups if not group.is_quantized for linear in group.linears]
    bytes_per_weight = _TILED_BYTES.get(format, FORMATS[format].bytes_per_weight)
    packed = sum(mixture.stack_bytes(x, format) for x in spec.experts) + sum(2 * x.num_weights for x in plain)
    packed += sum(x.num_weights for x in linears) * bytes_per_weight
    factors = 0 if format == "bf16" else sum(4 * linear.out_width for linear in linears)
    biases = sum(2 * linear.out_width for linear in linears if linear.has_bias)
    biases += sum((4 if x.short_name == "router" else 2) * x.out_width for x in plain if x.has_bias)
    return packed + factors + biases


def embedding_bytes(
    a: Architecture, head_format: str = "bf16", num_noise_rows: int = 1, element_bytes: int = 2
) -> float:
    """Return the bytes of the embedding, the head, the norms and their noise, and what else is not packed."""
    in_fp32 = sum(
        count * (sum(spec.norm_widths.values()) + sum(map(math.prod, spec.other_shapes.values())))
        for spec, count in counted_specs(a)
    )
    norms = 4 * (in_fp32 + (2 * num_noise_rows * a.num_layers + 1) * a.width)
    head = 0.0 if a.tied_head else element_bytes * a.width
    if head_format != "bf16":
        head = FORMATS[head_format].bytes_per_weight * packed_width(a.width)
    return a.vocab_size * (element_bytes * a.width + head) + norms


def num_trained_weights(a: Architecture, config: RunConfig) -> int:
    """Return the number of weights that learn: the adapters', or the target linears' own."""
    targets = adapter_targets(a, config.adapter)
    linears = [(x, n) for spec, n in counted_specs(a) for x in spec.linears if x.short_name in targets]
    if config.adapter.kind == "full":
        return sum(n * x.num_weights for x, n in linears)
    of_experts = mixture.num_adapter_weights(a, config.adapter)
    return config.adapter.rank * sum(n * (x.out_width + x.in_width) for x, n in linears) + of_experts


def optimizer_bytes(num_weights: int, optimizer: str) -> float:
    """Return the bytes of AdamW's moments; 8-bit moments have one fp32 factor for each block of 256."""
    return num_weights * (8 if optimizer == "adamw" else 2 * (1 + 4 / 256))


def kv_cache_bytes(a: Architecture, config: RunConfig, prompt_tokens: int) -> float:
    engine, max_tokens = config.engine, config.sample.max_tokens
    dtype = FP8 if engine.kv_cache_dtype == "fp8" else compute_dtype(config)
    in_work = config.num_prompts + (config.rollout.extra_prompts if config.rollout.partial else 0)
    running = min(in_work * config.num_generations, engine.max_num_seqs)
    prompts = min(in_work, engine.max_num_seqs)
    pages = prompts * num_pages(prompt_tokens, engine.block_size)
    kept = 0 if config.algo.branching == "none" else config.num_prompts * config.num_generations
    own = own_pages(prompt_tokens, max_tokens, engine.block_size)
    pages += (kept + running) * own
    slots = prompts + running if config.algo.branching == "none" else config.num_prompts + running
    slot = slot_bytes(a, compute_dtype(config))
    size = CacheSize.of(a, engine, dtype, slot_bytes=slot, max_rows=engine.max_num_seqs)
    windowed = 0
    if size.window is not None:
        windowed = prompts * size.window.prompt_pages(prompt_tokens) + kept * own
        windowed += running * size.window.running_pages(own)
    wanted = size.bytes_of(Space(pages + 1, windowed + 1, slots))
    return wanted if engine.kv_cache_gb is None else min(wanted, engine.kv_cache_gb * 1e9)


def pass_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the bytes of a forward pass without gradient: one layer's activations, gate and up (in fp32 for
    some rows, except in FP8's kernels), and the layer's largest operand."""
    specs, size = [spec for spec, _ in counted_specs(a)], element_bytes(config)
    gate_up = 2 * size * rows if saves_up(config) else 8 * min(rows, WIDE_ROWS)
    row = size * (4 * a.width + 2 * max(x.qkv.out_width for x in specs))
    row += 0 if a.delta is None else a.delta.working_bytes
    mlp = max(
        rows * mixture.pass_bytes_per_row(a, size) if x.experts else (rows * size + gate_up) * a.ff_width
        for x in specs
    )
    unpacked = mixture.unpacked_bytes(a, config.model.format, size)
    return rows * row + mlp + max(unpacked, *(max(each) for each, _ in operand_bytes(a, config)))


def operand_bytes(a: Architecture, config: RunConfig) -> list[tuple[list[float], int]]:
    """Return the bytes of the unpacked operands of each kind of layer, whose rows end with the adapter's
    columns, and the number of layers; those of experts are apart (mixture.py). BF16 weights computed in bf16
    are their own operands."""
    if config.model.format == "bf16" and element_bytes(config) == 2:
        return [([0.0], a.num_layers)]
    return [([_operand_bytes(x, config) for x in spec.groups], n) for spec, n in counted_specs(a)]


def _operand_bytes(group: LinearGroupSpec, config: RunConfig) -> float:
    if not group.is_quantized:  # BF16; routers compute in fp32
        size = 4 if group.name == "router" else element_bytes(config)
        return 0.0 if size == 2 else float(size * group.num_weights)
    return element_bytes(config) * group.out_width * row_width(group.in_width, group, config)


def adapter_column_bytes(a: Architecture, config: RunConfig) -> int:
    """Return the bytes behind the rows of BF16 weights, which hold the adapters' b and zeros
    (models/fused_weights.py)."""
    if config.model.format != "bf16" or element_bytes(config) != 2:
        return 0
    return 2 * sum(
        count * group.out_width * (row_width(group.in_width, group, config) - group.in_width)
        for spec, count in counted_specs(a)
        for group in spec.groups
    )


def operand_cache_bytes(a: Architecture, config: RunConfig) -> float:
    """Return the bytes of all layers' operands; FP8 multiplies its codes directly
    (kernels/linear/fp8_linear.py)."""
    if config.model.format == "fp8-flow":
        return 0.0
    operands = sum(n * sum(each) for each, n in operand_bytes(a, config))
    if config.learn.backward == "bf16":
        return operands
    groups = [(group, n) for spec, n in counted_specs(a) for group in spec.groups]
    codes = sum(n * code_bytes(x.out_width, x.in_width) for x, n in groups)
    if config.learn.gradient_checkpointing != "none":  # gate and up are multiplied once more
        again = [(x, n) for x, n in groups if x.name == "gate_up"]
        codes += sum(n * code_bytes(x.out_width, x.in_width, along_k=True) for x, n in again)
    return operands + codes


def int8_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the bytes of the largest weight and gradient of outputs in 8-bit integers."""
    if config.learn.backward == "bf16":
        return 0.0
    groups = [group for spec, _ in counted_specs(a) for group in spec.groups]
    in_chunks = config.learn.gradient_checkpointing != "none" and is_chunked(a, config, rows)

    def of(x: LinearGroupSpec) -> int:
        own = CHUNK_ROWS if in_chunks and x.name in ("gate_up", "down") else rows
        return code_bytes(x.out_width, x.in_width) + row_code_bytes(own, x.out_width)

    return max(map(of, groups))


def unpacked_bytes(a: Architecture, config: RunConfig) -> float:
    """Return the bytes of operands unpacked at a time: one, or a layer's if the layer is recomputed; besides
    a layer's, some of its experts."""
    experts = mixture.unpacked_bytes(a, config.model.format, element_bytes(config))
    if config.learn.gradient_checkpointing == "none":
        return max(experts, *(max(each) for each, _ in operand_bytes(a, config)))
    return experts + max(sum(each) for each, _ in operand_bytes(a, config))


def head_bytes(a: Architecture, config: RunConfig, rows: int) -> float:
    """Return the bytes of the head's passes: a chunk of logits and their gradient, of one slice of the
    vocabulary (all of it for a divergence), [T, D] twice in fp32 and once in the compute dtype, and a slice
    of a packed head's operand."""
    chunk, is_packed = min(config.learn.logprob_chunk_tokens, rows), config.model.head_format != "bf16"
    has_divergence = config.distil.is_divergence
    columns = a.vocab_size if has_divergence else slice_columns(a.vocab_size, a.width, is_packed=is_packed)
    operand = element_bytes(config) * columns * packed_width(a.width) if is_packed else 0
    # A divergence has logits and probabilities at once.
    logits = chunk * columns * (4 + 4 * has_divergence + element_bytes(config))
    return logits + rows * a.width * (2 * 4 + element_bytes(config)) + operand


def memory_parts(
    a: Architecture, config: RunConfig, prompt_tokens: int, rows: int | None = None
) -> list[MemoryPart]:
    """Return the parts with micro-batches of `rows`; None: those of samples of the maximum length."""
    n, rows = num_trained_weights(a, config), rows or microbatch_rows(config, prompt_tokens)
    step_tokens = config.num_prompts * (prompt_tokens + config.num_generations * config.sample.max_tokens)
    prefill_rows = min(config.engine.batched_tokens(is_mixture=a.mixture is not None), step_tokens)
    # The head's rows are freed before the layers' backward passes begin; the saved inputs stay all along.
    kept = kept_bytes(a, config, rows)
    layers = layer_bytes(a, config, rows) + unpacked_bytes(a, config) + int8_bytes(a, config, rows)
    head = head_bytes(a, config, rows)
    sampler = 0 if config.model.sampler_format is None else weight_bytes(a, config.model.sampler_format)
    num_noise_rows = 1 if config.noise.scope == "step" else 1 + config.num_noises
    embedding = embedding_bytes(a, config.model.head_format, num_noise_rows, element_bytes(config))
    copied = 2 * n - mixture.num_adapter_weights(a, config.adapter)
    copies = element_bytes(config) * copied + adapter_column_bytes(a, config)
    copies = copies if config.adapter.kind == "lora" else 0
    backward = "a layer's backward pass" if layers > head else "the head's passes"
    return [
        MemoryPart("weights", weight_bytes(a, config.model.format), "always"),
        MemoryPart("sampler's weights", sampler, "always"),
        MemoryPart("embedding, head, norms", embedding, "always"),
        MemoryPart("adapter's masters", 4 * n, "always"),
        MemoryPart("adapter's working copies", copies, "always"),
        MemoryPart("optimizer's moments", optimizer_bytes(n, config.learn.optim), "always"),
        MemoryPart("KV cache", kv_cache_bytes(a, config, prompt_tokens), "sampling"),
        MemoryPart("CUDA", CONTEXT_BYTES, "always"),
        MemoryPart("prefill", pass_bytes(a, config, prefill_rows), "sampling"),
        *_teacher_parts(a, config, rows),
        MemoryPart("adapter's gradients", 4 * n, "learning"),
        MemoryPart(f"activations saved for {rows} rows", kept, "learning"),
        MemoryPart(backward, max(layers, head), "learning"),
        MemoryPart("layer inputs", host_bytes(a, config, rows), "on the host"),
    ]


def _teacher_parts(a: Architecture, config: RunConfig, rows: int) -> list[MemoryPart]:
    """Return those of a teacher in this process: its weights, unless it shares the student's, its adapter
    with working copies, and its pass over a micro-batch, with two fp32 numbers for each logit of a chunk."""
    teacher = planned_teacher(a, config)
    if teacher is None:
        return []
    own, size = teacher.architecture, element_bytes(config)
    weights = 0.0
    if teacher.format is not None:
        weights = weight_bytes(own, teacher.format) + embedding_bytes(own, element_bytes=size)
    adapter = 0
    if teacher.adapter is not None:
        adapter = (4 + size) * num_trained_weights(own, dataclasses.replace(config, adapter=teacher.adapter))
    chunk = min(config.learn.logprob_chunk_tokens, rows)
    form = dataclasses.replace(config.model, format=teacher.format or config.model.format, calibrate="none")
    work = pass_bytes(own, dataclasses.replace(config, model=form), rows)
    work += rows * own.width * (8 + size) + 8 * chunk * own.vocab_size
    return [
        MemoryPart("teacher's weights", weights, "always"),
        MemoryPart("teacher's adapter", adapter, "always"),
        MemoryPart("teacher's pass", work, "teaching"),
    ]


def peak_bytes(parts: list[MemoryPart]) -> float:
    always, *phases = (
        sum(part.num_bytes for part in parts if part.when == when)
        for when in ("always", "sampling", "teaching", "learning")
    )
    return always + max(phases)


def resolve_checkpointing(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> RunConfig:
    """Return the config with learn.gradient_checkpointing auto replaced by the first of none, layer and
    offload with which learning fits, or else by offload. The KV cache takes what memory is left. gpu_bytes
    includes the CUDA context."""
    if config.learn.gradient_checkpointing != "auto":
        return config
    changed = config
    for mode in _CHECKPOINTING_MODES:
        changed = dataclasses.replace(
            config, learn=dataclasses.replace(config.learn, gradient_checkpointing=mode)
        )
        if learning_bytes(memory_parts(a, changed, prompt_tokens)) <= USABLE_SHARE * gpu_bytes:
            break
    return changed


def can_cache_operands(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float, rows: int | None = None
) -> bool:
    """True if there are unpacked operands and those of all layers fit beside what learning takes.

    The config's gradient_checkpointing must be resolved. gpu_bytes includes the CUDA context. rows: as for
    memory_parts.
    """
    cache = operand_cache_bytes(a, config)
    need = learning_bytes(memory_parts(a, config, prompt_tokens, rows)) + cache
    return cache > 0 and need <= USABLE_SHARE * gpu_bytes


def usable_bytes(device: torch.device) -> float:
    """Return the bytes of this GPU that this process may use, the CUDA context included: the gpu_bytes of a
    run whose model is loaded."""
    return free_bytes(device) + torch.cuda.memory_allocated(device) + CONTEXT_BYTES


def learning_bytes(parts: list[MemoryPart]) -> float:
    return sum(part.num_bytes for part in parts if part.when in ("always", "learning"))
