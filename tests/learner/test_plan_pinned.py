"""Numbers that are planned today: a change of one is a decision, and its commit says which is right."""

import dataclasses
import types

import pytest
import torch

from qerl.bench.case import DecodeCase
from qerl.bench.roofline import LIMITS, step_floor_ms
from qerl.config import DeepConfig, EngineConfig, RunConfig
from qerl.cost.cache import page_bytes, slot_bytes
from qerl.cost.operands import operand_cache_bytes
from qerl.cost.weights import num_active_params
from qerl.engine.cache.budget import working_bytes
from qerl.learner.plan import memory as op
from qerl.learner.plan.memory import with_microbatches
from qerl.learner.plan.speed import GPUS, estimate_speed
from qerl.models.random_weights import SHAPES

LONG = {"learn": {"gradient_checkpointing": "offload", "max_tokens_per_microbatch": 60_000}}
CASES = {
    "plain": ("qwen2.5-7b", {}),
    "bf16, recomputed": (
        "qwen2.5-7b",
        {"model": {"format": "bf16"}, "learn": {"gradient_checkpointing": "layer"}},
    ),
    "nf4, int8 backwards": (
        "qwen2.5-32b",
        {"model": {"format": "nf4"}, "learn": {"gradient_checkpointing": "layer", "backward": "int8"}},
    ),
    "fp8-flow, nothing recomputed": (
        "llama-3.1-8b",
        {"model": {"format": "fp8-flow"}, "learn": {"gradient_checkpointing": "none"}},
    ),
    "mxfp4 in fp32": ("qwen3-8b", {"model": {"format": "mxfp4", "dtype": "fp32"}}),
    "full weights": ("smollm2-135m", {"model": {"format": "bf16"}, "adapter": {"kind": "full"}}),
    "hybrid, packed head": ("qwen3.5-9b", {"model": {"head_format": "nvfp4"}}),
    "mixture with windows": (
        "gpt-oss-20b",
        {
            "model": {"format": "mxfp4"},
            "adapter": {"experts": "per_expert", "router": True},
            "engine": {"kv_cache_dtype": "fp8"},
        },
    ),
    "mixture, shared A, PyTorch's operations": (
        "qwen3-30b-a3b",
        {"adapter": {"experts": "shared_a"}, "engine": {"kernels": "torch"}},
    ),
    "large mixture, exact": (
        "gpt-oss-120b",
        {
            "model": {"format": "mxfp4"},
            "engine": {"exact": True},
            "learn": {"gradient_checkpointing": "offload", "optim": "adamw_8bit"},
        },
    ),
    "long rows": ("qwen2.5-7b", LONG | {"sample": {"max_tokens": 7000}}),
    "branches, noise of groups": (
        "qwen2.5-1.5b",
        {"algo": {"branching": "deep", "deep": DeepConfig(num_branches=4)}, "noise": {"scope": "group"}},
    ),
    "partial, FlashRL": (
        "qwen2.5-3b",
        {
            "model": {"format": "bf16", "sampler_format": "fp8"},
            "rollout": {"partial": True, "extra_prompts": 4},
            "engine": {"kv_cache_gb": 2.0},
        },
    ),
    "teacher": (
        "qwen2.5-7b",
        {
            "distil": {"teacher": "gpt-oss-20b", "format": "mxfp4", "loss": "jsd"},
            "noise": {"schedule": "none"},
        },
    ),
}

DECODED = (
    {"provider": "qerl-nvfp4", "lora_rank": 32, "kv": "bf16", "head": "bf16", "batch": 8},
    {"provider": "qerl-mxfp4", "lora_rank": 0, "kv": "fp8", "head": "nvfp4", "batch": 64},
    {"provider": "qerl-bf16", "lora_rank": 32, "kv": "fp8", "head": "fp8", "batch": 512},
)


def planned(name):
    """Return the bytes of each part with 24 GB, the speed of an H100, and of a GPU of 150 GB the tokens and
    rows of a micro-batch, what learning takes and what operands take."""
    shape, changes = CASES[name]
    plain = RunConfig(num_prompts=8, num_generations=8)
    sections = {name: dataclasses.replace(getattr(plain, name), **fields) for name, fields in changes.items()}
    a, asked = SHAPES[shape], dataclasses.replace(plain, **sections)
    config = op.resolve_checkpointing(a, asked, 256, 24e9)
    parts = [round(part.num_bytes) for part in op.memory_parts(a, config, 256)]
    speed = estimate_speed(GPUS["h100"], a, config, prompt_tokens=256, mean_tokens=300)
    speeds = [round(figure, 3) for figure in dataclasses.astuple(speed)]
    large = with_microbatches(a, op.resolve_checkpointing(a, asked, 256, 150e9), 256, 150e9)
    rows = op.full_rows(large, 256)
    learning = op.learning_bytes(op.memory_parts(a, large, 256, rows))
    operands = operand_cache_bytes(a, op.form_of(large), large.learn)
    sizes = [large.learn.max_tokens_per_microbatch, rows, learning, operands]
    return [*parts, *speeds, *map(round, sizes)]


def counted(name):
    """Return what the roofline, the learner's benchmark and the cache count of a shape."""
    a, limit = SHAPES[name], LIMITS["NVIDIA H200"]
    case = DecodeCase(
        shape=name,
        group_size=4,
        prompt_tokens=256,
        max_tokens=1024,
        kernels="auto",
        noise_sigma=0.0,
        **DECODED[0],
    )
    floors = [
        round(step_floor_ms(limit, a, dataclasses.replace(case, **settings)), 6) for settings in DECODED
    ]
    pages = [page_bytes(a, 16, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    prefill = working_bytes(EngineConfig(), types.SimpleNamespace(architecture=a, device=torch.device("cpu")))
    return [*floors, num_active_params(a), *pages, slot_bytes(a, torch.bfloat16), prefill]


PLANNED = {
    "plain": """
        3_676_295_168 0 2_181_609_472 322_961_408 322_961_408 645_922_816 3_876_454_400 600_000_000
        934_936_576 322_961_408 3_080_003_584 2_718_097_264 0
        14148.772 12309.545 3.083
        16_384 16_384 76_440_522_240 13_245_087_744
    """,
    "bf16, recomputed": """
        13_050_834_944 0 2_181_609_472 322_961_408 517_472_256 645_922_816 3_876_454_400 600_000_000
        658_505_728 322_961_408 3_080_003_584 2_245_058_416 0
        8532.935 12309.545 3.976
        16_384 16_384 29_012_258_304 0
    """,
    "nf4, int8 backwards": """
        17_572_691_968 0 3_119_534_080 1_073_741_824 1_073_741_824 2_147_483_648 17_720_934_400
        600_000_000 1_537_998_848 1_073_741_824 10_057_154_560 4_952_187_424 0
        3603.803 3238.102 11.89
        8_192 8_192 42_599_290_368 112_390_569_984
    """,
    "fp8-flow, nothing recomputed": """
        6_986_530_816 0 2_103_459_840 335_544_320 335_544_320 671_088_640 8_860_467_200 600_000_000
        825_753_600 335_544_320 40_417_189_888 992_837_632 0
        10536.868 15023.469 3.236
        16_384 16_384 99_518_875_136 0
    """,
    "mxfp4 in fp32": """
        3_912_597_504 0 4_981_051_392 349_175_808 698_351_616 698_351_616 19_936_051_200 600_000_000
        1_281_359_872 349_175_808 4_525_719_552 3_999_807_872 0
        11942.024 11499.852 3.455
        8_192 8_192 79_253_313_024 28_198_305_792
    """,
    "full weights": """
        212_336_640 0 56_901_888 424_673_280 0 849_346_560 1_557_504_000 600_000_000 97_517_568
        424_673_280 3_985_970_040 346_186_368 0
        57819.386 36538.095 0.914
        65_536 65_536 37_594_040_064 0
    """,
    "hybrid, packed head": """
        3_897_366_528 0 2_611_660_800 232_783_872 232_783_872 465_567_744 5_975_441_408 600_000_000
        1_916_796_928 232_783_872 4_022_861_824 3_209_065_856 0
        8845.471 10967.255 4.108
        16_384 16_384 126_026_982_912 13_979_615_232
    """,
    "mixture with windows": """
        12_121_270_272 0 2_317_657_344 249_593_856 161_120_256 499_187_712 1_063_085_568 600_000_000
        2_865_889_280 249_593_856 2_139_109_632 2_597_522_064 0
        9389.184 14873.918 3.473
        16_384 16_384 90_413_617_920 8_847_360
    """,
    "mixture, shared A, PyTorch's operations": """
        16_931_733_504 0 1_246_289_920 461_438_976 284_196_864 922_877_952 6_671_308_800 600_000_000
        2_552_233_984 461_438_976 322_143_232 2_157_579_040 3_017_146_368
        84.047 11964.089 230.22
        16_384 16_384 141_211_100_672 1_937_768_448
    """,
    "large mixture, exact": """
        66_992_804_352 0 2_318_213_376 95_551_488 95_551_488 48_522_240 4_993_747_200 600_000_000
        2_865_889_280 95_551_488 380_089_728 2_159_609_616 3_182_146_560
        2800.787 8000.281 9.511
        16_384 16_384 75_366_161_664 53_084_160
    """,
    "long rows": """
        3_676_295_168 0 2_181_609_472 322_961_408 322_961_408 645_922_816 25_837_830_144 600_000_000
        934_936_576 322_961_408 3_225_485_312 10_810_971_264 22_578_397_184
        14148.772 12309.545 3.083
        60_000 60_000 23_013_910_528 13_245_087_744
    """,
    "branches, noise of groups": """
        739_680_256 0 470_194_176 147_718_144 147_718_144 295_436_288 3_817_275_392 600_000_000
        508_231_680 147_718_144 14_007_828_800 587_701_760 0
        36182.266 39147.959 1.073
        32_768 32_768 64_691_994_112 2_710_306_816
    """,
    "partial, FlashRL": """
        5_549_248_512 2_779_522_560 623_517_696 239_468_544 383_385_600 478_937_088 2_000_000_000
        600_000_000 379_584_512 239_468_544 2_262_859_776 1_297_903_296 0
        20210.43 16395.299 2.246
        16_384 16_384 61_044_841_472 0
    """,
    "teacher": """
        3_676_295_168 0 2_181_609_472 322_961_408 322_961_408 645_922_816 3_876_454_400 600_000_000
        934_936_576 14_438_927_616 0 3_351_574_656 322_961_408 440_000_512 2_718_097_264 3_080_003_584
        14148.772 12309.545 3.083
        16_384 16_384 90_879_449_856 13_245_087_744
    """,
}
COUNTED = {
    "qwen2.5-7b": """
        1.152487 1.145565 9.269178
        7_070_285_824 917_504 473_088 0 1_321_336_832
    """,
    "qwen3.5-9b": """
        1.572041 2.543336 16.134865
        7_935_623_168 524_288 266_240 51_511_296 2_198_470_656
    """,
    "gpt-oss-20b": """
        2.166879 2.813455 10.523983
        3_607_142_400 787_968 419_328 0 3_649_814_528
    """,
    "qwen3-30b-a3b": """
        1.831121 3.921629 16.595421
        3_041_656_832 1_579_008 817_152 0 3_599_859_712
    """,
}


def numbers(text):
    return [float(word) for word in text.split()]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_the_numbers_that_it_had(name):
    assert planned(name) == numbers(PLANNED[name])


@pytest.mark.parametrize("name", COUNTED)
def test_a_shape_has_the_counts_that_it_had(name):
    assert counted(name) == numbers(COUNTED[name])
