"""`qerl bench step` and `qerl bench memory`: a whole step, sampled, rewarded, learned from and published.

    step_s     wall clock = rollout_s + learn_s + what is between and after them; medians of the steps
    peaks_gb   most memory of each step, the one that warms up first; peak_gb: of all
    growth_gb  peak of the last step - peak of the one after the warm-up

The model is a real shape with random weights, the reward is made up: half of each prompt's samples are
right. Samples never stop early. The step that warms up also makes the KV cache and the optimizer's moments,
records the graphs and compiles what there is to compile. Peaks are of what torch
allots and the cache's pages together, reserved_gb with what torch holds unused; cap_gb limits the latter.
The learner holds operands where a run's would (qerl.learner.plan), but not in rows of bench `memory`.

Under `torchrun --nproc-per-node N $(which qerl) bench step` rows are of bench `many`: a step's samples are
spread over N GPUs, peaks are the first one's.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from qerl.cli.bench.case import FORMATS, case_of, random_policy
from qerl.cli.bench.decode import Wordless, random_prompts
from qerl.cli.bench.measure import Meter, attempt, cuda_device
from qerl.cli.bench.options import BenchStepOptions
from qerl.cli.bench.record import RowWriter, row_writer
from qerl.config import AdapterConfig, EngineConfig, LearnConfig, ModelConfig, RunConfig, SampleConfig
from qerl.engine import Engine
from qerl.learner import Learner, plan
from qerl.learner.distributed import ALONE, Ranks, join_ranks
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import shape
from qerl.training.data_parallel import DataParallelEngine
from qerl.training.rollout import drop_overlong, sampling_of, with_advantages
from qerl.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """What tells a row from others; its fields are the row's."""

    bench: str
    shape: str
    provider: str
    batch: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    lora_rank: int
    recompute: str
    micro_tokens: int
    optimizer: str
    kv: str
    kv_gb: float | None
    head: str
    exact_mode: bool
    cap_gb: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """By one step."""

    step_s: float
    rollout_s: float
    learn_s: float
    peak_gb: float
    reserved_gb: float
    used_micro_tokens: float


def bench_step(options: BenchStepOptions) -> None:
    """Write a row for each provider and batch."""
    with join_ranks("cuda") as ranks:
        kind = "many" if ranks.count > 1 else "memory" if options.memory else "step"
        measure(kind, options, shape(options.shape), cuda_device(), row_writer(options), ranks)


def measure(
    bench: str,
    options: BenchStepOptions,
    architecture: Architecture,
    device: torch.device,
    rows: RowWriter,
    ranks: Ranks = ALONE,
) -> None:
    meter = Meter(device)
    meter.clear()
    meter.cap(options.cap_gb)
    try:
        for provider in options.providers:
            decoder, error = random_policy(architecture, provider, options.lora_rank, device, options.head)
            for case in cases(bench, options, provider):
                figures = None
                if decoder is not None:
                    figures, error = attempt(partial(measured, case, decoder, options.steps, ranks), device)
                    decoder.zero_grad(set_to_none=True)  # of a step that was broken off
                if ranks.is_first:
                    rows.add(dataclasses.asdict(case) | (figures or {"error": error}))
            del decoder
            meter.clear()
    finally:
        meter.cap(None)


def measured(case: StepCase, decoder: Decoder, steps: int, ranks: Ranks = ALONE) -> dict[str, Any]:
    """A step that warms up, then `steps` more, each said when it is done."""
    meter = Meter(decoder.device)
    meter.clear()
    config = config_of(case, ranks.count)
    tokenizer: Any = Wordless(decoder.architecture.vocab_size)
    engine = Engine(decoder, tokenizer, config.engine, stop_token_ids=frozenset())
    score = partial(engine.score, sampling=sampling_of(config)) if case.exact_mode else None
    holds = case.bench != "memory" and _holds_operands(case, config, decoder)
    learner, sampler = (
        Learner(decoder, config, notice=meter.say, score=score, ranks=ranks, holds_operands=holds),
        DataParallelEngine(engine, ranks),
    )
    prompts_P = random_prompts(config.num_prompts, case.prompt_tokens, decoder.architecture.vocab_size)
    each = []
    for step in range(1 + steps):
        ranks.take_traffic()
        each.append(_step(config, sampler, learner, prompts_P, step, meter))
        meter.say(f"{case.bench} {case.shape} {case.provider} batch {case.batch} step {step}: {each[-1]}")
    counted, peaks_gb = each[1:], [taken.peak_gb for taken in each]
    step_s = statistics.median(taken.step_s for taken in counted)
    return {
        "step_s": round(step_s, 4),
        "rollout_s": round(statistics.median(taken.rollout_s for taken in counted), 4),
        "learn_s": round(statistics.median(taken.learn_s for taken in counted), 4),
        "tok_per_s": round(case.batch * case.max_tokens / step_s, 1),
        "first_step_s": round(each[0].step_s, 2),
        "peak_gb": max(peaks_gb),
        "peaks_gb": peaks_gb,
        "growth_gb": round(peaks_gb[-1] - peaks_gb[1], 2),
        "reserved_gb": max(taken.reserved_gb for taken in each),
        "used_micro_tokens": each[-1].used_micro_tokens,
        "holds_operands": learner.holds_operands,
        "steps": steps,
        **({} if ranks.count == 1 else {"gpus": ranks.count, **ranks.take_traffic()}),
    }


def _holds_operands(case: StepCase, config: RunConfig, decoder: Decoder) -> bool:
    """As a run does."""
    if decoder.device.type == "cpu":
        return False
    usable_bytes = plan.usable_bytes(decoder.device)
    return plan.can_cache_operands(decoder.architecture, config, case.prompt_tokens, usable_bytes)


def _step(
    config: RunConfig,
    engine: DataParallelEngine,
    learner: Learner,
    prompts_P: list[Prompt],
    step: int,
    meter: Meter,
) -> Taken:
    meter.start()
    start_s = time.perf_counter()
    groups = engine.generate(
        prompts_P,
        num_samples=config.num_generations,
        sampling=sampling_of(config),
        seed=config.seed,
        step=step,
    )
    meter.wait()
    sampled_s = time.perf_counter()
    rewards_G: list[float | None] = [float(g % 2) for g in range(config.num_generations)]
    groups = drop_overlong(config, with_advantages(config, groups, [rewards_G] * len(groups)))
    learn_from_s = time.perf_counter()
    metrics = learner.step(groups)
    meter.wait()
    learned_s = time.perf_counter()
    engine.publish(learner.version)
    meter.wait()
    return Taken(
        step_s=time.perf_counter() - start_s,
        rollout_s=sampled_s - start_s,
        learn_s=learned_s - learn_from_s,
        peak_gb=meter.peak_gb(),
        reserved_gb=meter.reserved_gb(),
        used_micro_tokens=metrics["micro_tokens"],
    )


def config_of(case: StepCase, num_ranks: int = 1) -> RunConfig:
    return RunConfig(
        num_prompts=case.batch // case.group_size,
        num_generations=case.group_size,
        model=ModelConfig(format=FORMATS[case.provider], head_format=case.head),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=case.lora_rank),
        sample=SampleConfig(max_tokens=case.max_tokens),
        engine=EngineConfig(
            max_num_seqs=-(-case.batch // num_ranks),
            kv_cache_dtype="fp8" if case.kv == "fp8" else "auto",
            kv_cache_gb=case.kv_gb,
            exact=case.exact_mode,
        ),
        learn=LearnConfig(
            gradient_checkpointing=case.recompute,  # type: ignore[arg-type]
            max_tokens_per_microbatch=case.micro_tokens,
            optim=case.optimizer,  # type: ignore[arg-type]
        ),
    )


def cases(bench: str, options: BenchStepOptions, provider: str) -> Iterator[StepCase]:
    for batch in options.batches:
        own = {"provider": provider, "batch": batch, "exact_mode": options.exact}
        yield case_of(StepCase, options, bench=bench, **own)
