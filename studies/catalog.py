"""Definitions of the studies: the claims of QeRL (arXiv 2510.11696) that one small model can test.

entropy   does quantization raise the entropy of an untrained policy, or does any noise of that size?
growth    does reward grow faster with quantization and AQN?
noise     noise schedule, size, place (sampler or both) and importance correction
rank      LoRA rank and learning rate, BF16 against NVFP4
methods   losses, corrections and advantages at one budget (catalog_methods.py)

Those of real models on a GPU are in catalog_real.py, catalog_real_more.py and catalog_agents.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.config import EvalConfig
from studies.catalog_agents import agents
from studies.catalog_methods import methods
from studies.catalog_real import REAL_STUDIES
from studies.catalog_real_more import MORE_STUDIES
from studies.common import (
    AQN,
    BASE,
    ONE_MODEL,
    SHARED_SEED,
    TASKS,
    TRAINING_CURVES,
    TRAINING_METRICS,
    claim,
)
from studies.study import Arm, Curve, Fields, Metric, Study, with_fields
from studies.training import train_job
from studies.untrained import measure_untrained

_TEN = tuple(range(10))
_FIRST_LOOK = 5
"""Seeds that were run and read before the other five were added: growth, noise and rank."""
_RATES = (1e-4, 3e-4, 1e-3)
_FULL_RATES = (1e-5, 3e-5, 1e-4)
"""Full fine-tuning takes a tenth of an adapter's rates."""


_ENTROPY_METRICS = (
    Metric(key="entropy", title="Entropy", about="of the sampled tokens, nats"),
    Metric(key="first_entropy", title="First token's entropy", about="the same states for all, nats"),
    Metric(key="pass@1", title="pass@1"),
    Metric(key="pass@16", title="pass@16"),
    Metric(key="kl", title="KL from BF16", about="over prompts and answers, nats a token"),
    Metric(key="weight_error", title="Weight error", about="relative, mean over the linears"),
    Metric(key="output_error", title="Output error", about="relative, mean over the linears"),
    Metric(key="mean_tokens", title="Length", about="tokens of a sample, at most 16"),
)


def entropy() -> Study:
    base = dataclasses.replace(BASE, num_generations=16, evaluate=EvalConfig(num_prompts=256))
    formats = ("nvfp4", "mxfp4", "nf4", "fp8", "int8")
    calibrated = [
        Arm(
            name=f"{name}-{weights}",
            about=f"{name.upper()}, {about}",
            fields={"model.format": name},
            weights=weights,
        )
        for name in ("nvfp4", "mxfp4")
        for weights, about in (
            ("mse", "block scales by least squares"),
            ("awq", "AWQ"),
            ("awq+mse", "AWQ and block scales by least squares"),
        )
    ]
    return Study(
        name="entropy",
        question="Does quantization raise the entropy of a policy before training, and if it does: is it the"
        " quantization, or any noise of the same energy?",
        base=base,
        tasks=TASKS,
        arms=(
            Arm(name="bf16", about="the checkpoint in BF16", fields={"model.format": "bf16"}),
            *(Arm(name=f, about=f"{f.upper()}, plain", fields={"model.format": f}) for f in formats),
            Arm(
                name="gaussian",
                about="BF16 and Gaussian noise with the energy of NVFP4's error, matrix by matrix",
                fields={"model.format": "bf16"},
                weights="gaussian",
            ),
            *calibrated,
        ),
        baseline="bf16",
        measure=measure_untrained,
        metrics=_ENTROPY_METRICS,
        curves=(Curve(x="k", y="pass", title="pass@k", about="by k"),),
        claims=(
            *(
                claim(f"{f.upper()} has a [higher|lower] entropy than BF16", f, "bf16", "entropy")
                for f in formats
            ),
            claim(
                "Gaussian noise of NVFP4's energy has a [higher|lower] entropy than BF16",
                *("gaussian", "bf16", "entropy"),
                is_headline=True,
            ),
            claim(
                "NVFP4 raises the entropy [more|less] than Gaussian noise of the same energy",
                *("nvfp4", "gaussian", "entropy"),
                is_headline=True,
            ),
            claim(
                "NVFP4's first token has a [higher|lower] entropy than BF16's",
                *("nvfp4", "bf16", "first_entropy"),
            ),
            claim("NVFP4 [lowers|raises] pass@1", "nvfp4", "bf16", "pass@1", -1),
            claim("NVFP4 [raises|lowers] pass@16", "nvfp4", "bf16", "pass@16"),
            claim(
                "AWQ and least squares bring NVFP4 [nearer to|farther from] BF16",
                *("nvfp4-awq+mse", "nvfp4", "kl"),
                sign=-1,
            ),
            claim(
                "AWQ and least squares [raise|lower] NVFP4's pass@1",
                *("nvfp4-awq+mse", "nvfp4", "pass@1"),
            ),
        ),
        remarks=(
            ONE_MODEL,
            "What is independent: a seed draws the problems and samples of each task, so a difference of two"
            " formats has 10 independent measurements of one and the same pair of weights (rounding is"
            " deterministic). Its interval says how well this model was measured, not how models differ."
            " The Gaussian noise in the weights is drawn by the seed alone and shared by both tasks: a claim"
            " about it has 5 independent draws, and the exact test of 5 cannot give p below 0.0625.",
        ),
        has_constant_weights=True,
    )


def growth() -> Study:
    def aqn(format: str, about: str) -> Arm:
        return Arm(name=f"{format}+aqn", about=about, fields={"model.format": format, **AQN})

    def plain(format: str, about: str) -> Arm:
        return Arm(name=format, about=about, fields={"model.format": format})

    full = {"model.format": "bf16", "adapter.kind": "full"}
    faster = "learns [faster|more slowly] than BF16 LoRA"
    return Study(
        name="growth",
        question="Does reward grow faster with a quantized base and with AQN than with BF16 LoRA, each at its"
        " best learning rate?",
        base=BASE,
        tasks=TASKS,
        arms=(
            plain("bf16", "BF16 LoRA"),
            aqn("nvfp4", "NVFP4 + AQN: QeRL"),
            plain("nvfp4", "NVFP4"),
            plain("mxfp4", "MXFP4"),
            plain("nf4", "NF4: QLoRA"),
            plain("int8", "INT8"),
            plain("fp8", "FP8"),
            aqn("bf16", "BF16 LoRA + AQN"),
            Arm(name="full", about="full fine-tuning in BF16", fields=full, rates=_FULL_RATES),
        ),
        baseline="bf16",
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        rates=_RATES,
        seeds=_TEN,
        first_look_seeds=_FIRST_LOOK,
        claims=(
            claim(f"NVFP4 {faster}", "nvfp4", "bf16", "reward_mean", is_headline=True),
            claim(f"NVFP4 + AQN {faster}", "nvfp4+aqn", "bf16", "reward_mean", is_headline=True),
            claim("AQN makes NVFP4 learn [faster|more slowly]", "nvfp4+aqn", "nvfp4", "reward_mean"),
            claim("AQN makes BF16 LoRA learn [faster|more slowly]", "bf16+aqn", "bf16", "reward_mean"),
            claim(
                "From equal first rewards, NVFP4 + AQN is [ahead of|behind] BF16 LoRA",
                *("nvfp4+aqn", "bf16", "matched"),
            ),
            claim("NVFP4 + AQN ends [above|below] BF16 LoRA", "nvfp4+aqn", "bf16", "accuracy_after"),
            claim("NVFP4 ends [above|below] NF4 (QLoRA)", "nvfp4", "nf4", "accuracy_after"),
            claim("NVFP4 + AQN ends [above|below] full fine-tuning", "nvfp4+aqn", "full", "accuracy_after"),
        ),
        remarks=(
            ONE_MODEL,
            SHARED_SEED,
            "The learning rates of full fine-tuning are a tenth of the adapters'.",
        ),
    )


def noise() -> Study:
    def arm(name: str, about: str, **changes: Any) -> Arm:
        fields = {f"noise.{key}": value for key, value in changes.items() if key != "importance"}
        if "importance" in changes:
            fields["algo.importance"] = changes["importance"]
        return Arm(name=name, about=about, fields={**AQN, **fields})

    others = ("linear", "cosine", "logarithmic", "constant")
    return Study(
        name="noise",
        question="Does AQN help NVFP4? Do its schedule, its size, the importance correction, and noise in the"
        " learner matter?",
        base=with_fields(BASE, {"learn.learning_rate": 3e-4}),
        tasks=TASKS,
        arms=(
            Arm(name="none", about="no noise"),
            arm("exponential", "the paper's schedule, sigma from 0.03 of each norm"),
            *(arm(name, f"{name}, from 0.03", schedule=name) for name in others),
            arm("sigma-0.01", "exponential, from 0.01", sigma_start=1e-2, sigma_end=5e-4),
            arm("sigma-0.1", "exponential, from 0.1", sigma_start=1e-1, sigma_end=5e-3),
            arm("both", "exponential, in the learner's forward too", noise_in="both"),
            arm("uncorrected", "exponential, no importance correction", importance="none"),
            arm("ratio", "exponential, the clipped ratio learner / sampler", importance="ratio"),
            Arm(name="none-uncorrected", about="no noise, no correction", fields={"algo.importance": "none"}),
        ),
        baseline="none",
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        seeds=_TEN,
        first_look_seeds=_FIRST_LOOK,
        claims=(
            claim("AQN [raises|lowers] the mean reward", "exponential", "none", "reward_mean"),
            claim(
                "AQN [raises|lowers] the final accuracy",
                *("exponential", "none", "accuracy_after"),
                is_headline=True,
            ),
            *(
                claim(f"Exponential decay ends [above|below] {name}", "exponential", name, "accuracy_after")
                for name in others
            ),
            claim(
                "Ten times the noise [lowers|raises] the accuracy",
                *("sigma-0.1", "sigma-0.01", "accuracy_after"),
                sign=-1,
            ),
            claim(
                "Noise on both sides ends [above|below] noise in the sampler",
                *("both", "exponential", "accuracy_after"),
            ),
            claim(
                "The importance correction [helps|harms] under noise",
                *("exponential", "uncorrected", "accuracy_after"),
            ),
        ),
        remarks=(ONE_MODEL, SHARED_SEED, "All arms have the learning rate 3e-4."),
    )


def rank() -> Study:
    ranks, rates = (16, 64, 128), (1e-4, 1e-3, 3e-3)

    def fields(format: str, rank: int, rate: float) -> Fields:
        return {
            "model.format": format,
            "adapter.rank": rank,
            "adapter.alpha": float(rank),
            "learn.learning_rate": rate,
        }

    arms = [
        Arm(
            name=f"{f}-r{r}-lr{rate:g}",
            about=f"{f.upper()}, rank {r}, rate {rate:g}",
            fields=fields(f, r, rate),
        )
        for f in ("bf16", "nvfp4")
        for r, rate in ((32, 3e-4), *((r, 3e-4) for r in ranks), *((32, rate) for rate in rates))
    ]
    return Study(
        name="rank",
        question="Does LoRA's rank matter? Does BF16 LoRA collapse at learning rates where NVFP4 does not?",
        base=BASE,
        tasks=TASKS,
        arms=tuple(arms),
        baseline="bf16-r32-lr0.0003",
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        seeds=_TEN,
        first_look_seeds=_FIRST_LOOK,
        claims=(
            *(
                claim(
                    f"At rate {rate:g} BF16 collapses [more|less] than NVFP4",
                    *(f"bf16-r32-lr{rate:g}", f"nvfp4-r32-lr{rate:g}", "reward_drop"),
                    is_headline=rate == rates[-1],
                )
                for rate in rates[1:]
            ),
            *(
                claim(
                    f"At rate {rate:g} NVFP4 ends [above|below] BF16",
                    *(f"nvfp4-r32-lr{rate:g}", f"bf16-r32-lr{rate:g}", "accuracy_after"),
                )
                for rate in rates[1:]
            ),
            claim(
                "Rank 16 learns [faster|more slowly] than rank 128, with alpha = rank",
                *("nvfp4-r16-lr0.0003", "nvfp4-r128-lr0.0003", "reward_mean"),
                side_results=(("add", "accuracy_after"),),
            ),
        ),
        remarks=(
            ONE_MODEL,
            SHARED_SEED,
            "alpha = rank in every arm, so the adapter's factor alpha / rank is 1; with a fixed alpha the"
            " ranks might compare differently.",
        ),
    )


SMALL_STUDIES: dict[str, Callable[[], Study]] = {
    "entropy": entropy,
    "growth": growth,
    "noise": noise,
    "rank": rank,
    "methods": methods,
}
"""Studies of the embedded model, on a CPU."""
STUDIES = {**SMALL_STUDIES, **REAL_STUDIES, **MORE_STUDIES, "agents": agents}
