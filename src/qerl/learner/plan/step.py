"""The parts of the memory that a step takes, from the model's shape and the run's config alone.

    total = what is always there + the larger of what sampling and what learning need beside it

For a GPU whose memory the KV cache and learning have in turns (kernels/virtual_memory.py), weights packed,
and all samples as long as they may be; of other lengths they fill learn.max_tokens_per_microbatch better. T rows are
learned from at once, of which each is asked for one token at most; n weights has the adapter, W weights a
layer, D F N K H V as in types.py. Bytes in bf16; with model.dtype fp32 (`word`, by no measurement yet) what
is not packed takes 4 for 2:

    weights          bytes_per_weight * W * L, 4 for each output    embedding 2 V D, head the same
    adapter          masters 4 n, working copies 2 n, the decode step's stacked copies 2 n; of BF16 weights b
                     behind their rows, with zeros between the linears that share an input
    gradients        4 n                                            moments           8 n, or 2 n + n / 32
    KV cache         all samples at once, up to engine.max_num_seqs or engine.kv_cache_gb; with branches, beside all
                     samples' pages
    activations      of the layers, by learn.gradient_checkpointing (`activations`)   unpacked  operands of a layer
    head             logits and slopes of a chunk, fp32 [T, D] of its backward pass, 2 V D unpacked

A head in bf16 that is tied to the embedding takes nothing; a packed one V D of its format, tied or not.

`resolve_checkpointing` takes what learn.gradient_checkpointing auto stands for from the same sums: the least recomputation with which
learning fits. The KV cache does not count there: it takes the memory that there is. `holds_operands`: whether
the learner may besides hold all layers' operands for as long as an update lasts, `held`.

tests/learner/test_plan.py has it by hand, and beside what benchmarks measured. Learning from 8,192 rows at the 7B
shape on an H200, with the model, took 41.19 and 13.19 GB with recompute none and layer; planned 42.4 and
14.2, of which CUDA's own 0.6 were not measured.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

import torch

from qerl.config import RunConfig
from qerl.engine.kv_budget import free_bytes
from qerl.engine.kv_cache import FP8, page_bytes
from qerl.engine.scheduler import num_pages, own_pages
from qerl.errors import UserError
from qerl.formats import FORMATS
from qerl.kernels.fused_linear import WIDE_ROWS
from qerl.models.architecture import Architecture
from qerl.models.device import COMPUTE
from qerl.models.layer_spec import LinearGroupSpec, layer_spec
from qerl.models.random_weights import SHAPES

CONTEXT_BYTES = 0.6e9  # CUDA, its libraries and the kernels
_RECOMPUTES = "none", "layer", "offload"
_AUTO_SHARE = 0.95  # of the memory: what torch's blocks hold unused is in no sum
_ROW = 64  # elements to which rows with room for an adapter are rounded up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: float
    when: Literal["always", "sampling", "learning"]


def architecture(model: str) -> Architecture:
    """Of a shape's name, or of a checkpoint, whose config alone is read."""
    if model in SHAPES:
        return SHAPES[model]
    from qerl.models.source import BUILT_IN, locate
    from qerl.models.state_dict import architecture_of  # a shape's plan needs no reader of files

    if "/" not in model and model != BUILT_IN and not Path(model).exists():
        raise UserError(f"{model}: no folder, file or hub id, and no shape; there are {', '.join(SHAPES)}")
    return architecture_of(locate(model).open())


def weights(a: Architecture, format: str) -> float:
    """The packed linears, their biases, and a factor for each output."""
    linears = layer_spec(a).linears
    packed = sum(linear.num_weights for linear in linears) * FORMATS[format].bytes_per_weight
    factors = 0 if format == "bf16" else sum(4 * linear.out_width for linear in linears)
    biases = sum(2 * linear.out_width for linear in linears if linear.has_bias)
    return a.num_layers * (packed + factors + biases)


def word(config: RunConfig) -> int:
    """Bytes of an activation, an unpacked weight, a working copy."""
    return _compute(config).itemsize


def _compute(config: RunConfig) -> torch.dtype:
    return COMPUTE.get(config.model.dtype, torch.bfloat16)


def tables(a: Architecture, head_format: str = "bf16", num_noise_rows: int = 1, word: int = 2) -> float:
    """Embedding, head, norms and their noise."""
    norms = (
        4 * a.width * ((2 + 2 * num_noise_rows) * a.num_layers + 1)
        + a.qk_norm * 8 * a.head_size * a.num_layers
    )
    plain_head = 0 if a.tied_head else word
    own_head = plain_head if head_format == "bf16" else FORMATS[head_format].bytes_per_weight
    return a.vocab_size * a.width * (word + own_head) + norms


def adapter_weights(a: Architecture, config: RunConfig) -> int:
    """What learns: of the adapters, or the targets themselves."""
    linears = [x for x in layer_spec(a).linears if x.short_name in config.adapter.target_modules]
    if config.adapter.kind == "full":
        return a.num_layers * sum(x.num_weights for x in linears)
    return a.num_layers * config.adapter.rank * sum(x.out_width + x.in_width for x in linears)


def moments(num_weights: int, optimizer: str) -> float:
    """8 bits: and a factor in fp32 for each block of 256."""
    return num_weights * (8 if optimizer == "adamw" else 2 * (1 + 4 / 256))


def kv_cache(a: Architecture, config: RunConfig, prompt_tokens: int) -> float:
    engine, max_tokens = config.engine, config.sample.max_tokens
    dtype = FP8 if engine.kv_cache_dtype == "fp8" else _compute(config)
    running = min(config.num_prompts * config.num_generations, engine.max_num_seqs)
    prompts = min(config.num_prompts, engine.max_num_seqs)
    pages = prompts * num_pages(prompt_tokens, engine.block_size)
    kept = 0 if config.algo.branching == "none" else config.num_prompts * config.num_generations
    pages += (kept + running) * own_pages(prompt_tokens, max_tokens, engine.block_size)
    wanted = (pages + 1) * page_bytes(a, engine.block_size, dtype)
    return wanted if engine.kv_cache_gb is None else min(wanted, engine.kv_cache_gb * 1e9)


def prefill(a: Architecture, config: RunConfig) -> float:
    """A layer's activations, no more; gate and up, but for FP8's kernels in fp32 and of some rows; its largest
    operand."""
    heads, rows = layer_spec(a).qkv.out_width, config.engine.max_num_batched_tokens
    gate_up = 2 * word(config) * rows if _keeps_up(config) else 8 * min(rows, WIDE_ROWS)
    row = word(config) * (4 * a.width + 2 * heads + a.ff_width)
    return rows * row + gate_up * a.ff_width + max(operands(a, config))


def operands(a: Architecture, config: RunConfig) -> list[float]:
    """A layer's four unpacked, with room for the adapter's part behind each row; BF16 has none in bf16."""
    if config.model.format == "bf16" and word(config) == 2:
        return [0.0]
    return [
        word(config) * group.out_width * _with_room(group.in_width, group, config)
        for group in layer_spec(a).groups
    ]


def adapter_columns(a: Architecture, config: RunConfig) -> int:
    """Bytes behind the rows of BF16 weights, where the adapters' b and zeros are (models/fused_weights.py)."""
    if config.model.format != "bf16" or word(config) != 2:
        return 0
    columns = sum(
        group.out_width * (_with_room(group.in_width, group, config) - group.in_width)
        for group in layer_spec(a).groups
    )
    return 2 * a.num_layers * columns


def held(a: Architecture, config: RunConfig) -> float:
    """All layers' operands at once; FP8's own products are of codes (kernels/fp8_linear.py)."""
    return 0.0 if config.model.format == "fp8-flow" else a.num_layers * sum(operands(a, config))


def _keeps_up(config: RunConfig) -> bool:
    """Whether swiglu's backward pass reads up, or has it from its result (kernels/swiglu.py)."""
    return config.model.format == "fp8-flow"


def layer_row(a: Architecture, config: RunConfig) -> float:
    """What a layer's forward pass leaves for its backward pass, for each row: inputs of norms, products and
    swiglu, q, the branches' k and v, o; a word each, but the norms' inputs and sums of the softmax fp32."""
    gate_up = (1 + _keeps_up(config)) * a.ff_width
    spec = layer_spec(a)
    inputs = sum(_with_room(group.in_width, group, config) for group in spec.groups)
    q, k, v = spec.qkv.out_widths
    return word(config) * (inputs + gate_up + 2 * q + k + v) + 4 * (2 * a.width + a.num_heads)


def gradient_row(a: Architecture, config: RunConfig) -> float:
    """At most at once in a layer's backward pass beside what is left of its row: of gate, up, h in words
    and twice in fp32; and of swiglu, whose place is its input's where that is not read again."""
    return word(config) * ((3 - _keeps_up(config)) * a.ff_width + a.width) + 4 * 2 * a.width


def activations(a: Architecture, config: RunConfig, rows: int) -> float:
    """none: all layers' rows. layer: each one's input and one layer's rows; offload: four inputs."""
    one, inputs = layer_row(a, config), 4 * a.width
    kept = {
        "none": a.num_layers * one,
        "layer": a.num_layers * inputs + one,
        "offload": min(4, a.num_layers) * inputs + one,
    }
    return rows * (kept[config.learn.gradient_checkpointing] + gradient_row(a, config))


def unpacked(a: Architecture, config: RunConfig) -> float:
    """One at a time; a layer's, where it is computed again."""
    each = operands(a, config)
    return max(each) if config.learn.gradient_checkpointing == "none" else sum(each)


def head(a: Architecture, config: RunConfig, rows: int) -> float:
    """Beside the layers' inputs: logits and slopes of a chunk, [T, D] twice in fp32 and once in words."""
    chunk = min(config.learn.logprob_chunk_tokens, rows)
    operand = 0 if config.model.head_format == "bf16" else word(config) * a.vocab_size * a.width
    return chunk * a.vocab_size * (4 + word(config)) + rows * a.width * (2 * 4 + word(config)) + operand


def rows_at_once(config: RunConfig, prompt_tokens: int) -> int:
    """Of the largest micro-batch if all samples are as long as may be: whole groups, or parts of them with as
    many samples as fit, at least one (learner/packing.py). With branches, a group more for each sample."""
    limit, branch = config.learn.max_tokens_per_microbatch, config.sample.max_tokens - 1
    group = prompt_tokens + config.num_generations * branch
    num_groups = config.num_prompts * (1 if config.algo.branching == "none" else 1 + config.num_generations)
    num_groups = -(-num_groups // config.learn.updates_per_step)
    if group <= limit:
        return group * min(limit // group, num_groups)
    most = space = 0
    for _ in range(num_groups):
        left = config.num_generations
        while left:
            space = space if space >= prompt_tokens + branch else limit
            count = min(max((space - prompt_tokens) // max(branch, 1), 1), left)
            space, left = space - prompt_tokens - count * branch, left - count
            most = max(most, limit - space)
    return most


def parts(a: Architecture, config: RunConfig, prompt_tokens: int) -> list[MemoryPart]:
    n, rows = adapter_weights(a, config), rows_at_once(config, prompt_tokens)
    # The head's rows are gone when the layers' backward passes begin; the kept inputs are there all along.
    kept = activations(a, config, rows) - rows * gradient_row(a, config)
    if config.learn.gradient_checkpointing != "none":
        kept -= rows * layer_row(a, config)
    layers = activations(a, config, rows) - kept + unpacked(a, config)
    second = 0 if config.model.sampler_format is None else weights(a, config.model.sampler_format)
    num_noise_rows = 1 if config.noise.scope == "step" else 1 + config.num_noises
    frozen = tables(a, config.model.head_format, num_noise_rows, word(config))
    copies = 2 * word(config) * n + adapter_columns(a, config) if config.adapter.kind == "lora" else 0
    return [
        MemoryPart(name="weights", num_bytes=weights(a, config.model.format), when="always"),
        MemoryPart(name="sampler's weights", num_bytes=second, when="always"),
        MemoryPart(name="embedding, head, norms", num_bytes=frozen, when="always"),
        MemoryPart(name="adapter's masters", num_bytes=4 * n, when="always"),
        MemoryPart(name="adapter's working copies", num_bytes=copies, when="always"),
        MemoryPart(name="optimizer's moments", num_bytes=moments(n, config.learn.optim), when="always"),
        MemoryPart(name="KV cache", num_bytes=kv_cache(a, config, prompt_tokens), when="sampling"),
        MemoryPart(name="CUDA", num_bytes=CONTEXT_BYTES, when="always"),
        MemoryPart(name="prefill", num_bytes=prefill(a, config), when="sampling"),
        MemoryPart(name="adapter's gradients", num_bytes=4 * n, when="learning"),
        MemoryPart(name=f"activations kept for {rows} rows", num_bytes=kept, when="learning"),
        MemoryPart(
            name="a layer's backward pass" if layers > head(a, config, rows) else "the head's passes",
            num_bytes=max(layers, head(a, config, rows)),
            when="learning",
        ),
    ]


def total(found: list[MemoryPart]) -> float:
    always, *phases = (
        sum(part.num_bytes for part in found if part.when == when)
        for when in ("always", "sampling", "learning")
    )
    return always + max(phases)


def resolve_checkpointing(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float
) -> RunConfig:
    """The same with learn.gradient_checkpointing auto replaced: the first of none, layer and offload with which learning
    fits, or the last. On gpu_bytes, the CUDA context's included."""
    if config.learn.gradient_checkpointing != "auto":
        return config
    changed = config
    for recompute in _RECOMPUTES:
        changed = dataclasses.replace(
            config, learn=dataclasses.replace(config.learn, gradient_checkpointing=recompute)
        )
        if learning_bytes(parts(a, changed, prompt_tokens)) <= _AUTO_SHARE * gpu_bytes:
            break
    return changed


def holds_operands(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> bool:
    """Whether there are any and they fit; of a config that is settled; on gpu_bytes, the CUDA context's
    included."""
    besides = held(a, config)
    need = learning_bytes(parts(a, config, prompt_tokens)) + besides
    return besides > 0 and need <= _AUTO_SHARE * gpu_bytes


def usable_bytes(device: torch.device) -> float:
    """Of this GPU by this process, the CUDA context's included: the gpu_bytes of a run that has begun."""
    return free_bytes(device) + torch.cuda.memory_allocated(device) + CONTEXT_BYTES


def learning_bytes(found: list[MemoryPart]) -> float:
    return sum(part.num_bytes for part in found if part.when != "sampling")


def _with_room(width: int, group: LinearGroupSpec, config: RunConfig) -> int:
    """Of a row and the adapters' parts behind it."""
    adapter = config.adapter
    rank = (
        adapter.rank
        * sum(linear.short_name in adapter.target_modules for linear in group.linears)
        * (adapter.kind == "lora")
    )
    return math.ceil((width + rank) / _ROW) * _ROW if rank else width
