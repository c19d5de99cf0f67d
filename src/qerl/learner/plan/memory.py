"""The parts of the GPU memory that a training step takes, computed from the model's shape and the config.

    peak = what is always allocated + the largest of what sampling, a teacher and learning allocate besides

Assumed: the KV cache and the learner use the same memory in turns (kernels/runtime/virtual_memory.py),
weights are packed, and all samples have the maximum length. Shorter samples fill
learn.max_tokens_per_microbatch better. qerl.cost has the bytes of each part; of n weights in the adapter:

    adapter          masters 4 n, working copies 2 n, the decode step's stacked copies 2 n, not of experts;
                     of modules trained whole a copy as they were
    gradients        4 n                                            moments           8 n, or 2 n + n / 32
    KV cache         all samples at once, up to engine.max_num_seqs or engine.kv_cache_gb; with branches, the
                     pages of all samples in addition; recurrent states of samples and prompts
    teacher          of one in this process (training/rollouts/teacher.py): its weights and its pass

Sizes are for bf16; with model.dtype fp32 (not measured yet) everything that is not packed takes 4 bytes
instead of 2. tests/learner/test_plan.py checks each part by hand and the sum against benchmarks. Learning
from 8,192 rows at the 7B shape on an H200, model included, took 41.19 GB with gradient_checkpointing none and
13.19 GB with layer; the plan says 42.4 and 14.2, of which the 0.6 GB of CUDA itself were not measured.
"""

import bisect
import dataclasses
import functools
from typing import Any, Literal

import torch

from qerl.config import AdapterConfig, RunConfig
from qerl.cost.activations import head_bytes, host_bytes, kept_bytes, layer_bytes, pass_bytes
from qerl.cost.cache import FP8, slot_bytes
from qerl.cost.form import ModelForm
from qerl.cost.operands import adapter_column_bytes, int8_bytes, operand_cache_bytes, unpacked_bytes
from qerl.cost.prefill import batched_tokens
from qerl.cost.weights import (
    base_bytes,
    embedding_bytes,
    num_active_params,
    num_expert_adapter_weights,
    num_trained_weights,
    num_whole_weights,
    optimizer_bytes,
    weight_bytes,
)
from qerl.engine.cache.budget import SHARE, free_bytes
from qerl.engine.cache.size import CacheSize
from qerl.engine.schedule.cache_space import Space
from qerl.engine.schedule.page_pool import num_pages, own_pages
from qerl.learner.checkpoint import adapter_folder
from qerl.learner.plan.shapes import read_architecture
from qerl.models.architecture import Architecture
from qerl.models.peft.peft_reader import adapter_config

CONTEXT_BYTES = 0.6e9  # CUDA, its libraries and the kernels
_CHECKPOINTING_MODES = "none", "layer", "offload"
MAX_TOKENS = 65_536  # of a micro-batch
_ENOUGH_WORK = 5e13  # tokens * weights: 0.7 s of an H100
_EVEN_TOKENS = 16_384
USABLE_SHARE = 0.95  # torch's blocks hold unused memory that no part counts


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: float
    when: Literal["always", "sampling", "teaching", "learning", "on the host"]


def form_of(config: RunConfig) -> ModelForm:
    return ModelForm.of(config.model, config.adapter)


def with_fields(config: RunConfig, section: str, **fields: Any) -> RunConfig:
    """Return the config with a section's fields changed: with_fields(config, "learn", backward="int8")."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})


def float_config(config: RunConfig) -> RunConfig:
    """Return the config of the model that evaluate.float evaluates: the weights as loaded, in BF16."""
    without = with_fields(config, "evaluate", float=False)
    formats = {"format": "bf16", "scales": "plain", "calibrate": "none", "sampler_format": None}
    return with_fields(without, "model", **formats, head_format="bf16")


def float_evaluation_bytes(a: Architecture, config: RunConfig, prompt_tokens: int) -> float:
    """Return the peak of evaluate.float, before the quantized weights and the optimizer are made, or 0."""
    if not config.evaluate.float:
        return 0.0
    parts = memory_parts(a, float_config(config), prompt_tokens)
    held = (part for part in parts if part.when in ("always", "sampling"))
    return sum(part.num_bytes for part in held if part.name != "optimizer's moments")


def planned_rows(config: RunConfig) -> int:
    """Return engine.max_num_seqs, resolved for a GPU."""
    return config.engine.max_rows(has_kernels=config.engine.kernels != "torch")


def kv_cache_bytes(a: Architecture, config: RunConfig, prompt_tokens: int) -> float:
    engine, max_tokens = config.engine, config.sample.max_tokens
    compute = form_of(config).compute
    dtype = FP8 if engine.kv_cache_dtype == "fp8" else compute
    in_work = config.num_prompts + (config.rollout.extra_prompts if config.rollout.partial else 0)
    max_rows = planned_rows(config)
    running = min(in_work * config.num_generations, max_rows)
    prompts = min(in_work, max_rows)
    pages = prompts * num_pages(prompt_tokens, engine.block_size)
    num_branched = 0 if config.algo.branching == "none" else config.num_prompts * config.num_generations
    sample_pages = own_pages(prompt_tokens, max_tokens, engine.block_size)
    pages += (num_branched + running) * sample_pages
    slots = prompts + running if config.algo.branching == "none" else config.num_prompts + running
    size = CacheSize.of(a, engine, dtype, slot_bytes=slot_bytes(a, compute), max_rows=max_rows)
    windowed = 0
    if size.window is not None:
        windowed = prompts * size.window.prompt_pages(prompt_tokens) + num_branched * sample_pages
        windowed += running * size.window.running_pages(sample_pages)
    wanted = size.bytes_of(Space(pages + 1, windowed + 1, slots))
    return wanted if engine.kv_cache_gb is None else min(wanted, engine.kv_cache_gb * 1e9)


def with_free_cache(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> RunConfig:
    """Return the config with the KV cache that a run takes: as large as all samples need, or as what is free
    (engine/cache/budget.py) if that holds at least a prompt with one sample. gpu_bytes includes the CUDA
    context."""
    if config.engine.kv_cache_gb is not None:
        return config
    parts = memory_parts(a, config, prompt_tokens)
    wanted = sum(part.num_bytes for part in parts if part.name == "KV cache")
    others = sum(part.num_bytes for part in parts if part.when in ("always", "sampling")) - wanted
    free = SHARE * (USABLE_SHARE * gpu_bytes - others)
    minimum = kv_cache_bytes(a, with_fields(config, "engine", max_num_seqs=1), prompt_tokens)
    if wanted <= free or free < minimum:
        return config
    return with_fields(config, "engine", kv_cache_gb=free / 1e9)


def resident_samples(a: Architecture, config: RunConfig, prompt_tokens: int) -> int:
    """Return how many samples of the maximum length the KV cache of engine.kv_cache_gb holds at once, up to
    those of a step."""
    num_samples = min(config.num_prompts * config.num_generations, planned_rows(config))
    if config.engine.kv_cache_gb is None:
        return num_samples
    limit, whole = config.engine.kv_cache_gb * 1e9, with_fields(config, "engine", kv_cache_gb=None)

    def is_too_large(rows: int) -> bool:
        return kv_cache_bytes(a, with_fields(whole, "engine", max_num_seqs=rows), prompt_tokens) > limit

    return bisect.bisect_left(range(1, num_samples + 1), True, key=is_too_large)


def full_rows(config: RunConfig, prompt_tokens: int) -> int:
    """Return the most rows of a micro-batch whatever the samples' lengths: shorter ones fill it better."""
    group = prompt_tokens + config.num_generations * (config.sample.max_tokens - 1)
    all_rows = group * _num_groups(config)
    return max(min(config.learn.microbatch_tokens, all_rows), microbatch_rows(config, prompt_tokens))


def microbatch_rows(config: RunConfig, prompt_tokens: int) -> int:
    """Return the rows of the largest micro-batch if all samples have the maximum length.

    It holds whole groups, or parts of a group with as many samples as fit, at least one. learner/packing.py
    makes them no larger, and of about one size. With branches, there is one more group for each sample."""
    limit, branch = config.learn.microbatch_tokens, config.sample.max_tokens - 1
    group = prompt_tokens + config.num_generations * branch
    num_groups = _num_groups(config)
    if group <= limit:
        return group * min(limit // group, num_groups)
    max_rows = space = 0
    for _ in range(num_groups):
        left = config.num_generations
        while left:
            space = space if space >= prompt_tokens + branch else limit
            count = min(max((space - prompt_tokens) // max(branch, 1), 1), left)
            space, left = space - prompt_tokens - count * branch, left - count
            max_rows = max(max_rows, limit - space)
    return max_rows


def _num_groups(config: RunConfig) -> int:
    """Return the groups of an update."""
    num_groups = config.num_prompts * (1 if config.algo.branching == "none" else 1 + config.num_generations)
    return -(-num_groups // config.learn.updates_per_step)


def memory_parts(
    a: Architecture, config: RunConfig, prompt_tokens: int, rows: int | None = None
) -> list[MemoryPart]:
    """Return the parts with micro-batches of `rows`; None: those of samples of the maximum length."""
    form, learn, rows = form_of(config), config.learn, rows or microbatch_rows(config, prompt_tokens)
    n = num_trained_weights(a, config.adapter)
    step_tokens = config.num_prompts * (prompt_tokens + config.num_generations * config.sample.max_tokens)
    prefill_rows = min(batched_tokens(config.engine, a), step_tokens)
    # The head's rows are freed before the layers' backward passes begin; the saved inputs stay all along.
    saved = kept_bytes(a, form, learn, rows)
    layers = layer_bytes(a, form, learn, rows) + unpacked_bytes(a, form, learn)
    layers += int8_bytes(a, form, learn, rows)
    head = head_bytes(a, form, learn, rows, has_divergence=config.distil.is_divergence)
    in_one_format = dataclasses.replace(a, bf16_linears=frozenset())
    of_sampler = config.model.sampler_format
    sampler = 0 if of_sampler is None else weight_bytes(in_one_format, of_sampler)
    num_noise_rows = 1 if config.noise.scope == "step" else 1 + config.num_noises
    embedding = embedding_bytes(a, form.head_format, num_noise_rows, form.element_bytes)
    copied = 2 * (n - num_whole_weights(a, config.adapter)) - num_expert_adapter_weights(a, config.adapter)
    before = base_bytes(a, config.adapter, form.element_bytes)
    copies = form.element_bytes * copied + adapter_column_bytes(a, form)
    copies = copies if config.adapter.kind == "lora" else 0
    backward = "a layer's backward pass" if layers > head else "the head's passes"
    return [
        MemoryPart("weights", weight_bytes(a, form.format), "always"),
        MemoryPart("sampler's weights", sampler, "always"),
        MemoryPart("embedding, head, norms", embedding, "always"),
        MemoryPart("adapter's masters", 4 * n, "always"),
        MemoryPart("adapter's working copies", copies, "always"),
        *([MemoryPart("whole modules as they were", before, "always")] if before else []),
        MemoryPart("optimizer's moments", optimizer_bytes(n, learn.optim), "always"),
        MemoryPart("KV cache", kv_cache_bytes(a, config, prompt_tokens), "sampling"),
        MemoryPart("CUDA", CONTEXT_BYTES, "always"),
        MemoryPart("prefill", pass_bytes(a, form, prefill_rows), "sampling"),
        *_teacher_parts(a, config, rows),
        MemoryPart("adapter's gradients", 4 * n, "learning"),
        *_table_parts(a, config, rows),
        MemoryPart(f"activations saved for {rows} rows", saved, "learning"),
        MemoryPart(backward, max(layers, head), "learning"),
        MemoryPart("layer inputs", host_bytes(a, learn, rows), "on the host"),
    ]


def _table_parts(a: Architecture, config: RunConfig, rows: int) -> list[MemoryPart]:
    """Return what an embedding or a head that is trained whole needs in a micro-batch: its gradient, before
    that is added to the others', and the head's inputs."""
    names = config.adapter.modules_to_save
    inputs = rows * a.width * form_of(config).element_bytes * ("lm_head" in names)
    size = 4 * len(names) * a.vocab_size * a.width + inputs
    return [MemoryPart("a batch's gradients of tables", size, "learning")] if size else []


def _teacher_parts(a: Architecture, config: RunConfig, rows: int) -> list[MemoryPart]:
    """Return those of a teacher in this process: its weights, unless it shares the student's, its adapter
    with working copies, and its pass over a micro-batch, with two fp32 numbers for each logit of a chunk."""
    distil, form, weights, adapter = config.distil, form_of(config), 0.0, 0
    if not distil.is_on or distil.is_endpoint:
        return []
    size, format = form.element_bytes, distil.format or form.format
    is_base = config.adapter.kind == "lora" and (distil.teacher, format) == (config.model.path, form.format)
    if (of_teacher := _adapter_of(distil.teacher)) is not None:
        adapter = (4 + size) * num_trained_weights(a, of_teacher)
    elif not is_base:
        a, form = _architecture_of(distil.teacher), dataclasses.replace(form, format=format)
        weights = weight_bytes(a, format) + embedding_bytes(a, element_bytes=size)
    chunk = min(config.learn.logprob_chunk_tokens, rows)
    work = pass_bytes(a, form, rows) + rows * a.width * (8 + size) + 8 * chunk * a.vocab_size
    return [
        MemoryPart("teacher's weights", weights, "always"),
        MemoryPart("teacher's adapter", adapter, "always"),
        MemoryPart("teacher's pass", work, "teaching"),
    ]


@functools.cache
def _adapter_of(teacher: str) -> AdapterConfig | None:
    folder = adapter_folder(teacher)
    return None if folder is None else adapter_config(str(folder))


_architecture_of = functools.cache(read_architecture)


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
        changed = with_fields(config, "learn", gradient_checkpointing=mode)
        if learning_bytes(memory_parts(a, changed, prompt_tokens)) <= USABLE_SHARE * gpu_bytes:
            break
    return changed


def with_microbatches(a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float) -> RunConfig:
    """Return the config with learn.max_tokens_per_microbatch None replaced by 8,192, or by a larger number
    with which learning fits whatever the samples' lengths: what keeps the GPU busy, and at least 16,384 if
    unpacked operands, where a format has any, still fit beside it. Its gradient_checkpointing must be
    resolved. gpu_bytes includes the CUDA context.

    The host launches a pass of 28 layers in 0.2 to 0.4 s, however many tokens it has. Tokens/s of an update
    by tokens of a micro-batch (H100, NVFP4, no recomputation / layers recomputed; dev/log/learner.md):

                        8,192              16,384             32,768             65,536
        0.5B shape     33,600                                85,500             96,500
        1.5B shape     34,100 / 19,900    46,400 / 35,900    52,600 / 40,100         - / 40,900

    Samples of many lengths fill 8,192 tokens unevenly. An H200 learned from 96 samples of 42 to 3,074 tokens
    in groups of eight at the 7B shape (int8, FlashAttention 2) at 19,450 tokens/s with 8,192 and 20,080 with
    16,384, layers recomputed at 15,710 and 16,170; from samples of one length at 20,670 and 20,970."""
    if config.learn.max_tokens_per_microbatch is not None:
        return config
    tokens, weights = config.learn.microbatch_tokens, num_active_params(a)
    while tokens < MAX_TOKENS:
        is_enough = tokens * weights >= _ENOUGH_WORK
        larger = with_fields(config, "learn", max_tokens_per_microbatch=2 * tokens)
        parts = memory_parts(a, larger, prompt_tokens, full_rows(larger, prompt_tokens))
        left_bytes = USABLE_SHARE * gpu_bytes - learning_bytes(parts)
        operands = operand_cache_bytes(a, form_of(larger), larger.learn)
        if left_bytes < 0 or (is_enough and (tokens >= _EVEN_TOKENS or operands > left_bytes)):
            break
        tokens *= 2
    return with_fields(config, "learn", max_tokens_per_microbatch=tokens)


def can_cache_operands(
    a: Architecture, config: RunConfig, prompt_tokens: int, gpu_bytes: float, rows: int | None = None
) -> bool:
    """True if there are unpacked operands and those of all layers fit beside what learning takes.

    The config's gradient_checkpointing must be resolved. gpu_bytes includes the CUDA context. rows: as for
    memory_parts."""
    cache = operand_cache_bytes(a, form_of(config), config.learn)
    need = learning_bytes(memory_parts(a, config, prompt_tokens, rows)) + cache
    return cache > 0 and need <= USABLE_SHARE * gpu_bytes


def usable_bytes(device: torch.device) -> float:
    """Return the bytes of this GPU that this process may use, the CUDA context included: the gpu_bytes of a
    run whose model is loaded."""
    return free_bytes(device) + torch.cuda.memory_allocated(device) + CONTEXT_BYTES


def learning_bytes(parts: list[MemoryPart]) -> float:
    return sum(part.num_bytes for part in parts if part.when in ("always", "learning"))
