"""The speed that `qerl plan` estimates: against the benchmark's rows, and for every GPU in the table."""

import contextlib
import re

import pytest

from benchmarks.rows import read_rows
from qerl.bench.record import RESULTS, ROOT
from qerl.cli.main import command
from qerl.config import AdapterConfig, EngineConfig, LearnConfig, ModelConfig, RunConfig, SampleConfig
from qerl.errors import UserError
from qerl.learner.plan.speed import GPUS, estimate_speed, gpu_named, gpu_of_cuda_name
from qerl.models.random_weights import SHAPES, shape, shape_of_hub_id

FORMATS = {"qerl-nvfp4": "nvfp4", "qerl-mxfp4": "mxfp4", "qerl-bf16": "bf16"}
PROMPT = 256
LAST = {  # the last row of each case
    (
        row["bench"],
        row["shape"],
        row["provider"],
        row.get("batch"),
        row.get("recompute"),
        row.get("kernels"),
        row.get("backward"),
    ): row
    for row in sorted(read_rows(ROOT / RESULTS), key=lambda row: row["date"])
    if row["bench"] in ("decode", "learn")
    and row["provider"] in FORMATS
    and row["lora_rank"] == 32
    and row.get("kv", "bf16") == row.get("head", "bf16") == "bf16"
    and row.get("max_tokens", 1024) == 1024
    and row.get("group_size", 1) == 1
    and not row.get("noise_sigma")
    and row.get("tokens", 8192) == 8192
}


def estimated(gpu: str, row: dict, batch: int = 64, micro_tokens: int | None = None):
    """Two samples share a prompt of twice the length, which is what the cache of the row holds."""
    config = RunConfig(
        num_prompts=batch // 2,
        num_generations=2,
        model=ModelConfig(format=FORMATS[row["provider"]]),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=32),
        sample=SampleConfig(max_tokens=1024),
        engine=EngineConfig(max_num_seqs=batch, kernels=row.get("kernels") or "auto"),
        learn=LearnConfig(
            gradient_checkpointing=row.get("recompute") or "none",
            backward=row.get("backward", "bf16"),
            max_tokens_per_microbatch=micro_tokens,
        ),
    )
    return estimate_speed(GPUS[gpu], shape(row["shape"]), config, prompt_tokens=2 * PROMPT, mean_tokens=1024)


@pytest.mark.parametrize("row", LAST.values(), ids=lambda row: " ".join(map(str, row.values()))[:40])
def test_the_estimate_is_near_what_was_measured(row):
    speed = estimated(row["gpu"].split()[1].lower(), row, row.get("batch", 64))
    rate = speed.sampled_tokens_per_s if row["bench"] == "decode" else speed.learned_tokens_per_s
    assert rate == pytest.approx(row["tok_per_s"], rel=0.15)


SMALL = [
    row
    for row in read_rows(ROOT / RESULTS)
    if row["bench"] == "learn" and row["shape"] in ("qwen2.5-0.5b", "qwen2.5-1.5b")
]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row['shape']} {row['used_micro_tokens']}")
def test_updates_of_small_models_are_not_overestimated_more_than_the_page_says(row):
    """Where the host limits them, with the smallest micro-batches, less."""
    rate = estimated("h100", row, 64, row["used_micro_tokens"]).learned_tokens_per_s
    is_half_b = row["shape"] == "qwen2.5-0.5b"
    most = (1.5 if is_half_b else 1.25) if row["used_micro_tokens"] == 8192 else 2.4 if is_half_b else 1.6
    assert 1 <= rate / row["tok_per_s"] <= most


@pytest.mark.parametrize("recompute", ("none", "layer"))
@pytest.mark.parametrize("gpu", ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
def test_a_backward_pass_in_int8_is_faster_by_what_was_measured(gpu, recompute):
    """Of the same commit and FlashAttention."""
    case = {"bench": "learn", "gpu": gpu, "shape": "qwen2.5-7b", "provider": "qerl-nvfp4"}
    case |= {"tokens": 8192, "recompute": recompute, "flash_attention": 4}
    measured, planned = [], []
    for backward in ("bf16", "int8"):
        wanted = case | {"backward": backward}
        last = [row for row in read_rows(ROOT / RESULTS) if row | wanted == row][-1]
        measured.append(last["tok_per_s"])
        planned.append(estimated("h100", last).learned_tokens_per_s)
    assert planned[1] / planned[0] == pytest.approx(measured[1] / measured[0], rel=0.06)


@pytest.mark.parametrize(
    ("provider", "batch", "measured"),
    [("qerl-nvfp4", 8, 141), ("qerl-nvfp4", 64, 998), ("qerl-bf16", 8, 735), ("qerl-bf16", 64, 3772)],
)
def test_pytorchs_operations_are_near_what_an_h100_made(provider, batch, measured):
    """256 tokens a sample."""
    row = {"provider": provider, "shape": "qwen2.5-7b", "kernels": "torch"}
    assert estimated("h100", row, batch).sampled_tokens_per_s == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("batch", "measured"), [(8, 3398), (32, 8845), (64, 12138), (128, 14282), (256, 15815)]
)
def test_the_portable_kernels_are_near_what_an_h200_made(batch, measured):
    row = {"provider": "qerl-nvfp4", "shape": "qwen2.5-7b", "kernels": "portable"}
    assert estimated("h200", row, batch).sampled_tokens_per_s == pytest.approx(measured, rel=0.03)


def test_a_card_without_wgmma_samples_with_the_portable_kernels():
    row = {"provider": "qerl-nvfp4", "shape": "qwen2.5-7b"}
    rates = {
        kernels: estimated("rtx-4090", row | {"kernels": kernels}).sampled_tokens_per_s
        for kernels in ("auto", "portable", "torch")
    }
    assert rates["auto"] == rates["portable"] > 2 * rates["torch"]
    with pytest.raises(UserError, match="needs a Hopper GPU"):
        estimated("rtx-4090", row | {"kernels": "hopper"})


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx-4060-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx-3080-ti"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_the_names_that_cuda_gives_are_known(cuda_name, name):
    assert gpu_of_cuda_name(cuda_name) is GPUS[name]


@pytest.mark.parametrize(
    "cuda_name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3050 Ti", "Tesla T4"]
)
def test_a_card_with_other_rates_is_not_taken_for_one_of_the_table(cuda_name):
    assert gpu_of_cuda_name(cuda_name) is None


def test_an_unknown_gpu_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"rtx-4091.*did you mean rtx-4090"):
        gpu_named("rtx-4091")


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_has_a_speed(gpu):
    speed = estimated(gpu, {"provider": "qerl-nvfp4", "shape": "qwen3-0.6b"})
    assert speed.sampled_tokens_per_s > 100 and speed.learned_tokens_per_s > 100


@pytest.mark.parametrize("gpu", ["rtx-3060-ti", "h100"])
def test_the_command_finds_a_gpu_by_its_name(capsys, gpu):
    command(["plan", "qwen3-0.6b", "--gpu", gpu, "--engine.kv-cache-gb", "2"])
    text = capsys.readouterr().out
    (rate,) = re.findall(r"sampling ([\d,]+) tokens/s", text)
    assert int(rate.replace(",", "")) > 100 and f"{GPUS[gpu].memory_gb:g} GB" in text


def test_a_recipe_gives_the_model_and_the_settings(capsys):
    command(["plan", "gsm8k", "--gpu", "rtx-4090", "--mean-tokens", "300"])
    text = capsys.readouterr().out
    assert (
        text.startswith("Qwen/Qwen2.5-3B-Instruct in nvfp4, 1024 samples") and "samples of 300 tokens" in text
    )


def test_hub_ids_of_known_shapes_need_no_network():
    ids = {
        "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
        "Qwen/Qwen3-4B-Base": "qwen3-4b",
        "unsloth/Qwen3-8B": "qwen3-8b",
        "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
        "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    }
    assert {name: shape_of_hub_id(name) for name in ids} == ids
    assert set(ids.values()) <= set(SHAPES)


@pytest.mark.parametrize(
    "name", ["someone/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct-1M", "qwen2.5-7b", "Qwen/Qwen9"]
)
def test_other_hub_ids_are_not_guessed(name):
    assert shape_of_hub_id(name) is None


def test_a_margin_of_the_memory_stays_free(capsys):
    layer = "--learn.gradient-checkpointing", "layer", "--engine.kv-cache-gb", "7"
    given = "plan", "qwen2.5-7b", *layer, "--gpu-gb"
    command([*given, "24"])
    (peak,) = re.findall(r"peak +([\d.]+) GB", capsys.readouterr().out)
    for gpu_gb, fits in ((float(peak) / 0.95 + 0.02, True), (float(peak) / 0.95 - 0.02, False)):
        with contextlib.nullcontext() if fits else pytest.raises(SystemExit, match=r"^1$"):
            command([*given, str(gpu_gb)])
        assert ("does not fit" not in capsys.readouterr().out) == fits
