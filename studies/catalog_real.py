"""The claims of QeRL on a real model: Qwen2.5-Coder-Instruct on GSM8K, on a GPU.

gsm8k            1.5B: BF16, NF4, MXFP4 and NVFP4, with AQN, calibrated, and full fine-tuning
gsm8k_small      0.5B: the four main arms, and a calibrated one that is merged
gsm8k_untrained  both: what each format costs before training
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.config import (
    EngineConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)
from qerl.config.recipes.paper import GSM8K_SMALL_TEMPLATE
from studies.common import AQN, TRAINING_CURVES, TRAINING_METRICS, claim
from studies.real_models import measure_before_training, train_and_test
from studies.study import Arm, Curve, Fields, Metric, Picture, Study, StudyTask, with_fields

_SMALL, _LARGE = (f"Qwen/Qwen2.5-Coder-{size}-Instruct" for size in ("0.5B", "1.5B"))
BASE = RunConfig(
    num_steps=40,
    num_prompts=64,
    num_generations=8,
    model=ModelConfig(path=_LARGE, format="nvfp4"),
    task=TaskConfig(
        name="gsm8k",
        held_out_split="test",
        num_held_out=256,
        template=GSM8K_SMALL_TEMPLATE,
        rewards=("numeric",),
    ),
    sample=SampleConfig(max_tokens=512, temperature=1.0),
    engine=EngineConfig(max_num_seqs=256, kv_cache_gb=6.0),
    evaluate=EvalConfig(num_prompts=256, every=10),
    learn=LearnConfig(
        learning_rate=5e-5, warmup_ratio=0.05, lr_scheduler_type="constant", max_tokens_per_microbatch=16384
    ),
)
"""64 problems x 8 samples a step, one update, LoRA of rank 32; 256 test problems every 10 steps."""
PAPER_NOISE: Fields = {
    **AQN,
    "noise.sigma_start": 1e-2,
    "noise.sigma_end": 5e-4,
    "noise.unit": "absolute",
}
_PLAIN: Fields = {"noise.schedule": "none"}
_SEEDS = tuple(range(8))
"""With fewer pairs the exact test, corrected for six claims, cannot reach 0.05."""
_OWN = {"family": "calibration", "is_own": True}
_CALIBRATED_CLAIMS = tuple(
    claim(text, "nvfp4-gptq", against, "greedy", sign, **_OWN)
    for text, against, sign in (
        ("Calibrated NVFP4 ends [above|below] NVFP4", "nvfp4", 1),
        ("Calibrated NVFP4 ends [below|above] BF16 LoRA", "bf16", -1),
    )
)
_RIVALS = "other baselines"
_FULL_RATES = 1e-6, 3e-6, 1e-5

_METRICS = (
    Metric(key="greedy", title="Greedy accuracy", about="1,319 test problems, last number of the answer"),
    Metric(key="sampled", title="Sampled accuracy", about="the same at temperature 1"),
    Metric(key="strict_greedy", title="Greedy, strict", about="the number behind ####"),
    Metric(key="strict_sampled", title="Sampled, strict"),
    Metric(key="pass@8", title="pass@8", about="256 problems"),
    Metric(key="maj@8", title="maj@8", about="256 problems"),
    *(
        metric
        for metric in TRAINING_METRICS
        if metric.key
        in ("reward_mean", "matched", "reward_first", "reward_last", "entropy_first", "entropy_last")
    ),
    Metric(key="gain", title="Reward gained", about="last tenth of the steps minus the first step"),
    Metric(key="greedy_before", title="Greedy before", about="256 test problems"),
    Metric(key="tokens_sampled", title="Length", about="tokens of a sampled answer, at most 512"),
    Metric(key="train_s", title="Seconds", about="of all steps, evaluations included"),
    Metric(key="step_s", title="Seconds a step", about="median of the steps"),
    Metric(key="peak_gb", title="Memory", about="largest of a step, 1e9 bytes"),
)
_MERGED = (
    Metric(key="merged_greedy", title="Merged, greedy", about="the adapter merged into 4 bits"),
    Metric(key="merged_sampled", title="Merged, sampled"),
)
_UNTRAINED = (
    *(
        m
        for m in _METRICS
        if not m.key.startswith(("reward", "matched", "gain", "entropy", "train", "step", "peak"))
        and m.key != "greedy_before"
    ),
    Metric(key="calibrate_s", title="Calibration", about="seconds, with the model's own samples"),
)
TEST_CURVE = Curve(
    x="step",
    y="eval_accuracy",
    title="Test accuracy",
    about="256 held-out problems, temperature 1",
    before="accuracy_before",
    x_label="steps",
)
_CURVES = (
    *TRAINING_CURVES,
    TEST_CURVE,
    dataclasses.replace(
        TEST_CURVE,
        x="elapsed_s",
        title="Test accuracy by time",
        about="seconds in steps and evaluations",
        x_label="s",
    ),
)
_REMARKS = (
    "The checkpoints are GGUF files in Q4_K_M; their weights, decoded, are the BF16 models here.",
    "Seeds order the problems and set the adapter's initial values and the samples' random numbers; there is"
    " one model.",
    f"All adapters have the rate {BASE.learn.learning_rate:g}; none was chosen.",
    "Strict accuracies are 0: these models write their number in \\boxed{}, never behind ####.",
)


def _arm(name: str, about: str, format: str, rate_of: str | None = None, **fields: Any) -> Arm:
    """fields: of ModelConfig."""
    model = {f"model.{key}": value for key, value in {"format": format, **fields}.items()}
    return Arm(name=name, about=about, rate_of=rate_of, fields={**_PLAIN, **model})


def _noisy(arm: Arm, about: str) -> Arm:
    return Arm(
        name=f"{arm.name}+aqn",
        about=about,
        rate_of=arm.rate_of or arm.name,
        fields={**arm.fields, **PAPER_NOISE},
    )


_BF16 = _arm("bf16", "BF16 LoRA", "bf16")
_NVFP4 = _arm("nvfp4", "NVFP4, rounded", "nvfp4")
_MSE = _arm("nvfp4-mse", "NVFP4, block scales of least squared error", "nvfp4", "nvfp4", scales="mse")
_GPTQ = _arm("nvfp4-gptq", "NVFP4, calibrated", "nvfp4", "nvfp4", scales="mse", calibrate="gptq")
_MAIN = _BF16, _NVFP4, _noisy(_NVFP4, "NVFP4 + AQN: QeRL"), _GPTQ
_NOISY_BF16 = _noisy(_BF16, "BF16 LoRA + AQN")
_FULL = Arm(
    name="full",
    about="full fine-tuning in BF16",
    fields={
        **_PLAIN,
        "model.format": "bf16",
        "adapter.kind": "full",
        "checkpoint.every": BASE.num_steps,  # 16 GB each
    },
    rates=_FULL_RATES,
)


def gsm8k() -> Study:
    arms = (
        *_MAIN,
        _NOISY_BF16,
        _arm("nf4", "NF4: QLoRA", "nf4", "nvfp4"),
        _arm("mxfp4", "MXFP4, rounded", "mxfp4", "nvfp4"),
        _noisy(_GPTQ, "NVFP4, calibrated, + AQN"),
        _FULL,
    )
    claims = (
        claim("NVFP4 + AQN ends [above|below] NF4 (QLoRA)", "nvfp4+aqn", "nf4", "greedy", family=_RIVALS),
        claim(
            "NVFP4 + AQN ends [above|below] full fine-tuning",
            *("nvfp4+aqn", "full", "greedy"),
            family=_RIVALS,
        ),
        *_CALIBRATED_CLAIMS,
        claim(
            "AQN [raises|lowers] what calibrated NVFP4 ends at",
            *("nvfp4-gptq+aqn", "nvfp4-gptq", "greedy"),
            **_OWN,
        ),
    )
    return _study("gsm8k", "1.5B", _LARGE, arms, claims)


def gsm8k_small() -> Study:
    study = _study("gsm8k_small", "0.5B", _SMALL, (*_MAIN, _NOISY_BF16), _CALIBRATED_CLAIMS)
    return dataclasses.replace(study, picture=_picture("0.5B", "bf16", "nvfp4", "nvfp4+aqn"))


def _picture(size: str, *arms: str) -> Picture:
    batch = f"{BASE.num_prompts} x {BASE.num_generations}"
    title = f"Qwen2.5-Coder-{size}-Instruct learns GSM8K in {BASE.num_steps} steps of {batch} answers"
    tabled = tuple(arm.name for arm in _MAIN)
    return Picture(curve=TEST_CURVE, arms=arms, tabled=tabled, title=title, x_title="training steps")


def _study(name: str, size: str, model: str, arms: tuple[Arm, ...], claims: tuple) -> Study:
    task = f"gsm8k-{size.lower()}"
    growth = (task, "reward_first"), (task, "gain"), (task, "matched")
    return Study(
        name=name,
        question=f"Do the claims of QeRL hold for Qwen2.5-Coder-{size}-Instruct on GSM8K?",
        base=with_fields(BASE, {"model.path": model}),
        tasks=(StudyTask(name=task, fields={}),),
        arms=arms,
        baseline="bf16",
        measure=train_and_test,
        metrics=(*_METRICS, *_MERGED),
        curves=_CURVES,
        seeds=_SEEDS,
        choice_seeds=(1000,),
        choice_metric="greedy",
        claims=(
            claim(
                "NVFP4 has a [higher|lower] entropy than BF16",
                *("nvfp4", "bf16", "entropy_first"),
                is_headline=True,
            ),
            claim(
                "[NVFP4's reward grows faster than BF16's|NVFP4 has a lower mean reward than BF16]",
                *("nvfp4", "bf16", "reward_mean"),
                side_results=growth,
            ),
            claim(
                "[NVFP4 + AQN's reward grows faster than BF16's"
                "|NVFP4 + AQN has a lower mean reward than BF16]",
                *("nvfp4+aqn", "bf16", "reward_mean"),
                side_results=growth,
            ),
            claim(
                "NVFP4 + AQN ends [above|below] BF16 LoRA",
                *("nvfp4+aqn", "bf16", "greedy"),
                side_results=((task, "greedy_before"),),
                is_headline=True,
            ),
            claim("AQN [raises|lowers] what NVFP4 ends at", "nvfp4+aqn", "nvfp4", "greedy", is_headline=True),
            claim("AQN [raises|lowers] what BF16 LoRA ends at", "bf16+aqn", "bf16", "greedy"),
            claim(
                "A step of NVFP4 + AQN takes [less|more] time than one of BF16 LoRA",
                *("nvfp4+aqn", "bf16", "step_s", -1),
                family="speed",
                note="p is corrected by itself alone",
            ),
            *claims,
        ),
        remarks=_REMARKS,
        reproduces="QeRL",
        picture=_picture(size, "bf16", "nvfp4", "nvfp4+aqn", _GPTQ.name),
    )


def gsm8k_untrained() -> Study:
    sizes = {"0.5b": _SMALL, "1.5b": _LARGE}
    others = (_arm(name, f"{name.upper()}, rounded", name) for name in ("nf4", "mxfp4"))
    arms = (_BF16, _NVFP4, _MSE, _GPTQ, *others)
    return Study(
        name="gsm8k_untrained",
        question="What does rounding to four bits cost on GSM8K before training?",
        base=BASE,
        tasks=tuple(
            StudyTask(name=f"gsm8k-{size}", fields={"model.path": path}) for size, path in sizes.items()
        ),
        arms=arms,
        baseline="bf16",
        measure=measure_before_training,
        metrics=_UNTRAINED,
        curves=(),
        claims=tuple(
            claim(f"{arm.name.upper()} [lowers|raises] the sampled accuracy", arm.name, "bf16", "sampled", -1)
            for arm in arms[1:]
        ),
        seeds=_SEEDS[:5],
        remarks=_REMARKS[:1],
        has_constant_weights=True,
    )


REAL_STUDIES: dict[str, Callable[[], Study]] = {
    "gsm8k": gsm8k,
    "gsm8k_small": gsm8k_small,
    "gsm8k_untrained": gsm8k_untrained,
}
