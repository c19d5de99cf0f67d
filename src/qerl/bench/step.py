"""Measure whole training steps, from sampling to publishing: `qerl bench step`.

    step_s     wall-clock time = rollout_s + learn_s + the time between and after them; medians of the steps
    peaks_gb   peak memory of each step, the warm-up first; peak_gb: the maximum
    growth_gb  peak of the last step - peak of the first after the warm-up
    plan_gb    with --memory: planned peak, without the CUDA context, which peaks do not have either
    plan_error peak_gb / plan_gb - 1
    compile_s  compiling num_compiled kernels in parallel, before the first decode step

The model has random weights in a real shape; the rewards are constant, with half of each prompt's samples
correct. Samples never stop early. The warm-up step also allocates the KV cache and the optimizer state,
records graphs and compiles kernels. Peaks count PyTorch's allocations and the cache's pages; reserved_gb
counts unused blocks of PyTorch's allocator too, and cap_gb limits it. The learner keeps operands where a
run would (qerl.learner.plan), but none with --memory, whose rows have bench `memory`.

Under `torchrun --nproc-per-node N $(which qerl) bench step` a step's samples are split over N GPUs; rows have
bench `many`, and peaks are those of the first GPU.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from qerl.bench.case import FORMATS, SamplingCase, make_case, try_random_decoder, would_hold_operands
from qerl.bench.decode import NullTokenizer, compile_figures, random_prompts
from qerl.bench.measure import Meter, attempt, cuda_device
from qerl.bench.options import BenchStepOptions
from qerl.bench.record import RowWriter, row_writer
from qerl.config import AdapterConfig, EngineConfig, LearnConfig, ModelConfig, RunConfig, SampleConfig
from qerl.engine import PagedEngine
from qerl.kernels.attention.flash_attention_4 import version_used
from qerl.learner import Learner
from qerl.learner.distributed import ALONE, Ranks, join_ranks
from qerl.learner.plan import memory as plan
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import shape
from qerl.training.engines.data_parallel import DataParallelEngine
from qerl.training.rollouts.rollout import drop_overlong, sampling_of, step_request, with_advantages
from qerl.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCase(SamplingCase):
    bench: str
    batch: int
    recompute: str
    micro_tokens: int
    optimizer: str
    kv_gb: float | None
    exact_mode: bool
    cap_gb: float | None
    expert_rank: int = 0
    backward: str = "bf16"


def bench(options: BenchStepOptions) -> None:
    """Write a row for each provider and batch."""
    with join_ranks("cuda") as ranks:
        kind = "many" if ranks.count > 1 else "memory" if options.memory else "step"
        measure_cases(kind, options, shape(options.shape), cuda_device(), row_writer(options), ranks)


def measure_cases(
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
            rank, head, steps = options.lora_rank, options.head, options.steps
            decoder, error = try_random_decoder(
                architecture, provider, rank, device, head, options.expert_rank
            )
            for case in cases(bench, options, provider):
                figures = None
                if decoder is not None:
                    # Unnamed, as a name would hold the decoder while the next one is made.
                    case = _resolved(case, decoder)
                    figures, error = attempt(partial(measure_case, case, decoder, steps, ranks), device)
                    decoder.zero_grad(set_to_none=True)  # a failed step may leave gradients
                if ranks.is_first:
                    rows.add(dataclasses.asdict(case) | (figures or {"error": error}))
            del decoder
            meter.clear()
    finally:
        meter.cap(None)


def measure_case(case: StepCase, decoder: Decoder, steps: int, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Measure `steps` steps after a warm-up, and print each to stderr."""
    meter = Meter(decoder.device)
    meter.clear()
    config = run_config(case, ranks.count)
    tokenizer: Any = NullTokenizer(decoder.architecture.vocab_size)
    engine = PagedEngine(decoder, tokenizer, config.engine, stop_token_ids=frozenset())
    score = partial(engine.score, sampling=sampling_of(config)) if case.exact_mode else None
    holds = case.bench != "memory" and would_hold_operands(decoder, config, case.prompt_tokens)
    learner = Learner(decoder, config, notice=meter.say, score=score, ranks=ranks, holds_operands=holds)
    sampler = DataParallelEngine(engine, ranks)
    prompts_P = random_prompts(config.num_prompts, case.prompt_tokens, decoder.architecture.vocab_size)
    each = []
    for step in range(1 + steps):
        ranks.take_traffic()
        each.append(_step(config, sampler, learner, prompts_P, step, meter))
        meter.say(f"{case.bench} {case.shape} {case.provider} batch {case.batch} step {step}: {each[-1]}")
    names, counted = ("step_s", "rollout_s", "learn_s"), each[1:]
    times = {name: statistics.median(figures[name] for figures in counted) for name in names}
    peaks_gb = [figures["peak_gb"] for figures in each]
    return {
        **{name: round(time_s, 4) for name, time_s in times.items()},
        "tok_per_s": round(case.batch * case.max_tokens / times["step_s"], 1),
        "first_step_s": round(each[0]["step_s"], 2),
        "peak_gb": max(peaks_gb),
        "peaks_gb": peaks_gb,
        "growth_gb": round(peaks_gb[-1] - peaks_gb[1], 2),
        **(_planned(case, config, decoder, max(peaks_gb)) if case.bench == "memory" else {}),
        **compile_figures(engine),
        "reserved_gb": max(figures["reserved_gb"] for figures in each),
        "used_micro_tokens": each[-1]["used_micro_tokens"],
        "holds_operands": learner.holds_operands,
        "kernels": engine.kernels,
        "flash_attention": version_used(),
        "steps": steps,
        **({} if ranks.count == 1 else {"gpus": ranks.count, **ranks.take_traffic()}),
    }


def _resolved(case: StepCase, decoder: Decoder) -> StepCase:
    """Return the case with recompute auto replaced by what a run would choose, with the capped memory or all
    of this GPU's. A CPU is assumed to have enough."""
    gpu_bytes = math.inf if case.cap_gb is None else case.cap_gb * 1e9 + plan.CONTEXT_BYTES
    if decoder.device.type == "cuda":
        gpu_bytes = min(gpu_bytes, plan.usable_bytes(decoder.device))
    resolved = plan.resolve_checkpointing(
        decoder.architecture, run_config(case), case.prompt_tokens, gpu_bytes
    )
    return dataclasses.replace(case, recompute=resolved.learn.gradient_checkpointing)


def _planned(case: StepCase, config: RunConfig, decoder: Decoder, peak_gb: float) -> dict[str, float]:
    """Return the planned peak, and the relative error of the plan."""
    parts = plan.memory_parts(decoder.architecture, config, case.prompt_tokens)
    plan_gb = (plan.peak_bytes(parts) - plan.CONTEXT_BYTES) / 1e9
    if case.cap_gb is not None:
        plan_gb = min(plan_gb, case.cap_gb)  # the cache takes no more than there is
    return {"plan_gb": round(plan_gb, 2), "plan_error": round(peak_gb / plan_gb - 1, 4)}


def _step(
    config: RunConfig,
    engine: DataParallelEngine,
    learner: Learner,
    prompts_P: list[Prompt],
    step: int,
    meter: Meter,
) -> dict[str, float]:
    """Return times and peak memory of one step."""
    meter.start()
    start_s = time.perf_counter()
    groups = engine.generate(step_request(config, prompts_P, step))
    meter.wait()
    sampled_s = time.perf_counter()
    rewards_G: list[float | None] = [float(g % 2) for g in range(config.num_generations)]
    groups = with_advantages(config.algo, config.sample, groups, [rewards_G] * len(groups))
    groups = drop_overlong(config, groups)
    learn_from_s = time.perf_counter()
    metrics = learner.step(groups)
    meter.wait()
    learned_s = time.perf_counter()
    engine.publish(learner.version)
    meter.wait()
    return {
        "step_s": time.perf_counter() - start_s,
        "rollout_s": sampled_s - start_s,
        "learn_s": learned_s - learn_from_s,
        "peak_gb": meter.peak_gb(),
        "reserved_gb": meter.reserved_gb(),
        "used_micro_tokens": metrics["micro_tokens"],
    }


def run_config(case: StepCase, num_ranks: int = 1) -> RunConfig:
    return RunConfig(
        num_prompts=case.batch // case.group_size,
        num_generations=case.group_size,
        model=ModelConfig(format=FORMATS[case.provider], head_format=case.head),  # type: ignore[arg-type]
        adapter=AdapterConfig(
            rank=case.lora_rank,
            experts="per_expert" if case.expert_rank else "none",
            expert_rank=case.expert_rank or 1,
        ),
        sample=SampleConfig(max_tokens=case.max_tokens),
        engine=EngineConfig(
            max_num_seqs=-(-case.batch // num_ranks),
            kv_cache_dtype="fp8" if case.kv == "fp8" else "auto",
            kv_cache_gb=case.kv_gb,
            kernels=case.kernels,  # type: ignore[arg-type]
            exact=case.exact_mode,
        ),
        learn=LearnConfig(
            gradient_checkpointing=case.recompute,  # type: ignore[arg-type]
            max_tokens_per_microbatch=case.micro_tokens,
            optim=case.optimizer,  # type: ignore[arg-type]
            backward=case.backward,  # type: ignore[arg-type]
        ),
    )


def cases(bench: str, options: BenchStepOptions, provider: str) -> Iterator[StepCase]:
    for batch in options.batches:
        fields = {"bench": bench, "provider": provider, "batch": batch, "exact_mode": options.exact}
        yield make_case(StepCase, options, **fields)
