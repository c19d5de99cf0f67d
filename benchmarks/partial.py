"""Measure training steps with partial rollouts against steps without: `python -m benchmarks partial`.

    plain_s, partial_s      seconds of a step: sampling, learning and publishing; medians of --runs steps
    ratio                   partial_s / plain_s, both divided by the learned tokens of their steps
    *_rollout_s, *_learn_s  parts of them; *_tokens: mean learned tokens of a step
    prefill_tokens          mean rows of the prefills of a partial step: prompts, and carried tokens that are
                            computed again; prefill_s: median time of prefills, or of bringing back a cache
    stale_fraction          mean share of learned tokens that an earlier policy sampled
    carried_gb              most host memory of carried caches

Both learn from num_samples finished samples a step, with micro-batches and operands as the memory plan says.
The n-th prompt of the run has the same lengths in both. Before these steps come one without, and 1 +
max_staleness with, which fill what is carried.
"""

import contextlib
import dataclasses
import statistics
import time
from typing import Any, Literal

from qerl.bench.case import FORMATS, make_case
from qerl.bench.decode import NullTokenizer, random_prompts
from qerl.bench.measure import Meter, cuda_device
from qerl.bench.options import BenchRolloutOptions
from qerl.bench.record import row_writer
from qerl.bench.rollout import RolloutCase
from qerl.config import (
    AdapterConfig,
    EngineConfig,
    LearnConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SampleConfig,
    TaskConfig,
)
from qerl.engine import PagedEngine, Stats
from qerl.learner import Learner
from qerl.learner.distributed import ALONE
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder, shape
from qerl.training.planned_learner import planned_learner
from qerl.training.rollouts.partial import PartialRollouts
from qerl.training.rollouts.rollout import GroupRollouts, drop_overlong
from qerl.types import GenerateRequest, Group, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialOptions(BenchRolloutOptions):
    """--runs: steps that are measured, of each kind."""

    extra_prompts: int = 16
    """Prompts in work beyond a step's, as rollout.extra_prompts."""

    max_staleness: int = 2
    """As rollout.max_staleness."""

    keep_kv_cache: bool = False
    """As rollout.keep_kv_cache."""

    learn: bool = True
    """Learn from each step's samples too, without gradient checkpointing."""

    backward: Literal["bf16", "int8"] = "bf16"
    """Numbers of the backward pass's products, as learn.backward."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialCase(RolloutCase):
    runs: int
    extra_prompts: int
    max_staleness: int
    keep_kv_cache: bool
    learn: bool
    backward: Literal["bf16", "int8"]


def bench_partial(options: PartialOptions) -> None:
    """Write a row for each provider."""
    device, rows = cuda_device(), row_writer(options)
    for provider in options.providers:
        case = make_case(PartialCase, options, provider=provider)
        settings = {"format": FORMATS[provider], "rank": case.lora_rank or None, "head": case.head}
        decoder = random_decoder(shape(options.shape), device=device, seed=0, **settings)
        rows.add({"bench": "partial"} | dataclasses.asdict(case) | measure_partial(case, decoder))
        del decoder
        Meter(device).clear()


def measure_partial(case: PartialCase, decoder: Decoder) -> dict[str, Any]:
    meter = Meter(decoder.device)
    config = run_config(case)
    tokenizer: Any = NullTokenizer(decoder.architecture.vocab_size)
    engine = PagedEngine(decoder, tokenizer, config.engine, stop_token_ids=frozenset())
    learner = None
    if case.learn:
        learner = planned_learner(decoder, config, case.prompt_tokens, notice=meter.say, ranks=ALONE)
    max_prompts = (1 + case.max_staleness + case.runs + 1) * config.num_prompts + case.extra_prompts
    with_lengths, rewards = OwnLengths(engine, case, max_prompts), HalfCorrect()
    pool = random_prompts(max_prompts, case.prompt_tokens, decoder.architecture.vocab_size)

    def train_prompts(step: int, num_prompts: int, round: int) -> list[Prompt]:
        return pool[step * num_prompts : (step + 1) * num_prompts]

    arguments: tuple[Any, ...] = (config, with_lengths, rewards, train_prompts)
    figures = {}
    for kind, rollouts, warm_up in (
        ("plain", GroupRollouts(*arguments), 1),
        ("partial", PartialRollouts(*arguments), 1 + case.max_staleness),
    ):
        step_of = MeasuredStep(config, rollouts, engine, learner, meter)
        each = [step_of(step) for step in range(warm_up + case.runs)][warm_up:]
        figures[kind] = {name: [step[name] for step in each] for name in each[0]}
    as_learned = {}
    if learner is not None:
        as_learned = {"used_micro_tokens": learner.micro_tokens, "holds_operands": learner.holds_operands}
    return _summed(figures) | as_learned | {"kernels": engine.kernels, "peak_gb": meter.peak_gb()}


def _summed(figures: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    row, per_token_s = {}, {}
    for kind, steps in figures.items():
        tokens = statistics.fmean(steps["tokens"])
        row |= {
            f"{kind}_s": round(statistics.median(steps["step_s"]), 3),
            f"{kind}_rollout_s": round(statistics.median(steps["rollout_s"]), 3),
            f"{kind}_learn_s": round(statistics.median(steps["learn_s"]), 3),
            f"{kind}_tokens": round(tokens),
        }
        per_token_s[kind] = statistics.fmean(steps["step_s"]) / tokens
    partial = figures["partial"]
    return row | {
        "ratio": round(per_token_s["partial"] / per_token_s["plain"], 4),
        "prefill_tokens": round(statistics.fmean(partial["prefill_tokens"])),
        "prefill_s": round(statistics.median(partial["prefill_s"]), 3),
        "stale_fraction": round(statistics.fmean(partial["stale_fraction"]), 4),
        "carried_gb": round(max(partial["carried_gb"]), 2),
    }


class MeasuredStep:
    """Sample, learn and publish."""

    def __init__(
        self,
        config: RunConfig,
        rollouts: GroupRollouts | PartialRollouts,
        engine: PagedEngine,
        learner: Learner | None,
        meter: Meter,
    ):
        self._config, self._rollouts, self._engine = config, rollouts, engine
        self._learner, self._meter = learner, meter

    def __call__(self, step: int) -> dict[str, float]:
        """Return the step's times, in seconds, and counts."""
        log, start_s = _Log(), time.perf_counter()
        groups = self._rollouts.sample(step, log)  # type: ignore[arg-type]
        sampled_s = time.perf_counter()
        if self._learner is not None:
            self._learner.step(drop_overlong(self._config, groups))
            self._meter.wait()
        learned_s = time.perf_counter()
        self._engine.publish(self._engine.version + 1)
        self._meter.wait()
        figures = {
            "step_s": time.perf_counter() - start_s,
            "rollout_s": sampled_s - start_s,
            "learn_s": learned_s - sampled_s,
            "tokens": sum(len(s.tokens_T) for group in groups for s in group.samples_G),
            "prefill_tokens": self._engine.stats.prefill_tokens,
            "prefill_s": self._engine.stats.prefill_s,
            **{name: log.metrics.get(name, 0.0) for name in ("stale_fraction", "carried_gb")},
        }
        self._meter.say(f"{type(self._rollouts).__name__} {step}: {figures}")
        return figures


class OwnLengths:
    """An engine whose samples end at their prompts' lengths: the n-th prompt of the run has the n-th ones."""

    def __init__(self, engine: PagedEngine, case: RolloutCase, num_prompts: int):
        self._engine = engine
        size, lengths_S = (
            case.group_size,
            dataclasses.replace(case, num_samples=num_prompts * case.group_size),
        )
        drawn_S = lengths_S.lengths_S
        self._lengths_P_G = [drawn_S[first : first + size] for first in range(0, len(drawn_S), size)]

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    def _lengths(self, prompts_P: list[Prompt]) -> list[list[int]]:
        return [self._lengths_P_G[prompt.index] for prompt in prompts_P]

    def generate(self, request: GenerateRequest, **options: Any) -> list[Group]:
        lengths_P_G = self._lengths(request.prompts_P)
        return self._engine.generate(dataclasses.replace(request, max_tokens_P_G=lengths_P_G), **options)

    def continue_groups(self, unfinished_P: list[Any], **options: Any) -> list[Any]:
        lengths_P_G = self._lengths([unfinished.prompt for unfinished in unfinished_P])
        return self._engine.continue_groups(unfinished_P, max_tokens_P_G=lengths_P_G, **options)


class HalfCorrect:
    """Rewards: every other sample of a group is correct."""

    environments = ()

    def score(self, groups: list[Group]) -> list[list[float | None]]:
        return [[float(g % 2) for g in range(len(group.samples_G))] for group in groups]


class _Log:
    def __init__(self):
        self.metrics: dict[str, float] = {}

    def add(self, **metrics: float) -> None:
        self.metrics |= metrics

    def span(self, name: str) -> Any:
        del name
        return contextlib.nullcontext()


def run_config(case: PartialCase) -> RunConfig:
    num_prompts = case.num_samples // case.group_size
    return RunConfig(
        num_steps=1000,  # so that no step is near the run's end, where fewer prompts are begun
        num_prompts=num_prompts,
        num_generations=case.group_size,
        model=ModelConfig(format=FORMATS[case.provider], head_format=case.head),  # type: ignore[arg-type]
        adapter=AdapterConfig(rank=case.lora_rank or 16),
        task=TaskConfig(reward_overlap="never"),
        sample=SampleConfig(max_tokens=case.max_tokens),
        engine=EngineConfig(
            max_num_seqs=case.rows,
            kv_cache_dtype="auto" if case.kv == "bf16" else "fp8",
            kernels=case.kernels,  # type: ignore[arg-type]
        ),
        learn=LearnConfig(gradient_checkpointing="none", backward=case.backward),
        rollout=RolloutConfig(
            partial=True,
            extra_prompts=case.extra_prompts,
            max_staleness=case.max_staleness,
            keep_kv_cache=case.keep_kv_cache,
        ),
    )
