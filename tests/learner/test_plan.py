"""The parts by hand, for a shape small enough to count: sums are written out, not computed the same way."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.rows import read_rows
from qerl.bench.options import BenchStepOptions
from qerl.bench.record import RESULTS
from qerl.bench.step import cases, run_config
from qerl.cli.main import command
from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    DeepConfig,
    DistilConfig,
    EngineConfig,
    LearnConfig,
    ModelConfig,
    NoiseConfig,
    RolloutConfig,
    RunConfig,
    SampleConfig,
)
from qerl.cost import activations, operands, weights
from qerl.cost.calibration import calibration_bytes
from qerl.errors import UserError
from qerl.learner import packing
from qerl.learner.packing import pack
from qerl.learner.plan import memory as op
from qerl.learner.plan import report
from qerl.learner.plan.memory import form_of, microbatch_rows
from qerl.learner.plan.shapes import read_architecture
from qerl.models.architecture import Architecture, LayerKind, Rope
from qerl.models.layer_spec import counted_specs
from qerl.models.peft.adapter import adapter_tensors
from qerl.models.random_weights import random_decoder, shape
from qerl.types import Group, Prompt, Sample

ROOT = Path(__file__).parents[2]

SMALL = Architecture(
    family="Qwen2ForCausalLM",
    num_layers=3,
    width=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    ff_width=320,
    vocab_size=1000,
    norm_eps=1e-6,
    rope=Rope(kind="default", theta=1e6),
    max_positions=512,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_head=False,
)
CONFIG = RunConfig(
    num_prompts=4,
    num_generations=2,
    adapter=AdapterConfig(rank=16),
    sample=SampleConfig(max_tokens=100),
    engine=EngineConfig(block_size=16, max_num_batched_tokens=64),
    learn=LearnConfig(max_tokens_per_microbatch=200, logprob_chunk_tokens=50, gradient_checkpointing="none"),
)
PROMPT = 40
# q, k, v, o, gate, up, down
WEIGHTS = 128 * 128 + 64 * 128 + 64 * 128 + 128 * 128 + 320 * 128 + 320 * 128 + 128 * 320
IN_AND_OUT = 256 + 192 + 192 + 256 + 448 + 448 + 448


def with_learn(**changes):
    return dataclasses.replace(CONFIG, learn=dataclasses.replace(CONFIG.learn, **changes))


def head_bytes(a, config, rows):
    divergence = config.distil.is_divergence
    return activations.head_bytes(a, form_of(config), config.learn, rows, has_divergence=divergence)


def unpacked_bytes(a, config):
    return operands.unpacked_bytes(a, form_of(config), config.learn)


def operand_cache_bytes(a, config):
    return operands.operand_cache_bytes(a, form_of(config), config.learn)


def test_weights_are_packed_and_have_a_factor_and_perhaps_a_bias_for_each_output():
    outputs, biased = 128 + 64 + 64 + 128 + 320 + 320 + 128, 128 + 64 + 64
    assert weights.weight_bytes(SMALL, "nvfp4") == 3 * (WEIGHTS * 0.5625 + 4 * outputs + 2 * biased)
    assert weights.weight_bytes(SMALL, "bf16") == 3 * (WEIGHTS * 2 + 2 * biased)


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize(("compute", "word"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_the_frozen_model_is_as_large_as_planned(format, compute, word):
    """A decoder that is made, in the plain layout: that of tiles has the factors too."""
    arch, cpu = dataclasses.replace(shape("smollm2-135m"), num_layers=2), torch.device("cpu")
    decoder = random_decoder(arch, format=format, rank=32, device=cpu, seed=0, compute=compute)
    planned = weights.weight_bytes(arch, format) + weights.embedding_bytes(arch, element_bytes=word)
    assert planned == pytest.approx(decoder.num_bytes, rel=1e-3)
    config = RunConfig(adapter=AdapterConfig(rank=32))
    assert weights.num_trained_weights(arch, config.adapter) == sum(
        m.numel() for m in adapter_tensors(decoder).values()
    )


def test_the_tables_are_the_embedding_the_head_and_the_norms_with_their_noise():
    norms = 4 * 128 * (3 * 2 * 2 + 1)
    assert weights.embedding_bytes(SMALL) == 2 * 2 * 1000 * 128 + norms
    assert weights.embedding_bytes(dataclasses.replace(SMALL, tied_head=True)) == 2 * 1000 * 128 + norms


@pytest.mark.parametrize(("head", "each"), [("fp8", 1 + 4 / 128**2), ("nvfp4", 0.5625)])
def test_a_packed_head_is_a_copy_in_its_format_tied_or_not_and_is_unpacked_to_learn(head, each):
    norms = 4 * 128 * (3 * 2 * 2 + 1)
    for arch in (SMALL, dataclasses.replace(SMALL, tied_head=True)):
        assert weights.embedding_bytes(arch, head) == 1000 * 128 * (2 + each) + norms
    packed = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, head_format=head))
    assert head_bytes(SMALL, packed, 200) - head_bytes(SMALL, CONFIG, 200) == 2 * 1000 * 128


def test_the_rows_of_a_packed_head_are_padded():
    """2,880 weights to 2,944, as the decode kernel reads them."""
    wide = dataclasses.replace(SMALL, width=2880)
    plain, packed = weights.embedding_bytes(wide), weights.embedding_bytes(wide, "nvfp4")
    assert plain - packed == 1000 * (2 * 2880 - 0.5625 * 2944)
    config = dataclasses.replace(CONFIG, model=ModelConfig(head_format="nvfp4"))
    assert head_bytes(wide, config, 200) - head_bytes(wide, CONFIG, 200) == 2 * 1000 * 2944


def test_trained_norms_have_all_an_adapter_has_but_working_copies_and_are_kept_as_they_were():
    config = dataclasses.replace(CONFIG, adapter=dataclasses.replace(CONFIG.adapter, train_norms=True))
    without, parts = (
        {p.name: p.num_bytes for p in op.memory_parts(SMALL, c, PROMPT)} for c in (CONFIG, config)
    )
    count = 3 * 2 * 128
    assert {
        name: size - without.get(name, 0) for name, size in parts.items() if size != without.get(name)
    } == {
        "adapter's masters": 4 * count,
        "optimizer's moments": 8 * count,
        "whole modules as they were": 4 * count,
        "adapter's gradients": 4 * count,
    }


def test_the_adapter_is_of_the_targets_alone():
    assert weights.num_trained_weights(SMALL, CONFIG.adapter) == 3 * 16 * IN_AND_OUT
    one = dataclasses.replace(CONFIG, adapter=AdapterConfig(rank=4, target_modules=("k_proj",)))
    assert weights.num_trained_weights(SMALL, one.adapter) == 3 * 4 * 192


def test_moments_take_8_bytes_a_weight_or_a_little_over_2():
    assert weights.optimizer_bytes(1000, "adamw") == 8000
    assert weights.optimizer_bytes(1024, "adamw_8bit") == 2 * (1024 + 4 * 4)


def test_the_cache_holds_all_samples_at_once_and_each_prompt_once():
    """A prompt of 40 has 3 pages, 2 of them full; a sample of 100 goes on to position 138: 9 - 2 pages."""
    page = 16 * 2 * 3 * 2 * 32 * 2
    assert op.kv_cache_bytes(SMALL, CONFIG, PROMPT) == (4 * 3 + 8 * 7 + 1) * page
    few = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, max_num_seqs=3))
    assert op.kv_cache_bytes(SMALL, few, PROMPT) == (3 * 3 + 3 * 7 + 1) * page
    kept = dataclasses.replace(few, algo=AlgoConfig(branching="deep"))
    assert op.kv_cache_bytes(SMALL, kept, PROMPT) == (3 * 3 + (8 + 3) * 7 + 1) * page
    partial = dataclasses.replace(CONFIG, rollout=RolloutConfig(partial=True, extra_prompts=2))
    assert op.kv_cache_bytes(SMALL, partial, PROMPT) == (6 * 3 + 12 * 7 + 1) * page
    little = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, kv_cache_gb=1e-4))
    assert op.kv_cache_bytes(SMALL, little, PROMPT) == 1e5
    fp8 = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, kv_cache_dtype="fp8"))
    assert op.kv_cache_bytes(SMALL, fp8, PROMPT) == 69 * 16 * 2 * 3 * 2 * (32 + 4)


def kept_bytes(a, config, rows):
    return activations.kept_bytes(a, form_of(config), config.learn, rows)


def saved_bytes(a, form):
    """Of each layer's row: all layers are alike."""
    ((spec, _),) = counted_specs(a)
    return activations.saved_bytes(a, form, spec)


def layer_bytes(a, config, rows):
    return activations.layer_bytes(a, form_of(config), config.learn, rows)


def activation_bytes(a, config, rows):
    return kept_bytes(a, config, rows) + layer_bytes(a, config, rows)


def test_a_row_of_a_layer():
    """Rows with an adapter's part end at a multiple of 64: 128 + 48, 128 + 16, 128 + 32 and 320 + 16."""
    inputs, gate, attention = 192 + 192 + 192 + 384, 320, 128 + 64 + 64 + 128
    row = 2 * (inputs + gate + attention) + 4 * (2 * 128 + 4)
    assert saved_bytes(SMALL, form_of(CONFIG)) == row
    for format, up in (("nf4", 0), ("bf16", 0), ("fp8-flow", 2 * 320)):
        config = dataclasses.replace(CONFIG, model=ModelConfig(format=format))
        assert saved_bytes(SMALL, form_of(config)) == row + up
    backward = 2 * (3 * 320 + 128) + 4 * 2 * 128
    assert activation_bytes(SMALL, CONFIG, 10) == 10 * (3 * row + backward)
    assert activation_bytes(SMALL, with_learn(gradient_checkpointing="layer"), 10) == 10 * (
        3 * 512 + row + backward
    )
    deep = dataclasses.replace(SMALL, num_layers=9)
    assert activation_bytes(deep, with_learn(gradient_checkpointing="offload"), 10) == 10 * (
        4 * 512 + row + backward
    )


def test_values_without_a_linear_of_their_own_take_what_others_take():
    """Gemma 4's: k_proj's result is both, before the norm and rotation of keys."""
    valueless = dataclasses.replace(SMALL, layer_kinds=(LayerKind(has_values=False),) * 3)
    for rows, mode in ((10, "none"), (100_000, "layer")):
        config = with_learn(gradient_checkpointing=mode)
        assert activation_bytes(valueless, config, rows) == activation_bytes(SMALL, config, rows)


def test_a_long_row_takes_one_chunk_of_the_mlp():
    """Of the row above, attention saves its inputs 192 + 192, q, k, v, o, one fp32 input and the sums."""
    rows, chunk = 100_000, 16_384
    mixed = 2 * (192 + 192 + 2 * 128 + 64 + 64) + 4 * (128 + 4)
    fed = 2 * (192 + 384 + 320) + 4 * 128
    backward = 2 * (3 * 320 + 128) + 4 * 2 * 128
    flash = 33 * 4 * 128 + 2 * (2 * 128 + 128 + 64 + 64)  # 33 sums of 4 heads on 132 SMs
    attention = rows * (mixed + 2 * 4 * 128 + 2 * (128 + 128) + flash)
    offload = with_learn(gradient_checkpointing="offload")
    assert layer_bytes(SMALL, offload, rows) == attention
    assert kept_bytes(SMALL, offload, rows) == rows * 3 * 512
    wide = dataclasses.replace(SMALL, ff_width=320 * 200, num_heads=132, num_kv_heads=1, head_size=1)
    mlp = layer_bytes(wide, offload, rows)
    more = layer_bytes(wide, offload, 2 * rows) - mlp
    assert more < chunk / rows * mlp  # a chunk's share does not grow
    few = layer_bytes(SMALL, offload, chunk)
    assert few == chunk * (mixed + fed + backward)
    dropped = dataclasses.replace(offload, adapter=dataclasses.replace(offload.adapter, dropout=0.1))
    assert layer_bytes(SMALL, dropped, rows) == rows * (mixed + fed + backward)


def test_inputs_on_the_host_are_named_and_not_counted():
    def parts(mode):
        return op.memory_parts(SMALL, with_learn(gradient_checkpointing=mode), PROMPT)

    (host,) = (part for part in parts("offload") if part.when == "on the host")
    assert host.num_bytes == 139 * 3 * 512
    assert op.peak_bytes(parts("offload")) == op.peak_bytes([x for x in parts("offload") if x is not host])
    assert all(part.num_bytes == 0 for part in parts("layer") if part.when == "on the host")


def test_in_fp32_what_is_not_packed_takes_four_bytes():
    config = dataclasses.replace(CONFIG, model=ModelConfig(dtype="fp32"))
    in_bf16, in_fp32 = (
        {p.name: p.num_bytes for p in op.memory_parts(SMALL, c, PROMPT)} for c in (CONFIG, config)
    )
    assert {name for name, size in in_fp32.items() if size == in_bf16[name]} == {
        *(
            "weights",
            "sampler's weights",
            "adapter's masters",
            "optimizer's moments",
            "CUDA",
            "adapter's gradients",
            "layer inputs",
        )
    }
    assert in_fp32["KV cache"] == 2 * in_bf16["KV cache"]
    assert in_fp32["adapter's working copies"] == 8 * weights.num_trained_weights(SMALL, config.adapter)
    assert in_fp32["embedding, head, norms"] - in_bf16["embedding, head, norms"] == 2 * 2 * 1000 * 128
    assert saved_bytes(SMALL, form_of(config)) == 4 * (960 + 320 + 384) + 4 * (2 * 128 + 4)
    assert head_bytes(SMALL, config, 200) == 50 * 1000 * 8 + 200 * 128 * 12
    plain = dataclasses.replace(CONFIG, model=ModelConfig(format="bf16", dtype="fp32"))
    assert unpacked_bytes(SMALL, plain) == 4 * 640 * 192


def test_operands_are_unpacked_one_at_a_time_or_a_layers():
    each = [2 * 256 * 192, 2 * 128 * 192, 2 * 640 * 192, 2 * 128 * 384]
    assert unpacked_bytes(SMALL, CONFIG) == each[2]
    assert unpacked_bytes(SMALL, with_learn(gradient_checkpointing="layer")) == sum(each)
    assert unpacked_bytes(SMALL, dataclasses.replace(CONFIG, model=ModelConfig(format="bf16"))) == 0
    assert operand_cache_bytes(SMALL, CONFIG) == 3 * sum(each)


def test_bf16_weights_have_the_adapters_behind_their_rows():
    """48 columns, 16, 32 and 16, each rounded up to 64."""
    bf16 = dataclasses.replace(CONFIG, model=ModelConfig(format="bf16"))
    columns = 2 * 3 * 64 * (256 + 128 + 640 + 128)
    assert (
        operands.adapter_column_bytes(SMALL, form_of(bf16)) == columns
        and operands.adapter_column_bytes(SMALL, form_of(CONFIG)) == 0
    )
    copies = {part.name: part.num_bytes for part in op.memory_parts(SMALL, bf16, PROMPT)}[
        "adapter's working copies"
    ]
    assert copies == 4 * weights.num_trained_weights(SMALL, bf16.adapter) + columns


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_all_layers_operands_are_cached_where_they_fit_beside_what_learning_takes(recompute):
    config = with_learn(gradient_checkpointing=recompute)
    need = op.learning_bytes(op.memory_parts(SMALL, config, PROMPT)) + operand_cache_bytes(SMALL, config)
    assert op.can_cache_operands(SMALL, config, PROMPT, need / 0.95 + 1)
    assert not op.can_cache_operands(SMALL, config, PROMPT, need / 0.95 - 1)
    for format in ("bf16", "fp8-flow"):
        bare = dataclasses.replace(config, model=ModelConfig(format=format))
        assert not op.can_cache_operands(SMALL, bare, PROMPT, 1e12)


def test_the_command_says_what_caching_operands_takes_where_it_fits(capsys):
    for gpu_gb, fits in ((80, True), (48, False)):
        command(["plan", "qwen2.5-7b", "--gpu-gb", str(gpu_gb), "--learn.gradient-checkpointing", "none"])
        text = capsys.readouterr().out
        assert "fits into" in text and ("up to 13.25 GB" in text) == fits


def test_the_head_takes_a_chunk_of_logits_and_the_rows_in_fp32():
    assert head_bytes(SMALL, CONFIG, 200) == 50 * 1000 * 6 + 200 * 128 * 10
    assert head_bytes(SMALL, CONFIG, 20) == 20 * 1000 * 6 + 20 * 128 * 10


def test_the_head_takes_a_slice_of_a_large_vocabulary():
    """152,064 tokens are 3 slices of 50,688, or 9 of 16,896 with at most 2^26 weights to unpack."""
    large = dataclasses.replace(SMALL, vocab_size=152_064, width=3584)
    packed = dataclasses.replace(CONFIG, model=ModelConfig(head_format="nvfp4"))
    rows = 200 * 3584 * 10
    assert head_bytes(large, CONFIG, 200) == 50 * 50_688 * 6 + rows
    assert head_bytes(large, packed, 200) == 50 * 16_896 * 6 + 2 * 16_896 * 3584 + rows
    jsd = DistilConfig(loss="jsd", teacher="t")
    imitated = dataclasses.replace(CONFIG, distil=jsd, noise=NoiseConfig(schedule="none"))
    assert head_bytes(large, imitated, 200) == 50 * 152_064 * 10 + rows


@pytest.mark.parametrize(
    ("micro_tokens", "updates", "rows"),
    [
        (200, 1, 139),  # two samples of 99 rows do not fit behind a prompt of 40
        (10, 1, 139),
        (237, 1, 139),
        (238, 1, 238),  # a group
        (475, 1, 238),
        (476, 1, 2 * 238),
        (337, 1, 238),
        (100_000, 1, 4 * 238),
        (100_000, 3, 2 * 238),
    ],
)
def test_a_micro_batch_is_as_pack_makes_it(micro_tokens, updates, rows):
    config = with_learn(max_tokens_per_microbatch=micro_tokens, updates_per_step=updates)
    assert microbatch_rows(config, PROMPT) == rows
    prompt = Prompt(index=0, text="", tokens_T=[1] * PROMPT, messages=None, columns={})
    one = Sample(
        tokens_T=[1] * 100, logprobs_T=[0.0] * 100, text="", finish="length", version=0, advantage=1.0
    )
    groups = [Group(prompt=prompt, samples_G=[one] * 2)] * -(-4 // updates)
    batches = pack([(g, [1.0] * 2) for g in groups], max_tokens=micro_tokens, device=torch.device("cpu"))
    assert max(len(batch.tokens_T) for batch in batches) == rows


def test_branches_fill_a_micro_batch_that_samples_alone_would_not():
    """Each of 4 prompts' 2 samples may have a pivot: 4 + 8 groups of 238 rows at most."""
    algo = AlgoConfig(branching="deep", deep=DeepConfig(num_branches=2))
    config = dataclasses.replace(with_learn(max_tokens_per_microbatch=100_000), algo=algo)
    assert microbatch_rows(config, PROMPT) == 12 * 238
    assert (
        microbatch_rows(
            dataclasses.replace(config, learn=with_learn(max_tokens_per_microbatch=2000).learn), PROMPT
        )
        == 8 * 238
    )


@pytest.mark.parametrize("micro_tokens", [25, 24, 9, 4, 26])
def test_a_micro_batch_that_parts_fill_is_as_pack_fills_it(micro_tokens):
    """Those of one size are no larger."""
    config = dataclasses.replace(
        with_learn(max_tokens_per_microbatch=micro_tokens),
        num_generations=8,
        sample=SampleConfig(max_tokens=4),
    )
    prompt = Prompt(index=0, text="", tokens_T=[1] * 2, messages=None, columns={})
    one = Sample(tokens_T=[1] * 4, logprobs_T=[0.0] * 4, text="", finish="length", version=0, advantage=1.0)
    groups = [(Group(prompt=prompt, samples_G=[one] * 8), [1.0] * 8)] * 4
    batches = pack(groups, max_tokens=micro_tokens, device=torch.device("cpu"))
    rows = [sum(part.num_tokens for part in batch) for batch in packing._Filler(micro_tokens, groups).batches]
    assert microbatch_rows(config, 2) == max(rows) >= max(len(batch.tokens_T) for batch in batches)


@pytest.mark.parametrize("recompute", ["none", "layer", "offload"])
def test_the_total_is_the_larger_phase_over_what_is_always_there(recompute):
    config = with_learn(gradient_checkpointing=recompute)
    found = op.memory_parts(SMALL, config, PROMPT)
    phases = {
        when: sum(p.num_bytes for p in found if p.when == when) for when in ("always", "sampling", "learning")
    }
    assert op.peak_bytes(found) == phases["always"] + max(phases["sampling"], phases["learning"])
    assert phases["sampling"] == op.kv_cache_bytes(SMALL, config, PROMPT) + activations.pass_bytes(
        SMALL, form_of(config), config.engine.max_num_batched_tokens
    )
    layers = activation_bytes(SMALL, config, 139) + unpacked_bytes(SMALL, config)
    kept = 3 * saved_bytes(SMALL, form_of(config)) if recompute == "none" else 3 * 512
    gradients = 4 * weights.num_trained_weights(SMALL, config.adapter)
    assert phases["learning"] == gradients + max(layers, 139 * kept + head_bytes(SMALL, config, 139))


def test_auto_is_the_least_recomputation_that_learning_fits_with():
    def learning(recompute):
        found = op.memory_parts(SMALL, with_learn(gradient_checkpointing=recompute), PROMPT)
        return sum(p.num_bytes for p in found if p.when in ("always", "learning"))

    needs = [learning(recompute) for recompute in ("none", "layer", "offload")]
    assert needs == sorted(needs, reverse=True) and needs[0] > needs[1]
    auto = with_learn(gradient_checkpointing="auto")

    def taken(gpu_bytes):
        return op.resolve_checkpointing(SMALL, auto, PROMPT, gpu_bytes)

    assert taken(needs[0] / 0.95 + 1) == with_learn(gradient_checkpointing="none")
    assert (
        taken(needs[0] / 0.95 - 1) == taken(needs[1] / 0.95 + 1) == with_learn(gradient_checkpointing="layer")
    )
    assert taken(needs[1] / 0.95 - 1) == taken(1e3) == with_learn(gradient_checkpointing="offload")
    assert op.resolve_checkpointing(SMALL, CONFIG, PROMPT, 1e3) == CONFIG  # a choice that was made stays


def test_autos_choice_does_not_depend_on_what_the_cache_wants():
    auto = with_learn(gradient_checkpointing="auto")
    many = dataclasses.replace(auto, num_prompts=512, engine=EngineConfig(block_size=16, max_num_seqs=1024))
    found = op.memory_parts(SMALL, op.resolve_checkpointing(SMALL, many, PROMPT, 0.64e9), PROMPT)
    assert op.peak_bytes(found) > 0.64e9 > op.learning_bytes(found)
    assert op.resolve_checkpointing(SMALL, many, PROMPT, 0.64e9).learn.gradient_checkpointing == "none"


MEASURED = [  # H200, 2026-11-21: the most at once in a step of 64 samples of 2,048 tokens, recompute layer
    {"shape": "qwen2.5-7b", "kv": "bf16", "kv_gb": 7.2, "micro_tokens": 8192, "peak_gb": 15.19},
    {"shape": "qwen2.5-32b", "kv": "fp8", "kv_gb": 10.76, "micro_tokens": 4350, "peak_gb": 37.0},
]
ROWS = [row for row in read_rows(ROOT / RESULTS) if row["bench"] == "memory" and "error" not in row]


@pytest.mark.parametrize("row", [*MEASURED, *ROWS], ids=lambda row: f"{row['shape']} {row['peak_gb']} GB")
def test_what_was_measured_is_within_a_tenth_of_the_plan(row):
    """Peaks lack what CUDA itself takes. Under a cap a cache of no given size is fitted to it."""
    names = {field.name for field in dataclasses.fields(BenchStepOptions)} & row.keys()
    options = dataclasses.replace(
        BenchStepOptions(batches=(64,), max_tokens=2048, recompute="layer"),
        **{name: row[name] for name in names - {"steps"}},
        **({"batches": (row["batch"],)} if "batch" in row else {}),
    )
    config = run_config(next(cases("memory", options, row.get("provider", "qerl-nvfp4"))))
    planned_gb = op.peak_bytes(op.memory_parts(shape(options.shape), config, options.prompt_tokens)) / 1e9
    planned_gb = min(planned_gb - op.CONTEXT_BYTES / 1e9, row.get("cap_gb") or math.inf)
    assert abs(planned_gb - row["peak_gb"]) < 0.1 * row["peak_gb"]


def test_the_largest_fits_and_one_more_does_not():
    limit = 0.611e9 / op.USABLE_SHARE
    most = report.largest_settings(SMALL, CONFIG, PROMPT, limit)
    assert 0 < most.num_prompts < 2048 and 100 < most.max_tokens < 472 and 16 < most.rank < 1024

    def need(count, tokens, rank):
        running = max(count * 2, op.planned_rows(CONFIG))
        config = dataclasses.replace(
            CONFIG,
            num_prompts=count,
            sample=SampleConfig(max_tokens=tokens),
            adapter=AdapterConfig(rank=rank),
            engine=dataclasses.replace(CONFIG.engine, max_num_seqs=running),
        )
        return op.peak_bytes(op.memory_parts(SMALL, config, PROMPT))

    for just, over in (
        ((most.num_prompts, 100, 16), (most.num_prompts + 1, 100, 16)),
        ((4, most.max_tokens, 16), (4, most.max_tokens + 1, 16)),
        ((4, 100, most.rank), (4, 100, most.rank + 16)),
    ):
        assert need(*just) <= op.USABLE_SHARE * limit < need(*over)
    assert report.largest_settings(SMALL, CONFIG, PROMPT, 1e6) == report.LargestSettings(
        num_prompts=0, max_tokens=0, rank=0
    )


@pytest.mark.parametrize(("model", "gpu_gb"), [("qwen2.5-7b", 24), ("qwen2.5-32b", 40)])
def test_what_it_says_would_fit_does(capsys, model, gpu_gb):
    as_it_was = ["--learn.gradient-checkpointing", "none"]
    with pytest.raises(SystemExit) as ended:
        command(["plan", model, "--gpu-gb", str(gpu_gb), *as_it_was])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    found = re.findall(r"^  (--.*?) +([\d.]+) GB, \d+ samples? at once$", text, flags=re.M)
    assert found
    for options, gb in found:
        command(["plan", model, "--gpu-gb", str(gpu_gb), *as_it_was, *options.split()])
        assert re.search(rf"peak +{gb} GB   fits into", capsys.readouterr().out), options
    sets = [set(zip(*[iter(options.split())] * 2, strict=True)) for options, _ in found]
    assert not any(one < other for one in sets for other in sets)


@pytest.mark.parametrize(("gpu_gb", "taken"), [(80, "none"), (24, "layer")])
def test_the_command_says_what_auto_takes(capsys, gpu_gb, taken):
    command(["plan", "qwen2.5-7b", "--gpu-gb", str(gpu_gb)])
    text = capsys.readouterr().out
    assert f"learn.gradient_checkpointing {taken} (auto)" in text and f"fits into {gpu_gb} GB" in text
    command(["plan", "qwen2.5-7b", "--gpu-gb", str(gpu_gb), "--learn.gradient-checkpointing", taken])
    same, _, _ = text.replace(" (auto)", "").partition("largest batch")  # which auto may recompute for
    assert capsys.readouterr().out.startswith(same)


def test_the_page_shows_what_the_command_prints(capsys):
    command(["plan", "qwen2.5-7b", "--gpu", "rtx-4090"])
    printed = "".join(f"    {line}".rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert printed in (ROOT / "docs" / "hardware.md").read_text()


def test_samples_are_not_longer_on_the_mean_than_at_most():
    with pytest.raises(UserError, match=r"mean_tokens must not exceed sample\.max_tokens \(1024\), got 1025"):
        command(["plan", "qwen2.5-7b", "--gpu-gb", "80", "--mean-tokens", "1025"])


def test_it_says_so_where_nothing_helps(capsys):
    with pytest.raises(SystemExit, match=r"^1$"):
        command(["plan", "qwen2.5-72b", "--gpu-gb", "24"])
    assert "does not fit even with offload" in capsys.readouterr().out


def test_the_command_prints_parts_that_add_up(capsys):
    options = ["--num-prompts", "8", "--sample.max-tokens", "2048", "--learn.gradient-checkpointing", "layer"]
    command(["plan", "qwen2.5-7b", "--gpu-gb", "80", *options])
    text = capsys.readouterr().out
    rows = re.findall(r"([\d.]+) GB   (always|sampling|learning|fits)", text)
    sums = {when: sum(float(gb) for gb, name in rows if name == when) for _, when in rows}
    assert sums["fits"] == pytest.approx(sums["always"] + max(sums["sampling"], sums["learning"]), abs=0.06)
    assert "64 samples of up to 2048 tokens" in text and "fits into 80 GB" in text
    assert "  3.68 GB" in text  # 6.53e9 weights of 4.5 bits
    assert "sampler's weights" not in text  # there are none of its own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs one model"),
        (["qwen2.5-7b", "--gpu-gb", "24", "--model", "qwen2.5-3b"], "plan qwen2.5-7b names the model"),
        (["qwen2.5-9b", "--gpu-gb", "24"], "no shape; did you mean .*qwen2.5-7b"),
        (["qwen2.5-7b", "--gpu-gb", "-1"], "gpu_gb must be positive"),
        (["smollm2-135m", "--gpu-gb", "8", "--sample.max-tokens", "9000"], "8192 positions"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        command(["plan", *arguments])


def test_calibration_needs_the_bf16_model_once():
    config = dataclasses.replace(RunConfig(), model=ModelConfig(calibrate="gptq"))
    for gpu_gb, fits in ((40, True), (24, False)):
        text, does_fit = report.format_plan("qwen2.5-7b", config, gpu_gb=gpu_gb, prompt_tokens=64)
        assert ("fits into" in text) == does_fit == fits, text
        assert "calibration in BF16" in text and "before training" in text
    assert "calibration" not in report.format_plan("qwen2.5-7b", RunConfig(), gpu_gb=24, prompt_tokens=64)[0]


@pytest.mark.parametrize(
    ("size", "peak_gb"), [("7b", 39.3), ("1.5b", 12.0), ("0.5b", 5.9)]
)  # benchmarks/results/calibration, without CUDA's own memory; heads that are not tied
def test_calibration_is_planned_as_an_h200_measured_it(size, peak_gb):
    a = dataclasses.replace(read_architecture(f"qwen2.5-{size}"), tied_head=False)
    assert calibration_bytes(a, "nvfp4", 150.1e9) / 1e9 == pytest.approx(peak_gb, rel=0.05)


def test_a_recipe_is_planned_with_the_short_options_of_a_run(capsys):
    command(["plan", "gsm8k_small", "--gpu-gb", "12", "--model", "qwen2.5-1.5b", "--reward", "r.py:f"])
    assert "qwen2.5-1.5b in nvfp4, 512 samples" in capsys.readouterr().out


def test_a_plan_whose_calibration_is_too_large_names_the_run_without_it(capsys):
    """The command exits with 1 where nothing fits, else prints what does."""
    with pytest.raises(SystemExit):
        command(["plan", "qwen2.5-7b", "--gpu", "rtx-4090", "--model.calibrate", "gptq"])
    text = capsys.readouterr().out
    assert "does not fit into 25.2 GB" in text and re.search(r"--model.calibrate none +16\.\d+ GB", text)


def test_samples_that_do_not_all_fit_at_once_are_planned_as_a_run_samples_them(capsys):
    long = ["plan", "qwen3-8b", "--sample.max-tokens", "4096"]
    command([*long, "--gpu", "NVIDIA GeForce RTX 4090"])
    text = capsys.readouterr().out
    (at_once,) = re.findall(r"takes what is free, for (\d+) of 128 samples", text)
    assert "fits into 25.2 GB" in text and 10 < int(at_once) < 30
    choices = dict(re.findall(r"^  (\S.*?) {2,}(\d+) samples at once, [\d.]+ h for 100 steps$", text, re.M))
    assert choices.pop("as it is") == at_once and choices
    for options, more in choices.items():
        assert int(more) > int(at_once)
        command([*long, "--gpu", "rtx-4090", *options.split()])
        assert f"for {more} of 128 samples" in capsys.readouterr().out
    command([*long, "--gpu", "h200"])
    assert "takes what is free" not in capsys.readouterr().out


def test_a_cache_for_less_than_one_sample_does_not_fit():
    a, config = shape("qwen3-8b"), RunConfig(sample=SampleConfig(max_tokens=30_000))
    for gpu_gb, is_limited in ((9.0, False), (20.0, True), (2000.0, False)):
        free = op.with_free_cache(a, config, 256, gpu_gb * 1e9)
        assert (free.engine.kv_cache_gb is not None) == is_limited
    free = op.with_free_cache(a, config, 256, 40e9)
    samples, limit = op.resident_samples(a, free, 256), free.engine.kv_cache_gb * 1e9

    def cache_bytes(rows):
        whole = dataclasses.replace(config, engine=EngineConfig(max_num_seqs=rows))
        return op.kv_cache_bytes(a, whole, 256)

    assert cache_bytes(samples) <= limit < cache_bytes(samples + 1)
