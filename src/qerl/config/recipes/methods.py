"""The demo's run with one method in the place of its own; docs/methods.md tells what each is for.

A loss differs from another only where the policy has left the one that the ratio is taken against, so the
losses make four updates from each step's samples. Corrections and noise keep the demo's single update.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from qerl.config import AlgoConfig, ControlConfig, DeepConfig, MaspoConfig, RunConfig, SapoConfig
from qerl.config.recipes.paper import demo

UPDATES_PER_STEP = 4
"""As GSPO's experiments and QeRL's GSM8K run have it."""
Sampler = Literal["fp8-flow", "int8"] | None
GRPO = AlgoConfig(loss_type="grpo", advantage="group")
TARGET_KL = 1e-2
"""Nats a token. The demo's model showed 0.006 at its relative sigma 0.01, 0.037 at 0.03 and 0.37 at 0.1."""


def _loss(name: str, algo: AlgoConfig) -> RunConfig:
    base = demo()
    learn = replace(base.learn, updates_per_step=UPDATES_PER_STEP)
    return replace(base, out=f"runs/{name}", algo=algo, learn=learn)


def _correction(name: str, algo: AlgoConfig) -> RunConfig:
    return replace(demo(), out=f"runs/{name}", algo=algo)


def grpo() -> RunConfig:
    """GRPO: each sample counts the same."""
    return _loss("grpo", replace(GRPO, epsilon_high=0.2))


def dapo() -> RunConfig:
    """DAPO: each token counts the same, a wider clip above, dynamic sampling, a penalty by length."""
    algo = AlgoConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, dynamic_sampling=True)
    return _loss("dapo", replace(algo, overlong="shape", overlong_buffer=4))


def dr_grpo() -> RunConfig:
    """Dr. GRPO: no std in the advantage, no length in the loss."""
    return _loss("dr_grpo", AlgoConfig(loss_type="dr_grpo", advantage="mean", epsilon_high=0.2))


def bnpo() -> RunConfig:
    """BNPO: advantages in units of a Beta density fitted to the step's success rates."""
    return _loss("bnpo", AlgoConfig(loss_type="bnpo", advantage="beta"))


def gspo() -> RunConfig:
    """GSPO: ratio and clip of whole samples."""
    return _loss("gspo", AlgoConfig(loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4))


def gspo_token() -> RunConfig:
    """GSPO-token: the same with a gradient for each token."""
    return _loss("gspo_token", AlgoConfig(loss_type="gspo_token", epsilon=3e-4, epsilon_high=4e-4))


def cispo() -> RunConfig:
    """CISPO: the ratio is a weight of at most 5, and no token loses its gradient."""
    return _loss("cispo", AlgoConfig(loss_type="cispo", epsilon=1.0, epsilon_high=4.0))


def sapo() -> RunConfig:
    """SAPO: a smooth gate in place of the clip, quicker for negative advantages."""
    return _loss("sapo", AlgoConfig(loss_type="sapo", sapo=SapoConfig()))


def maspo() -> RunConfig:
    """MASPO: a Gaussian weight in place of the clip, wider for unlikely tokens."""
    return _loss("maspo", AlgoConfig(loss_type="maspo", maspo=MaspoConfig()))


def deep_grpo() -> RunConfig:
    """DEEP-GRPO: GRPO, and failed samples branched at a pivot; branches learn from their siblings."""
    algo = replace(GRPO, epsilon_high=0.2, branching="deep")
    return _loss("deep_grpo", replace(algo, deep=DeepConfig(num_branches=4, segment_tokens=1)))


def tis() -> RunConfig:
    """Truncated importance sampling: each token's weight is capped (what the demo does)."""
    return _correction("tis", replace(GRPO, importance="truncated", importance_cap=2.0))


def tis_sequence() -> RunConfig:
    """Truncated importance sampling of whole samples."""
    return _correction("tis_sequence", replace(GRPO, importance="truncated_sequence", importance_cap=2.0))


def mis() -> RunConfig:
    """Masked importance sampling: a token over the cap has weight 0."""
    return _correction("mis", replace(GRPO, importance="masked", importance_cap=2.0))


def mis_sequence() -> RunConfig:
    """Masked importance sampling of whole samples."""
    return _correction("mis_sequence", replace(GRPO, importance="masked_sequence", importance_cap=2.0))


def icepop() -> RunConfig:
    """IcePop: a token outside of 0.5 to 5 has weight 0."""
    algo = replace(GRPO, importance="icepop", importance_floor=0.5, importance_cap=5.0)
    return _correction("icepop", algo)


def geometric() -> RunConfig:
    """Geometric rejection: samples unlike the learner's own are left out; TIS for the others."""
    algo = replace(GRPO, reject=("geometric",), geometric_low=0.9, geometric_high=1.1)
    return _correction("geometric", algo)


def veto() -> RunConfig:
    """Veto: one token too unlikely for the learner leaves out its sample; TIS for the others."""
    return _correction("veto", replace(GRPO, reject=("veto",), veto_ratio=1e-4))


def no_correction() -> RunConfig:
    """The samples are learned from as if the learner had drawn them."""
    return _correction("no_correction", replace(GRPO, importance="none"))


def _steered(name: str, schedule: str, control: ControlConfig) -> RunConfig:
    base = demo()
    noise = replace(base.noise, schedule=schedule, control=control)
    return replace(base, out=f"runs/{name}", noise=noise)


def aqn_kl() -> RunConfig:
    """AQN whose sigma holds the KL between sampler and learner at a target."""
    return _steered("aqn_kl", "adaptive", ControlConfig(measure="kl", target=TARGET_KL, sigma_max=0.3))


def aqn_entropy() -> RunConfig:
    """AQN whose sigma holds up the sampling policy's entropy."""
    control = ControlConfig(measure="entropy", target=0.5, warmup_steps=0, sigma_max=0.05)
    return _steered("aqn_entropy", "adaptive", control)


def aqn_plappert() -> RunConfig:
    """AQN with Plappert's rule: a factor up or down a step, by the KL's side of the target."""
    control = ControlConfig(measure="kl", target=TARGET_KL, factor=1.1, sigma_max=0.3)
    return _steered("aqn_plappert", "plappert", control)


def _noise_per(scope: Literal["group", "sample"]) -> RunConfig:
    base = demo()
    return replace(base, out=f"runs/aqn_{scope}", noise=replace(base.noise, scope=scope))


def aqn_group() -> RunConfig:
    """AQN with a draw of the noise for each prompt's group of samples."""
    return _noise_per("group")


def aqn_sample() -> RunConfig:
    """AQN with a draw of the noise for each sample of a group."""
    return _noise_per("sample")


def _precision(
    name: str, format: Literal["fp8-flow", "bf16"], sampler: Sampler, algo: AlgoConfig
) -> RunConfig:
    base = demo()
    model = replace(base.model, format=format, sampler_format=sampler)
    noise = replace(base.noise, schedule="none")
    return replace(base, out=f"runs/{name}", model=model, noise=noise, algo=algo)


def jet_rl() -> RunConfig:
    """Jet-RL's flow: FP8 weights and activations, quantized alike in sampling and learning."""
    return _precision("jet_rl", "fp8-flow", None, GRPO)


def flash_fp8() -> RunConfig:
    """FlashRL: a BF16 learner, a sampler quantized from it to FP8 with its activations, TIS."""
    return _precision("flash_fp8", "bf16", "fp8-flow", GRPO)


def flash_int8() -> RunConfig:
    """FlashRL with INT8 weights in the sampler, activations in BF16."""
    return _precision("flash_int8", "bf16", "int8", GRPO)


METHODS: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        *(grpo, dapo, dr_grpo, bnpo, gspo, gspo_token, cispo, sapo, maspo, deep_grpo),
        *(tis, tis_sequence, mis, mis_sequence, icepop, geometric, veto, no_correction),
        *(aqn_kl, aqn_entropy, aqn_plappert, aqn_group, aqn_sample),
        *(jet_rl, flash_fp8, flash_int8),
    )
}
