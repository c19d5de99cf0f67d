"""The demo with one method each: losses, advantages, corrections, noise, precision. See docs/methods.md.

Losses differ only once the policy has moved away from the one that the ratio is taken against, so these
recipes make four updates from each step's samples. Corrections and noise keep the demo's single update.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qerl.config import AlgoConfig, ControlConfig, DeepConfig, MaspoConfig, RunConfig, SapoConfig
from qerl.config.recipes.paper import demo

UPDATES_PER_STEP = 4
"""As in GSPO's experiments and QeRL's GSM8K run."""
GRPO = AlgoConfig(loss_type="grpo", advantage="group")
TARGET_KL = 1e-2
"""Nats a token. The demo's model showed 0.006 at its relative sigma 0.01, 0.037 at 0.03 and 0.37 at 0.1."""


def _demo_with(name: str, **parts: Any) -> RunConfig:
    return replace(demo(), out=f"runs/{name}", **parts)


def _loss(name: str, algo: AlgoConfig) -> RunConfig:
    return _demo_with(name, algo=algo, learn=replace(demo().learn, updates_per_step=UPDATES_PER_STEP))


def grpo() -> RunConfig:
    """GRPO: each sample has the same weight."""
    return _loss("grpo", replace(GRPO, epsilon_high=0.2))


def dapo() -> RunConfig:
    """DAPO: each token has the same weight; wider upper clip, dynamic sampling, length penalty."""
    algo = AlgoConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, dynamic_sampling=True)
    return _loss("dapo", replace(algo, overlong="shape", overlong_buffer=4))


def dr_grpo() -> RunConfig:
    """Dr. GRPO: no std in the advantage, no sample length in the loss."""
    return _loss("dr_grpo", AlgoConfig(loss_type="dr_grpo", advantage="mean", epsilon_high=0.2))


def bnpo() -> RunConfig:
    """BNPO: advantages in units of a Beta density fitted to the step's success rates."""
    return _loss("bnpo", AlgoConfig(loss_type="bnpo", advantage="beta"))


def gspo() -> RunConfig:
    """GSPO: ratio and clip per sample."""
    return _loss("gspo", AlgoConfig(loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4))


def gspo_token() -> RunConfig:
    """GSPO-token: GSPO with a gradient for each token."""
    return _loss("gspo_token", AlgoConfig(loss_type="gspo_token", epsilon=3e-4, epsilon_high=4e-4))


def cispo() -> RunConfig:
    """CISPO: the ratio is a weight of at most 5, and every token keeps its gradient."""
    return _loss("cispo", AlgoConfig(loss_type="cispo", epsilon=1.0, epsilon_high=4.0))


def sapo() -> RunConfig:
    """SAPO: a smooth gate instead of the clip, steeper for negative advantages."""
    return _loss("sapo", AlgoConfig(loss_type="sapo", sapo=SapoConfig()))


def maspo() -> RunConfig:
    """MASPO: a Gaussian weight instead of the clip, wider for unlikely tokens."""
    return _loss("maspo", AlgoConfig(loss_type="maspo", maspo=MaspoConfig()))


def deep_grpo() -> RunConfig:
    """DEEP-GRPO: 4 branches per failed sample (paper: 8), cut at any token (paper: at sentences)."""
    # Both departures from arXiv 2602.14169 are for the demo's samples of at most 16 tokens.
    algo = replace(GRPO, epsilon_high=0.2, branching="deep")
    return _loss("deep_grpo", replace(algo, deep=DeepConfig(num_branches=4, segment_tokens=1)))


def tis() -> RunConfig:
    """Truncated importance sampling: each token's weight is capped (the demo's own correction)."""
    return _demo_with("tis", algo=replace(GRPO, importance="truncated", importance_cap=2.0))


def tis_sequence() -> RunConfig:
    """Truncated importance sampling per sample."""
    return _demo_with("tis_sequence", algo=replace(GRPO, importance="truncated_sequence", importance_cap=2.0))


def mis() -> RunConfig:
    """Masked importance sampling: a token above the cap has weight 0."""
    return _demo_with("mis", algo=replace(GRPO, importance="masked", importance_cap=2.0))


def mis_sequence() -> RunConfig:
    """Masked importance sampling per sample."""
    return _demo_with("mis_sequence", algo=replace(GRPO, importance="masked_sequence", importance_cap=2.0))


def icepop() -> RunConfig:
    """IcePop: a token with a ratio outside 0.5 to 5 has weight 0."""
    algo = replace(GRPO, importance="icepop", importance_floor=0.5, importance_cap=5.0)
    return _demo_with("icepop", algo=algo)


def geometric() -> RunConfig:
    """Geometric rejection: drop samples whose mean ratio is far from 1; TIS for the others."""
    algo = replace(GRPO, reject=("geometric",), geometric_low=0.9, geometric_high=1.1)
    return _demo_with("geometric", algo=algo)


def veto() -> RunConfig:
    """Veto: drop samples with a token that the learner finds too unlikely; TIS for the others."""
    return _demo_with("veto", algo=replace(GRPO, reject=("veto",), veto_ratio=1e-4))


def no_correction() -> RunConfig:
    """No correction: treat the samples as if the learner had drawn them."""
    return _demo_with("no_correction", algo=replace(GRPO, importance="none"))


def _steered(name: str, schedule: str, control: ControlConfig) -> RunConfig:
    return _demo_with(name, noise=replace(demo().noise, schedule=schedule, control=control))


def aqn_kl() -> RunConfig:
    """AQN that steers sigma to keep the KL between sampler and learner at a target."""
    return _steered("aqn_kl", "adaptive", ControlConfig(measure="kl", target=TARGET_KL, sigma_max=0.3))


def aqn_entropy() -> RunConfig:
    """AQN that steers sigma to keep the sampling policy's entropy at a target."""
    control = ControlConfig(measure="entropy", target=0.5, warmup_steps=0, sigma_max=0.05)
    return _steered("aqn_entropy", "adaptive", control)


def aqn_plappert() -> RunConfig:
    """AQN with Plappert's rule: multiply or divide sigma each step to reach a target KL."""
    control = ControlConfig(measure="kl", target=TARGET_KL, factor=1.1, sigma_max=0.3)
    return _steered("aqn_plappert", "plappert", control)


def aqn_group() -> RunConfig:
    """AQN with a new noise for each prompt's group of samples."""
    return _demo_with("aqn_group", noise=replace(demo().noise, scope="group"))


def aqn_sample() -> RunConfig:
    """AQN with a new noise for each sample."""
    return _demo_with("aqn_sample", noise=replace(demo().noise, scope="sample"))


def _precision(name: str, **formats: Any) -> RunConfig:
    """Return the demo with GRPO, these formats and no noise."""
    model, noise = replace(demo().model, **formats), replace(demo().noise, schedule="none")
    return _demo_with(name, model=model, noise=noise, algo=GRPO)


def jet_rl() -> RunConfig:
    """Jet-RL: FP8 weights and activations, quantized alike in sampler and learner; TIS."""
    return _precision("jet_rl", format="fp8-flow")


def flash_fp8() -> RunConfig:
    """FlashRL: a BF16 learner, a sampler with FP8 weights and activations, TIS."""
    return _precision("flash_fp8", format="bf16", sampler_format="fp8-flow")


def flash_int8() -> RunConfig:
    """FlashRL with INT8 weights in the sampler, activations in BF16."""
    return _precision("flash_int8", format="bf16", sampler_format="int8")


METHODS: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        *(grpo, dapo, dr_grpo, bnpo, gspo, gspo_token, cispo, sapo, maspo, deep_grpo),
        *(tis, tis_sequence, mis, mis_sequence, icepop, geometric, veto, no_correction),
        *(aqn_kl, aqn_entropy, aqn_plappert, aqn_group, aqn_sample),
        *(jet_rl, flash_fp8, flash_int8),
    )
}
