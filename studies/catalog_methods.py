"""Study `methods`: losses, corrections, exploration and precision at one budget.

    losses        four updates a step, no noise                      against grpo; deep_grpo also against
                                                                     grpo with as many samples
    corrections   one update a step, the sampler noisy by schedule   against tis; tis against no_correction
    exploration   as corrections with TIS; sigma by another rule     against tis
                  or 0, or one noise for each group or sample
    precision     one update a step, no noise, FP8 or INT8           against bf16, and uncorrected

The arms are the recipes of docs/methods.md, applied to the study's base.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from qerl.config.recipes import METHODS
from studies.common import AQN, BASE, ONE_MODEL, SHARED_SEED, TASKS, TRAINING_CURVES, TRAINING_METRICS, claim
from studies.study import Arm, Fields, Study, with_fields
from studies.training import train_job

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "maspo", "deep_grpo")
CORRECTIONS = ("tis", "tis_sequence", "mis", "mis_sequence", "icepop", "geometric", "veto", "no_correction")
RULES = ("aqn_kl", "aqn_entropy", "aqn_plappert")
DRAWS = ("aqn_group", "aqn_sample")
CLIP_FRACTIONS = Path(__file__).with_name("methods") / "clip_fraction.jsonl"
DAPO_NOTE = "dapo draws more samples a step; counted by the 5 seeds alone, p could not be below 0.0625"
PRECISIONS = ("jet_rl", "flash_fp8", "flash_int8")
_UNREAD = ("noise.sigma_end", "noise.num_stages")
"""Fields that no rule of RULES reads; the stored runs have the base's values."""


def _arm(name: str, noise: Fields, parts: Iterable[str] = ("algo",)) -> Arm:
    """Return the arm of a recipe: the fields of these parts in which the recipe differs from the base."""
    recipe, fields = METHODS[name], dict(noise)
    config = recipe()
    for part in parts:
        base = getattr(BASE, part)
        for field in dataclasses.fields(base):
            value, key = getattr(getattr(config, part), field.name), f"{part}.{field.name}"
            if value != getattr(base, field.name) and key not in _UNREAD:
                fields[key] = value
    if config.learn.updates_per_step != BASE.learn.updates_per_step:
        fields["learn.updates_per_step"] = config.learn.updates_per_step
    return Arm(name=name, about=(recipe.__doc__ or name).strip(), fields=fields)


def _clip_caveat() -> str:
    """Return how much of the gradient the losses removed, from the rows of methods/clip_fraction.jsonl."""
    percents: dict[str, list[float]] = {}
    for line in CLIP_FRACTIONS.read_text().splitlines():
        row = json.loads(line)
        percents.setdefault(row["arm"], []).append(100 * row["clip_fraction"])
    ranges = [f"{arm} {_range(values)} %" for arm, values in percents.items()]
    return (
        "Losses: these runs did not store the share of the gradient that a loss removes (clip_fraction). A"
        f" repeat of the first steps on a CPU (add, seed 0; {CLIP_FRACTIONS.name}) had {', '.join(ranges)}."
        " A loss that removes about 0 to 0.1 % is nearly the plain policy gradient: these runs could not show"
        " what its clip or gate is for."
    )


def _range(percents: list[float]) -> str:
    low, high = f"{min(percents):.1f}", f"{max(percents):.1f}"
    return low if low == high else f"{low} to {high}"


def methods() -> Study:
    updates: Fields = {"learn.updates_per_step": METHODS["grpo"]().learn.updates_per_step}
    leave_one_out: Fields = {**updates, "algo.epsilon_high": 0.2, "algo.advantage": "leave_one_out"}
    many: Fields = {**_arm("grpo", {}).fields, "num_generations": 24}
    bf16: Fields = {"model.format": "bf16"}
    uncorrected: Fields = {**bf16, "model.sampler_format": "fp8-flow", "algo.importance": "none"}
    flow: Fields = {"model.format": "fp8-flow", "algo.importance": "none"}
    arms = (
        *(_arm(name, {}) for name in LOSSES),
        Arm(name="rloo", about="GRPO's loss, leave-one-out advantages.", fields=leave_one_out),
        Arm(name="grpo_24", about="GRPO with 24 samples a prompt, about as many as deep_grpo.", fields=many),
        *(_arm(name, AQN) for name in CORRECTIONS),
        *(_arm(name, {}, ("algo", "noise")) for name in RULES),
        *(_arm(name, AQN, ("algo", "noise")) for name in DRAWS),
        *(_arm(name, {}, ("algo", "model")) for name in PRECISIONS),
        Arm(name="bf16", about="BF16 in sampler and learner, TIS.", fields=bf16),
        Arm(name="flash_uncorrected", about="flash_fp8 without a correction.", fields=uncorrected),
        Arm(name="jet_uncorrected", about="jet_rl without a correction, as in its paper.", fields=flow),
        Arm(name="no_noise", about="TIS without noise.", fields={}),
    )
    families = {
        "losses": [*((name, "grpo") for name in (*LOSSES[1:], "rloo")), ("deep_grpo", "grpo_24")],
        "corrections": [*((name, "tis") for name in CORRECTIONS[1:-1]), ("tis", "no_correction")],
        "exploration": [*((name, "tis") for name in (*RULES, *DRAWS)), ("tis", "no_noise")],
        "precision": [
            *((name, "bf16") for name in PRECISIONS),
            ("flash_fp8", "flash_uncorrected"),
            ("jet_rl", "jet_uncorrected"),
        ],
    }
    return Study(
        name="methods",
        question="Which loss, correction, exploration or precision does best at one budget?",
        base=with_fields(BASE, {"learn.learning_rate": 3e-4}),
        tasks=TASKS,
        arms=arms,
        baseline="grpo",
        caveat=_clip_caveat(),
        measure=train_job,
        metrics=TRAINING_METRICS,
        curves=TRAINING_CURVES,
        claims=tuple(
            claim(
                f"{arm} ends [above|below] {against}",
                *(arm, against, "accuracy_after"),
                family=family,
                note=DAPO_NOTE if arm == "dapo" else "",
            )
            for family, pairs in families.items()
            for arm, against in pairs
        ),
        remarks=(
            ONE_MODEL,
            SHARED_SEED,
            "All arms have the learning rate 3e-4 and the same number of steps, but not of updates or"
            " samples: the losses make four updates a step, dapo draws more samples if the rewards of a group"
            " agree, and deep_grpo draws four branches of each failed sample; grpo_24 draws about as many.",
            "With 10 pairs, no p could be significant after correction over all 29 claims.",
        ),
    )
