"""More studies of real models on a GPU, with three seeds each.

gsm8k_noise        0.5B: sigma times 1/3, 1, 3 and 10, and the schedules
gsm8k_rank         0.5B: LoRA rank 8, 32 and 128, and rates times 1/3, 1, 3 and 10, BF16 against NVFP4
gsm8k_systems      0.5B: Jet-RL, FlashRL, exact mode, NVFP4 with and without the importance correction
math_exploration   0.5B: exploration on problems of MATH that the untrained model solves 1 to 4 times of 32
mbpp               1.5B: programs, rewarded by tests; HumanEval and MBPP's tests held out
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from qerl.config import CodeConfig, DeepConfig, TaskConfig
from qerl.config.recipes.paper import CODE_TEMPLATE
from studies.catalog_real import BASE, PAPER_NOISE, gsm8k_small
from studies.common import TRAINING_METRICS, claim
from studies.real_models import HeldOut, train_and_answer
from studies.real_rows import MAX_SOLVED, MAX_TEST, MIN_SOLVED, NUM_SAMPLES, solved_names
from studies.study import Arm, Claim, Fields, Metric, Study, StudyTask, with_fields

_SEEDS = (0, 1, 2)
_RATE = BASE.learn.learning_rate
_FACTORS = {"0.33": 1 / 3, "1": 1.0, "3": 3.0, "10": 10.0}
_FEW = (
    "Three seeds: an exact test of three pairs cannot give p below 0.25, so no claim can be decided; read the"
    " intervals."
)
_BF16: Fields = {"model.format": "bf16", "noise.schedule": "none"}
_NVFP4: Fields = {"model.format": "nvfp4", "noise.schedule": "none"}
_QERL: Fields = {**_NVFP4, **PAPER_NOISE}
_COMPARED = (
    Metric(
        key="mismatch_kl", title="Mismatch", about="KL of sampler and learner, nats a token, mean of steps"
    ),
    Metric(key="mismatch_abs", title="Mismatch, absolute", about="nats a token, mean of steps"),
    Metric(key="rollout_s", title="Rollout", about="seconds a step, median"),
    Metric(key="reward_drop", title="Collapse", about="best tenth of the steps minus the last"),
)


def _arm(name: str, about: str, *parts: Fields, **fields: Any) -> Arm:
    """fields: of RunConfig, with __ for the dot."""
    merged = {name: value for part in parts for name, value in part.items()}
    return Arm(name=name, about=about, fields=merged | {k.replace("__", "."): v for k, v in fields.items()})


def _on_gsm8k(
    name: str, question: str, arms: tuple[Arm, ...], baseline: str, claims: tuple[Claim, ...]
) -> Study:
    """Return a study with the model, data and figures of gsm8k_small."""
    base = gsm8k_small()
    return dataclasses.replace(
        base,
        name=name,
        question=question,
        arms=arms,
        baseline=baseline,
        metrics=(*base.metrics, *_COMPARED),
        claims=claims,
        seeds=_SEEDS,
        caveat=_FEW,
        picture=None,
        takes_from=base.name,
        reproduces="",
    )


def _ends(arm: str, against: str, **settings: Any) -> Claim:
    return claim(f"{arm} ends [above|below] {against}", arm, against, "greedy", **settings)


def gsm8k_noise() -> Study:
    start, end = PAPER_NOISE["noise.sigma_start"], PAPER_NOISE["noise.sigma_end"]
    sizes = [
        _arm(
            f"sigma-x{name}",
            f"exponential from {start * by:.3g} to {end * by:.2g}",
            _QERL,
            noise__sigma_start=start * by,
            noise__sigma_end=end * by,
        )
        for name, by in _FACTORS.items()
    ]
    schedules = ("linear", "cosine", "logarithmic", "constant")
    paper = "sigma-x1"
    return _on_gsm8k(
        "gsm8k_noise",
        "Do the size and the schedule of AQN's noise matter for Qwen2.5-Coder-0.5B-Instruct on GSM8K?",
        (
            _arm("none", "NVFP4 without noise", _NVFP4),
            *sizes,
            *(_arm(each, f"{each}, the paper's sigma", _QERL, noise__schedule=each) for each in schedules),
        ),
        "none",
        (
            *(_ends(arm.name, "none", is_headline=arm.name == paper) for arm in sizes),
            *(_ends(paper, each) for each in schedules),
        ),
    )


def gsm8k_rank() -> Study:
    def arm(format: str, rank: int, factor: str) -> Arm:
        return _arm(
            f"{format}-r{rank}-x{factor}",
            f"{format.upper()}, rank {rank}, rate {_RATE * _FACTORS[factor]:.3g}",
            _BF16 if format == "bf16" else _NVFP4,
            adapter__rank=rank,
            adapter__alpha=float(rank),
            learn__learning_rate=_RATE * _FACTORS[factor],
        )

    cases = ((32, "1"), (8, "1"), (128, "1"), (32, "0.33"), (32, "3"), (32, "10"))
    high = ("3", "10")
    return _on_gsm8k(
        "gsm8k_rank",
        "Does LoRA's rank matter for Qwen2.5-Coder-0.5B-Instruct on GSM8K, and does BF16 LoRA collapse at"
        " rates where NVFP4 does not?",
        tuple(arm(format, *case) for format in ("bf16", "nvfp4") for case in cases),
        "bf16-r32-x1",
        (
            *(
                claim(
                    f"At {by} times the rate BF16 collapses [more|less] than NVFP4",
                    *(f"bf16-r32-x{by}", f"nvfp4-r32-x{by}", "reward_drop"),
                    is_headline=by == high[-1],
                )
                for by in high
            ),
            *(_ends(f"nvfp4-r32-x{by}", f"bf16-r32-x{by}") for by in high),
            claim(
                "Rank 8 learns [faster|more slowly] than rank 128, with alpha = rank",
                *("nvfp4-r8-x1", "nvfp4-r128-x1", "reward_mean"),
            ),
            _ends("nvfp4-r8-x1", "nvfp4-r128-x1"),
        ),
    )


def gsm8k_systems() -> Study:
    uncorrected: Fields = {"algo.importance": "none"}
    flow: Fields = {**_BF16, "model.format": "fp8-flow"}
    fp8: Fields = {**_BF16, "model.sampler_format": "fp8-flow"}
    int8: Fields = {**_BF16, "model.sampler_format": "int8"}
    pairs = (("jet_rl", flow), ("flash_fp8", fp8), ("flash_int8", int8), ("nvfp4+aqn", _QERL))
    about = {
        "jet_rl": "Jet-RL: FP8 weights and activations in sampler and learner",
        "flash_fp8": "FlashRL: a BF16 learner, FP8 weights and activations in the sampler",
        "flash_int8": "FlashRL: a BF16 learner, INT8 weights in the sampler",
        "nvfp4+aqn": "NVFP4 + AQN: QeRL",
    }
    return _on_gsm8k(
        "gsm8k_systems",
        "Which way to sample in few bits does best for Qwen2.5-Coder-0.5B-Instruct on GSM8K?",
        (
            _arm("bf16", "BF16 in sampler and learner", _BF16),
            _arm("exact", "BF16 in exact mode", _BF16, engine__exact=True),
            _arm("nvfp4", "NVFP4 in sampler and learner", _NVFP4),
            *(_arm(name, f"{about[name]}, TIS", fields) for name, fields in pairs),
            *(
                _arm(f"{name}-uncorrected", f"{about[name]}, no correction", fields, uncorrected)
                for name, fields in pairs
            ),
        ),
        "bf16",
        (
            *(_ends(name, f"{name}-uncorrected") for name, _ in pairs),
            *(_ends(name, "bf16", is_headline=True) for name in ("exact", "nvfp4", *about)),
            *(
                claim(
                    f"{arm} has a [smaller|larger] mismatch than {against}",
                    *(arm, against, "mismatch_kl"),
                    -1,
                )
                for arm, against in (("exact", "bf16"), ("jet_rl", "flash_fp8"), ("nvfp4", "flash_int8"))
            ),
        ),
    )


def _with_sets(study: Study, sets: tuple[HeldOut, ...], titles: dict[str, str]) -> Study:
    """Return the study with these held-out sets and their figures. titles: by the prefix of the figures."""
    metrics = [
        Metric(key=f"{each.name}_{key}", title=f"{titles[each.name]}, {key}", about=about)
        for each in sets
        for key, about in (
            ("pass@1", f"{each.num_samples} answers a problem at temperature 1"),
            (f"pass@{each.num_samples}", "the same answers"),
            ("greedy", ""),
        )
    ]
    keys = {each.key for each in (*TRAINING_METRICS, *_COMPARED)} | {"train_s", "step_s", "peak_gb"}
    kept = [metric for metric in study.metrics if metric.key in keys]
    return dataclasses.replace(
        study,
        measure=partial(train_and_answer, sets=sets),
        metrics=(*metrics, *kept),
        takes_from="",
    )


def math_exploration() -> Study:
    """Plain GRPO with four updates a step, as clip-higher and MASPO differ from it only after the first."""
    train, test = solved_names()
    task = TaskConfig(
        name=train,
        held_out_split=test,
        template="{problem}\nThink step by step, then put the final answer inside \\boxed{{}}.",
        rewards=("math",),
        reward_workers=8,
    )
    grpo: Fields = {
        **_NVFP4,
        "task": task,
        "sample.max_tokens": 768,
        "evaluate.num_prompts": MAX_TEST,
        "learn.updates_per_step": 4,
        "algo.loss_type": "grpo",
        "algo.epsilon_high": 0.2,
    }
    arms = (
        _arm("grpo", "GRPO"),
        _arm("aqn", "AQN, the paper's schedule", PAPER_NOISE),
        _arm("aqn_sample", "AQN with a new noise for each sample", PAPER_NOISE, noise__scope="sample"),
        _arm(
            "deep_grpo",
            "DEEP-GRPO: 8 branches per failed sample",
            algo__branching="deep",
            algo__deep=DeepConfig(),
        ),
        _arm("hot", "temperature 1.2", sample__temperature=1.2),
        _arm("clip_higher", "upper clip 0.28", algo__epsilon_high=0.28),
        _arm("maspo", "MASPO: a Gaussian weight instead of the clip", algo__loss_type="maspo"),
    )
    study = _on_gsm8k(
        "math_exploration",
        "Does exploration help Qwen2.5-Coder-0.5B-Instruct on problems of MATH that it rarely solves?",
        arms,
        "grpo",
        (),
    )
    study = _with_sets(study, (HeldOut(name="math", rows=test, num_samples=64),), {"math": "MATH"})
    return dataclasses.replace(
        study,
        base=with_fields(study.base, grpo),
        tasks=(StudyTask(name="math-0.5b", fields={}),),
        claims=tuple(
            claim(f"{arm.name} ends [above|below] grpo in {key}", arm.name, "grpo", f"math_{key}", family=key)
            for key in ("pass@1", "pass@64")
            for arm in arms[1:]
        ),
        remarks=(
            study.remarks[0],
            f"Problems of levels 3 to 5 to which the untrained model in NVFP4 gave {MIN_SOLVED} to"
            f" {MAX_SOLVED} right answers of {NUM_SAMPLES}, for training and, others, for tests.",
            "deep_grpo draws up to nine times the samples of a failed one; all other arms as many as grpo.",
        ),
    )


def mbpp() -> Study:
    task = TaskConfig(
        name="mbpp/train",
        held_out_split="mbpp/test",
        template=CODE_TEMPLATE,
        rewards=("code",),
        reward_timeout_s=10.0,
        reward_workers=8,
        code=CodeConfig(credit="all"),
    )
    arms = (
        _arm("bf16", "BF16 LoRA", _BF16),
        _arm("nvfp4", "NVFP4, rounded", _NVFP4),
        _arm("nvfp4+aqn", "NVFP4 + AQN: QeRL", _QERL),
    )
    sets = tuple(
        HeldOut(name=name, rows=rows, num_samples=8)
        for name, rows in (("mbpp", "mbpp/test"), ("humaneval", "humaneval"))
    )
    study = _on_gsm8k(
        "mbpp",
        "Do the claims of QeRL hold for Qwen2.5-Coder-1.5B-Instruct on programs?",
        arms,
        "bf16",
        (),
    )
    study = _with_sets(study, sets, {"mbpp": "MBPP", "humaneval": "HumanEval"})
    return dataclasses.replace(
        study,
        base=with_fields(BASE, {"task": task}),
        tasks=(StudyTask(name="mbpp-1.5b", fields={}),),
        claims=tuple(
            claim(
                f"{arm} ends [above|below] {against} on {title}", arm, against, f"{name}_pass@1", family=name
            )
            for name, title in (("mbpp", "MBPP"), ("humaneval", "HumanEval"))
            for arm, against in (("nvfp4", "bf16"), ("nvfp4+aqn", "bf16"), ("nvfp4+aqn", "nvfp4"))
        ),
        remarks=(
            *study.remarks[:3],
            "374 tasks of MBPP (601 to 974) to train on; all tests of a task must pass. MBPP's tests (11 to"
            " 510) and HumanEval are held out.",
        ),
    )


MORE_STUDIES: dict[str, Callable[[], Study]] = {
    "gsm8k_noise": gsm8k_noise,
    "gsm8k_rank": gsm8k_rank,
    "gsm8k_systems": gsm8k_systems,
    "math_exploration": math_exploration,
    "mbpp": mbpp,
}
