"""The long demo with one method each: losses, advantages, corrections, noise, precision. See docs/methods.md.

Losses differ only once the policy has moved away from the one that the ratio is taken against, so these
recipes make four updates from each step's samples. Corrections and noise keep its single update.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qerl.config import AlgoConfig, ControlConfig, DeepConfig, NoiseConfig, RunConfig
from qerl.config.recipes.paper import demo_long

UPDATES_PER_STEP = 4
"""As in GSPO's experiments and QeRL's GSM8K run."""
TARGET_KL = 1e-2
"""Nats a token. SmolLM2-135M showed 0.006 at its relative sigma 0.01, 0.037 at 0.03 and 0.37 at 0.1."""
Sections = dict[str, Any]
_GRPO = AlgoConfig(loss_type="grpo")
_KL = ControlConfig(measure="kl", target=TARGET_KL, sigma_max=0.3)
_ENTROPY = ControlConfig(measure="entropy", target=0.5, warmup_steps=0, sigma_max=0.05)


def _loss(loss_type: Any, about: str, **algo: Any) -> tuple[str, Sections]:
    learn = replace(demo_long().learn, updates_per_step=UPDATES_PER_STEP)
    return about, {"algo": AlgoConfig(loss_type=loss_type, **algo), "learn": learn}


def _correction(about: str, **algo: Any) -> tuple[str, Sections]:
    return about, {"algo": replace(_GRPO, **algo)}


def _noise(about: str, **noise: Any) -> tuple[str, Sections]:
    return about, {"noise": replace(demo_long().noise, **noise)}


def _controlled(about: str, **noise: Any) -> tuple[str, Sections]:
    """Return the long demo with a rule that controls sigma, which then has neither stages nor an end."""
    long_noise = demo_long().noise
    start = {"sigma_start": long_noise.sigma_start, "unit": long_noise.unit}
    return about, {"noise": NoiseConfig(**start, **noise)}


def _precision(about: str, **formats: Any) -> tuple[str, Sections]:
    """Return GRPO with these formats and no noise."""
    model, noise = replace(demo_long().model, **formats), NoiseConfig(schedule="none")
    return about, {"model": model, "noise": noise, "algo": _GRPO}


def _recipe(name: str, about: str, sections: Sections) -> Callable[[], RunConfig]:
    """Return a function that returns the long demo with these sections; its docstring is `about`."""

    def recipe() -> RunConfig:
        return replace(demo_long(), out=f"runs/{name}", **sections)

    recipe.__name__, recipe.__doc__ = name, about
    return recipe


_METHODS = {
    "grpo": _loss("grpo", "GRPO: each sample has the same weight.", epsilon_high=0.2),
    "dapo": _loss(
        "dapo",
        "DAPO: each token has the same weight; wider upper clip, dynamic sampling, length penalty.",
        dynamic_sampling=True,
        overlong="shape",
        overlong_buffer=4,
    ),
    "dr_grpo": _loss(
        "dr_grpo",
        "Dr. GRPO: no std in the advantage, no sample length in the loss.",
        advantage="mean",
        epsilon_high=0.2,
    ),
    "bnpo": _loss(
        "bnpo",
        "BNPO: advantages in units of a Beta density fitted to the step's success rates.",
        advantage="beta",
    ),
    "gspo": _loss("gspo", "GSPO: ratio and clip per sample.", epsilon=3e-4, epsilon_high=4e-4),
    "gspo_token": _loss(
        "gspo_token", "GSPO-token: GSPO with a gradient for each token.", epsilon=3e-4, epsilon_high=4e-4
    ),
    "cispo": _loss(
        "cispo",
        "CISPO: the ratio is a weight of at most 5, and every token keeps its gradient.",
        epsilon=1.0,
        epsilon_high=4.0,
    ),
    "sapo": _loss("sapo", "SAPO: a smooth gate instead of the clip, steeper for negative advantages."),
    "maspo": _loss("maspo", "MASPO: a Gaussian weight instead of the clip, wider for unlikely tokens."),
    # Both departures from arXiv 2602.14169 are for samples of at most 16 tokens, as the long demo has them.
    "deep_grpo": _loss(
        "grpo",
        "DEEP-GRPO: 4 branches per failed sample (paper: 8), cut at any token (paper: at sentences).",
        epsilon_high=0.2,
        branching="deep",
        deep=DeepConfig(num_branches=4, segment_tokens=1),
    ),
    "tis": _correction(
        "Truncated importance sampling: each token's weight is capped (the demo's own correction)."
    ),
    "tis_sequence": _correction("Truncated importance sampling per sample.", importance="truncated_sequence"),
    "mis": _correction(
        "Masked importance sampling: a token above the cap has weight 0.", importance="masked"
    ),
    "mis_sequence": _correction("Masked importance sampling per sample.", importance="masked_sequence"),
    "icepop": _correction(
        "IcePop: a token with a ratio outside 0.5 to 5 has weight 0.", importance="icepop", importance_cap=5.0
    ),
    "geometric": _correction(
        "Geometric rejection: drop samples whose mean ratio is far from 1; TIS for the others.",
        reject=("geometric",),
        geometric_low=0.9,
        geometric_high=1.1,
    ),
    "veto": _correction(
        "Veto: drop samples with a token that the learner finds too unlikely; TIS for the others.",
        reject=("veto",),
    ),
    "no_correction": _correction(
        "No correction: treat the samples as if the learner had drawn them.", importance="none"
    ),
    "aqn_kl": _controlled(
        "AQN that steers sigma to keep the KL between sampler and learner at a target.",
        schedule="adaptive",
        control=_KL,
    ),
    "aqn_entropy": _controlled(
        "AQN that steers sigma to keep the sampling policy's entropy at a target.",
        schedule="adaptive",
        control=_ENTROPY,
    ),
    "aqn_plappert": _controlled(
        "AQN with Plappert's rule: multiply or divide sigma each step to reach a target KL.",
        schedule="plappert",
        control=replace(_KL, factor=1.1),
    ),
    "aqn_group": _noise("AQN with a new noise for each prompt's group of samples.", scope="group"),
    "aqn_sample": _noise("AQN with a new noise for each sample.", scope="sample"),
    "jet_rl": _precision(
        "Jet-RL: FP8 weights and activations, quantized alike in sampler and learner; TIS.", format="fp8-flow"
    ),
    "flash_fp8": _precision(
        "FlashRL: a BF16 learner, a sampler with FP8 weights and activations, TIS.",
        format="bf16",
        sampler_format="fp8-flow",
    ),
    "flash_int8": _precision(
        "FlashRL with INT8 weights in the sampler, activations in BF16.", format="bf16", sampler_format="int8"
    ),
}
METHODS = {name: _recipe(name, *method) for name, method in _METHODS.items()}
