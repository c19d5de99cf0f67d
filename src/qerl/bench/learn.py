"""Measure updates of the learner on random weights and tokens: `qerl bench learn`.

    tok_per_s  packed tokens / wall-clock time of one learner step, packing and optimizer included
    mfu        passes * 2 P * tok_per_s / matrix rate,    P = weights of the linears and the head
               passes: 2 (forward, gradient of the inputs), or 3 if the forward pass is recomputed

Every sequence is packed as a one-token prompt and a sample; with --num-samples the update learns from
groups as a rollout brings them, of 8 samples of a prompt of 256 tokens, with lengths as `qerl bench rollout`
draws them. Figures are medians of the runs, after a warm-up step that compiles kernels; unpacked operands of
the weights are held where a training run would hold them. A mixture's samples have recorded routes, as the
engine's samples have (row: replayed_routes); here they are random, and evenly spread. flash_attention: the
version that computes attention of packed rows, where FlashAttention does.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from qerl.bench.case import make_case, try_random_decoder, would_hold_operands
from qerl.bench.decode import random_prompts
from qerl.bench.measure import Meter, attempt, cuda_device
from qerl.bench.options import BenchLearnOptions, BenchRolloutOptions
from qerl.bench.record import Origin, RowWriter, row_writer
from qerl.bench.roofline import LIMITS
from qerl.bench.schedule import Lengths
from qerl.config import AdapterConfig, LearnConfig, RunConfig, SampleConfig
from qerl.cost.weights import PASSES, num_active_params
from qerl.errors import UserError
from qerl.kernels.attention.flash_attention_4 import version_used
from qerl.learner import Learner
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.random_weights import shape
from qerl.types import Group, Sample

_ROLLOUT = BenchRolloutOptions()  # its defaults are the rollout of --num-samples
LENGTHS = make_case(Lengths, _ROLLOUT, kind=_ROLLOUT.lengths)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearnCase:
    shape: str
    provider: str
    lora_rank: int
    recompute: str
    tokens: int
    sequence_tokens: int
    micro_tokens: int
    expert_rank: int = 0
    backward: str = "bf16"
    num_samples: int = 0
    """Samples of a rollout; 0: sequences of equal length."""


def bench(options: BenchLearnOptions) -> None:
    """Write a row for each provider, recompute mode and number of micro-batches."""
    architecture, device = shape(options.shape), cuda_device()
    if options.num_samples and architecture.mixture is not None:
        raise UserError(f"num_samples needs a model without experts, and {options.shape} has some")
    measure_cases(options, architecture, device, row_writer(options))


def measure_cases(
    options: BenchLearnOptions, architecture: Architecture, device: torch.device, rows: RowWriter
) -> None:
    for provider in options.providers:
        meter = Meter(device)
        decoder, error = try_random_decoder(
            architecture, provider, options.lora_rank, device, expert_rank=options.expert_rank
        )
        for case in _cases(options, provider):
            figures = None
            if decoder is not None:
                figures, error = attempt(partial(measure_case, case, decoder, options.runs), device)
                decoder.zero_grad(set_to_none=True)  # a failed step may leave gradients
            rows.add(make_row(case, architecture, figures or {"error": error}, rows.origin))
        del decoder
        meter.clear()


def measure_case(case: LearnCase, decoder: Decoder, runs: int) -> dict[str, Any]:
    meter = Meter(decoder.device)
    meter.clear()
    if case.num_samples:
        groups = rollout_groups(case.num_samples, decoder.architecture.vocab_size)
    else:
        groups = random_groups(case.tokens // case.sequence_tokens, case.sequence_tokens, decoder)
    config = run_config(case, len(groups))
    holds = would_hold_operands(decoder, config, len(groups[0].prompt.tokens_T))
    learner = Learner(decoder, config, notice=meter.say, holds_operands=holds)
    learner.step(groups)
    meter.start()
    each_s, metrics = [], {}
    for _ in range(runs):
        start_s = time.perf_counter()
        metrics = learner.step(groups)
        meter.wait()
        each_s.append(time.perf_counter() - start_s)
    packed = metrics["learn_tokens"]
    assert packed == case.tokens or case.num_samples  # a group in two micro-batches has its prompt twice
    step_s = statistics.median(each_s)
    return {
        "tok_per_s": round(case.tokens / step_s, 1),
        "step_s": round(step_s, 4),
        "peak_gb": meter.peak_gb(),
        "used_micro_tokens": metrics["micro_tokens"],
        "packed_tokens": packed,
        "holds_operands": learner.holds_operands,
        "runs": runs,
        "flash_attention": version_used(),
        **({} if decoder.architecture.mixture is None else {"replayed_routes": True}),
    }


def random_groups(num_sequences: int, sequence_tokens: int, decoder: Decoder) -> list[Group]:
    """Return groups of one sample; a sequence's first token is the prompt, and its last token has no row."""
    prompts_P = random_prompts(num_sequences, sequence_tokens + 1, decoder.architecture.vocab_size)
    rng = torch.Generator(decoder.device).manual_seed(0)
    return [
        Group(
            prompt=dataclasses.replace(prompt, tokens_T=prompt.tokens_T[:1]),
            samples_G=[
                _sample(
                    prompt.tokens_T[1:],
                    advantage=1.0 - 2 * (prompt.index % 2),
                    routes=_random_routes(decoder.architecture, sequence_tokens, rng),
                )
            ],
        )
        for prompt in prompts_P
    ]


def rollout_groups(num_samples: int, vocab_size: int) -> list[Group]:
    """Return groups of samples of random tokens, every other one correct."""
    lengths_S = LENGTHS.of(num_samples)
    prompts_P = random_prompts(num_samples // _ROLLOUT.group_size, _ROLLOUT.prompt_tokens, vocab_size)
    drawn_S = random_prompts(num_samples, max(lengths_S), vocab_size)
    samples_S = [
        _sample(drawn.tokens_T[:length], advantage=1.0 - 2 * (drawn.index % 2), routes=None)
        for drawn, length in zip(drawn_S, lengths_S, strict=True)
    ]
    size = _ROLLOUT.group_size
    return [
        Group(prompt=prompt, samples_G=samples_S[size * prompt.index : size * (prompt.index + 1)])
        for prompt in prompts_P
    ]


def rollout_rows(num_samples: int) -> int:
    """Return the packed rows of `rollout_groups`: a sample's last token has none.

    A group that two micro-batches share has its prompt in both; those rows do not count here."""
    prompts = num_samples // _ROLLOUT.group_size * _ROLLOUT.prompt_tokens
    return prompts + sum(length - 1 for length in LENGTHS.of(num_samples))


def _random_routes(a: Architecture, num_rows: int, rng: torch.Generator) -> bytes | None:
    """Return Sample.routes of this many rows; None without a mixture."""
    if a.mixture is None:
        return None
    size = num_rows, len(a.layers_with_experts), a.mixture.num_experts
    ids_TLK = torch.rand(size, device=rng.device, generator=rng).topk(a.mixture.num_chosen).indices
    return ids_TLK.sort().values.to(torch.uint8).cpu().numpy().tobytes()


def _sample(tokens_T: list[int], advantage: float, routes: bytes | None) -> Sample:
    return Sample(
        tokens_T=tokens_T,
        logprobs_T=[-10.0] * len(tokens_T),
        text="",
        finish="length",
        version=0,
        reward=1.0,
        advantage=advantage,
        routes=routes,
    )


def run_config(case: LearnCase, num_prompts: int) -> RunConfig:
    return RunConfig(
        num_prompts=num_prompts,
        num_generations=2,  # the minimum; the groups above have one sample
        adapter=AdapterConfig(rank=case.lora_rank),
        sample=SampleConfig(max_tokens=case.sequence_tokens),
        learn=LearnConfig(
            gradient_checkpointing=case.recompute,  # type: ignore[arg-type]
            max_tokens_per_microbatch=case.micro_tokens,
            backward=case.backward,  # type: ignore[arg-type]
        ),
    )


def make_row(
    case: LearnCase, architecture: Architecture, figures: dict[str, Any], origin: Origin
) -> dict[str, Any]:
    limit, mfu = LIMITS.get(origin.gpu), None
    if limit is not None and "tok_per_s" in figures:
        flop = 2 * PASSES[case.recompute] * num_active_params(architecture)
        mfu = round(flop * figures["tok_per_s"] / limit.flop_per_s, 4)
    return {"bench": "learn"} | dataclasses.asdict(case) | figures | {"mfu": mfu}


def _cases(options: BenchLearnOptions, provider: str) -> Iterator[LearnCase]:
    fields: dict[str, Any] = {"provider": provider}
    if options.num_samples:
        fields |= {"tokens": rollout_rows(options.num_samples), "sequence_tokens": LENGTHS.max_tokens}
        sizes = options.micro_tokens
    else:
        sizes = tuple(options.tokens // count for count in options.micro_batches)
    for recompute, micro_tokens in itertools.product(options.recomputes, sizes):
        yield make_case(LearnCase, options, recompute=recompute, micro_tokens=micro_tokens, **fields)
