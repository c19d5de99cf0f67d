"""A mixture of experts in the plan, by hand: sums are written out, not computed the same way."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from learner.test_plan import CONFIG, SMALL, kept_bytes, operand_cache_bytes, unpacked_bytes
from qerl.cli.main import command
from qerl.config import AdapterConfig, ModelConfig
from qerl.cost import activations, weights
from qerl.cost.form import ModelForm
from qerl.cost.operands import unpacked_expert_bytes
from qerl.kernels.experts.expert_product import BUFFER_BYTES
from qerl.learner.plan import memory as op
from qerl.learner.plan.speed import GPUS, estimate_speed
from qerl.models.architecture import LayerKind, Mixture
from qerl.models.layer_spec import counted_specs
from qerl.models.peft.adapter import adapter_tensors
from qerl.models.random_weights import SHAPES, random_decoder

MIXTURES = Path(__file__).parents[2] / "docs" / "models.md"
PROMPT = 40
EXPERTS = Mixture(num_experts=8, num_chosen=2, width=64, softmax_over="chosen", stored="separate")
MIXED = dataclasses.replace(
    SMALL,
    family="Qwen3MoeForCausalLM",
    qkv_bias=False,
    qk_norm=True,
    layer_kinds=(LayerKind(mlp="experts"),) * 3,
    mixture=EXPERTS,
)
CLAMPED = dataclasses.replace(
    MIXED, mixture=dataclasses.replace(EXPERTS, has_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0)
)
ATTENTION, ATTENTION_OUTPUTS = 128 * 128 + 64 * 128 + 64 * 128 + 128 * 128, 128 + 64 + 64 + 128
GATE_UP, DOWN = 8 * 128 * 128, 8 * 128 * 64
ROUTER = 2 * 8 * 128  # in BF16


def with_experts(kind, rank=4, **changes):
    adapter = AdapterConfig(rank=16, experts=kind, expert_rank=rank, **changes)
    return dataclasses.replace(CONFIG, adapter=adapter)


def saved_bytes(a, kind):
    ((spec, _),) = counted_specs(a)
    return activations.saved_bytes(a, op.form_of(with_experts(kind)), spec)


def test_weights_of_other_formats_take_the_bytes_of_their_format():
    outputs = 4 * ATTENTION_OUTPUTS + 2 * 4 * 8
    packed = (ATTENTION * 0.5625 + (GATE_UP + DOWN) * 0.515869140625) + outputs
    assert weights.weight_bytes(MIXED, "nf4") == 3 * (packed + ROUTER)
    biases = 2 * 8 * (128 + 128) + 4 * 8  # of experts in 16 bits, of the router in 32
    assert weights.weight_bytes(CLAMPED, "nf4") == 3 * (packed + ROUTER + biases)


def test_tiles_of_experts_take_two_factors_for_each_output_of_mxfp4():
    packed = (ATTENTION + GATE_UP + DOWN) * 0.5625 + 4 * ATTENTION_OUTPUTS
    outputs = 8 * (128 + 128)
    assert weights.weight_bytes(MIXED, "mxfp4") == 3 * (packed + ROUTER + 2 * 4 * outputs)
    assert weights.weight_bytes(MIXED, "nvfp4") == 3 * (packed + ROUTER + 4 * outputs + 2 * 4 * 8)
    biases = (2 + 4) * outputs + 4 * 8  # of experts as loaded and for decode steps, of the router
    assert weights.weight_bytes(CLAMPED, "mxfp4") == 3 * (packed + ROUTER + 2 * 4 * outputs + biases)


@pytest.mark.parametrize("kind", ["per_expert", "shared_a", "shared_b"])
def test_the_adapters_of_experts_are_those_that_a_decoder_gets(kind):
    num_a, num_b = 1 if kind == "shared_a" else 8, 1 if kind == "shared_b" else 8
    of_experts = 4 * (num_a * (128 + 64) + num_b * (128 + 128))
    attention = 16 * (256 + 192 + 192 + 256)
    assert weights.num_trained_weights(MIXED, with_experts("none").adapter) == 3 * attention
    assert weights.num_trained_weights(MIXED, with_experts(kind).adapter) == 3 * (attention + of_experts)
    routed = with_experts(kind, router=True)
    assert weights.num_trained_weights(MIXED, routed.adapter) == 3 * (attention + of_experts + 16 * (8 + 128))
    decoder = random_decoder(
        MIXED, format="nvfp4", rank=16, device=torch.device("cpu"), seed=0, expert_rank=4
    )
    made = sum(m.numel() for m in adapter_tensors(decoder).values())
    assert made == weights.num_trained_weights(MIXED, with_experts("per_expert").adapter)


def test_decode_steps_read_the_working_copies_of_experts_adapters_themselves():
    """Those of attention are stacked for its kernels: a second copy."""
    config = dataclasses.replace(with_experts("per_expert"), model=ModelConfig(format="nvfp4"))
    parts = {part.name: part.num_bytes for part in op.memory_parts(MIXED, config, PROMPT)}
    experts, attention = 4 * 8 * (128 + 64 + 128 + 128), 16 * (256 + 192 + 192 + 256)
    assert parts["adapter's working copies"] == 3 * (2 * experts + 4 * attention)
    assert parts["adapter's masters"] == 3 * 4 * (experts + attention)


def test_experts_are_unpacked_into_a_buffer_or_one_at_a_time():
    def unpacked(a, format, dtype="bf16"):
        model = ModelConfig(format=format, dtype=dtype)
        return unpacked_expert_bytes(a, ModelForm.of(model, AdapterConfig()))

    assert unpacked(MIXED, "nvfp4") == 2 * GATE_UP  # all 8 fit into the buffer
    large = SHAPES["gpt-oss-120b"]
    one = 2 * 5760 * 2880
    assert unpacked(large, "mxfp4") == BUFFER_BYTES // one * one
    assert unpacked(large, "bf16") == 0
    assert unpacked(large, "mxfp4", "fp32") == 2 * one


def test_operands_of_layers_that_are_recomputed_and_some_experts_are_unpacked_at_once():
    groups = [2 * 256 * 192, 2 * 128 * 192, 4 * 8 * 128]  # q|k|v and o with an adapter, the router in fp32
    experts = 2 * GATE_UP
    assert unpacked_bytes(MIXED, with_experts("none")) == experts
    learn = dataclasses.replace(CONFIG.learn, gradient_checkpointing="layer")
    layered = dataclasses.replace(with_experts("none"), learn=learn)
    assert unpacked_bytes(MIXED, layered) == sum(groups) + experts
    assert operand_cache_bytes(MIXED, layered) == 3 * sum(groups)


def test_a_row_saves_what_its_experts_save():
    """Count for each chosen expert: gate and up, y and its weight; x and h for adapters. Ids and two orders
    of all three layers are kept throughout the pass."""
    attention = 2 * (192 + 192 + 128 + 64 + 64 + 128) + 4 * (2 * 128 + 4)
    each = 2 * (2 * 64 + 128) + 4
    kept = kept_bytes(MIXED, with_experts("none"), 1) - 3 * saved_bytes(MIXED, "none")
    assert kept == 3 * 2 * (8 + 16)
    assert saved_bytes(MIXED, "none") == attention + 2 * each + 4 * 8
    adapted = each + 2 * (128 + 64)
    assert saved_bytes(MIXED, "shared_a") == attention + 2 * adapted + 4 * 8
    assert saved_bytes(CLAMPED, "none") == attention + 2 * each + 4 * 8


def test_only_active_experts_are_multiplied_and_only_touched_ones_are_read():
    assert weights.num_active_expert_params(MIXED) == 3 * 2 * (128 * 128 + 128 * 64)
    assert weights.experts_read(MIXED, 1) == pytest.approx(8 * 2 / 8)
    assert weights.experts_read(MIXED, 3) == pytest.approx(8 * (1 - 0.75**3))
    assert weights.experts_read(MIXED, 2) == pytest.approx(8 * (1 - 0.75**2))
    large = SHAPES["gpt-oss-120b"]
    active = weights.num_active_expert_params(large) + 36 * (4096 + 2 * 512) * 2880 + 36 * 4096 * 2880
    assert active + 36 * 128 * 2880 + 201_088 * 2880 == pytest.approx(5.1e9, rel=0.02)  # of 117 billion


def test_few_samples_of_a_mixture_are_faster_than_a_dense_model_of_its_size():
    """At 8 rows gpt-oss-120b reads a fifth of its experts: 1 - (1 - 4 / 128)^8."""
    a, config = SHAPES["gpt-oss-120b"], dataclasses.replace(CONFIG, model=ModelConfig(format="mxfp4"))
    config = dataclasses.replace(config, num_prompts=4, num_generations=2)
    assert a.mixture is not None
    all_read = dataclasses.replace(a, mixture=dataclasses.replace(a.mixture, num_chosen=128))
    few, many = (
        estimate_speed(GPUS["h200"], each, config, prompt_tokens=256, mean_tokens=1024)
        for each in (a, all_read)
    )
    assert few.sampled_tokens_per_s > 3 * many.sampled_tokens_per_s
    assert few.learned_tokens_per_s > many.learned_tokens_per_s  # less so: both wait for the host
    by_torch = dataclasses.replace(config, engine=dataclasses.replace(config.engine, kernels="torch"))
    plain = estimate_speed(GPUS["h200"], a, by_torch, prompt_tokens=256, mean_tokens=1024)
    assert plain.sampled_tokens_per_s < few.sampled_tokens_per_s / 5  # expert by expert


BASE = ["--num-prompts", "1", "--learn.gradient-checkpointing", "layer", "--engine.max-num-batched-tokens"]
BASE += ["512", "--adapter.experts", "per_expert", "--adapter.expert-rank", "4"]


@pytest.mark.parametrize(
    ("shape", "format", "samples", "max_tokens", "micro", "below_gb"),
    [
        ("gpt-oss-120b", "mxfp4", 8, 2048, 2560, 80),
        ("gpt-oss-20b", "mxfp4", 8, 1024, 1280, 17.5),
        ("qwen3-30b-a3b", "nvfp4", 32, 2048, 2560, 32),
    ],
)
def test_the_command_plans_whole_steps_of_real_mixtures(
    capsys, shape, format, samples, max_tokens, micro, below_gb
):
    sizes = {"num-generations": samples, "sample.max-tokens": max_tokens, "model.format": format}
    sizes |= {"learn.max-tokens-per-microbatch": micro}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command(["plan", shape, "--gpu", "h100", *options, *BASE])
    text = capsys.readouterr().out
    (peak,) = (line for line in text.splitlines() if line.startswith("peak"))
    assert "experts of rank 4" in text and 0.7 * below_gb < float(peak.split()[1]) < below_gb, text


@pytest.mark.parametrize(
    ("shape", "max_tokens", "below_gb"), [("gpt-oss-20b", 1024, 16), ("gpt-oss-120b", 2048, 74)]
)
def test_a_head_in_nvfp4_is_planned_for_gpt_oss(capsys, shape, max_tokens, below_gb):
    """The page of mixtures has these: saved inputs on the host and 8-bit moments besides."""
    options = [*BASE, "--num-generations", "8", "--sample.max-tokens", str(max_tokens)]
    options += ["--learn.max-tokens-per-microbatch", str(max_tokens + 256), "--model.format", "mxfp4"]
    options += ["--learn.gradient-checkpointing", "offload", "--learn.optim", "adamw_8bit"]
    peaks = []
    for head in ("bf16", "nvfp4"):
        command(["plan", shape, "--gpu", "h100", *options, "--model.head-format", head])
        (peak,) = re.findall(r"^peak +([\d.]+) GB", capsys.readouterr().out, flags=re.M)
        peaks.append(float(peak))
    assert peaks[1] < below_gb and f"{peaks[0]:.1f} GB | {peaks[1]:.1f} GB |" in MIXTURES.read_text()
