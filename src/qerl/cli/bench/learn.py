"""`qerl bench learn`: what an update takes, packing and optimizer included, on random weights and tokens.

    tok_per_s  packed tokens / wall clock of one call of the learner's step
    mfu        passes * 2 P * tok_per_s / matrix rate,    P = weights of the linears and of the head
               passes: 2, forward and gradient of the inputs; 3 where the forward is computed again

Frozen weights have no gradient of their own, so a pass forward and one backward are 4 P operations a token.
Every sequence is packed as a prompt of one token and a sample, so every token but the last is predicted from.
Medians of the runs, after a step that compiles what there is to compile.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from qerl.cli.bench.case import case_of, gemms, random_policy
from qerl.cli.bench.decode import random_prompts
from qerl.cli.bench.measure import Meter, attempt, cuda_device
from qerl.cli.bench.options import BenchLearnOptions
from qerl.cli.bench.record import Origin, RowWriter, row_writer
from qerl.cli.bench.roofline import LIMITS
from qerl.config import AdapterConfig, LearnConfig, RunConfig, SampleConfig
from qerl.learner import Learner
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import shape
from qerl.types import Group, Sample

_PASSES = {"none": 2, "layer": 3, "offload": 3}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearnCase:
    """What tells a row from others; its fields are the row's."""

    shape: str
    provider: str
    lora_rank: int
    recompute: str
    tokens: int
    sequence_tokens: int
    micro_tokens: int


def bench_learn(options: BenchLearnOptions) -> None:
    """Appends a row for each provider, recompute and split, and prints it."""
    architecture, device = shape(options.shape), cuda_device()
    measure(options, architecture, device, row_writer(options))


def measure(
    options: BenchLearnOptions, architecture: Architecture, device: torch.device, rows: RowWriter
) -> None:
    for provider in options.providers:
        meter = Meter(device)
        decoder, error = random_policy(architecture, provider, options.lora_rank, device)
        for case in _cases(options, provider):
            figures = None
            if decoder is not None:
                figures, error = attempt(partial(measured, case, decoder, options.runs), device)
                decoder.zero_grad(set_to_none=True)  # of a step that was broken off
            rows.add(row_of(case, architecture, figures or {"error": error}, rows.origin))
        del decoder
        meter.clear()


def measured(case: LearnCase, decoder: Decoder, runs: int) -> dict[str, Any]:
    meter = Meter(decoder.device)
    meter.clear()
    groups = random_groups(case.tokens // case.sequence_tokens, case.sequence_tokens, decoder)
    learner = Learner(decoder, config_of(case, len(groups)), notice=meter.say)
    learner.step(groups)
    meter.start()
    each_s, metrics = [], {}
    for _ in range(runs):
        start_s = time.perf_counter()
        metrics = learner.step(groups)
        meter.wait()
        each_s.append(time.perf_counter() - start_s)
    assert metrics["learn_tokens"] == case.tokens
    step_s = statistics.median(each_s)
    return {
        "tok_per_s": round(case.tokens / step_s, 1),
        "step_s": round(step_s, 4),
        "peak_gb": meter.peak_gb(),
        "used_micro_tokens": metrics["micro_tokens"],
        "runs": runs,
    }


def random_groups(num_sequences: int, sequence_tokens: int, decoder: Decoder) -> list[Group]:
    """One sample a group, as long as a sequence; its first token is the prompt, its last has no row."""
    prompts_P = random_prompts(num_sequences, sequence_tokens + 1, decoder.architecture.vocab_size)
    return [
        Group(
            prompt=dataclasses.replace(prompt, tokens_T=prompt.tokens_T[:1]),
            samples_G=[_sample(prompt.tokens_T[1:], advantage=1.0 - 2 * (prompt.index % 2))],
        )
        for prompt in prompts_P
    ]


def _sample(tokens_T: list[int], advantage: float) -> Sample:
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=[-10.0] * len(tokens_T),
        text="",
        finish="length",
        version=0,
        reward=1.0,
        advantage=advantage,
    )


def config_of(case: LearnCase, num_prompts: int) -> RunConfig:
    return RunConfig(
        num_prompts=num_prompts,
        num_generations=2,  # of which one is there: what a mean divides by costs no time
        adapter=AdapterConfig(rank=case.lora_rank),
        sample=SampleConfig(max_tokens=case.sequence_tokens),
        learn=LearnConfig(gradient_checkpointing=case.recompute, max_tokens_per_microbatch=case.micro_tokens),  # type: ignore[arg-type]
    )


def row_of(
    case: LearnCase, architecture: Architecture, figures: dict[str, Any], origin: Origin
) -> dict[str, Any]:
    limit, mfu = LIMITS.get(origin.gpu), None
    if limit is not None and "tok_per_s" in figures:
        flop = 2 * _PASSES[case.recompute] * num_weights(architecture)
        mfu = round(flop * figures["tok_per_s"] / limit.flop_per_s, 4)
    return {"bench": "learn"} | dataclasses.asdict(case) | figures | {"mfu": mfu}


def num_weights(a: Architecture) -> int:
    """Of the linears and the head."""
    return a.num_layers * sum(gemm.num_weights for gemm in gemms(a)) + a.vocab_size * a.width


def _cases(options: BenchLearnOptions, provider: str) -> Iterator[LearnCase]:
    for recompute in options.recomputes:
        for count in options.micro_batches:
            micro_tokens = options.tokens // count
            yield case_of(
                LearnCase, options, provider=provider, recompute=recompute, micro_tokens=micro_tokens
            )
