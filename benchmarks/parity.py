"""Compare the engine's log-probabilities with the learner's: `python -m benchmarks parity`.

    d_t       learner_t - engine_t of every sampled token, without noise or an update in between
    abs_diff  mean |d|       max_diff  max |d|       kl  mean(exp(d) - 1 - d), k3 of KL(engine || learner)
    early_diff, late_diff    abs_diff of the first and the last quarter of each sample
    sample_diff              mean over samples of |sum of d|: grows with max_tokens as mismatches add up
    entropy   the learner's mean over the tokens, in nats
    exact     true if every d_t is 0; exact_mode: the value of engine.exact
    router_replay   of a mixture of experts: the value of algo.router_replay; null otherwise and in exact mode
    route_changes, route_change_rows   of a mixture: share of routes, and of rows with one such route, that
              the learner would choose otherwise than the engine did
    rollout_tok_per_s, read_s    of a second run: sampling, and the learner's pass over all samples (in exact
              mode the engine scores them as well); `qerl bench step --exact` measures whole steps

A random LM head gives nearly uniform distributions, unlike a trained model, and differences grow with the
logits. So the head is scaled to a mean entropy: logits are normal with a standard deviation s, since the
final norm gives hidden states of length sqrt(D); bisection on random logits finds s, and W ~ N(0, s^2 / D).
The learner runs its own step; samples without an advantage have no gradient.
"""

import dataclasses
import math
import time
from functools import cache, partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from qerl.bench.case import SAMPLERS, make_case, try_random_decoder
from qerl.bench.decode import NullTokenizer, random_prompts
from qerl.bench.measure import Meter, attempt, cuda_device
from qerl.bench.options import BenchOptions
from qerl.bench.record import RowWriter, row_writer
from qerl.config import AdapterConfig, AlgoConfig, EngineConfig, RunConfig, SampleConfig
from qerl.config.check import check_not_negative, check_positive
from qerl.engine import PagedEngine
from qerl.errors import UserError, require
from qerl.learner import Learner
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder
from qerl.models.lm_head import LMHead, check_head
from qerl.models.random_weights import shape
from qerl.models.sampler_copy import make_sampler_copy
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest, Group

_HALVINGS, _DRAWS = 20, 1 << 21
_MAX_SPREAD = 32.0  # of logits: at 152,064 tokens an entropy of 0.1

ParityProvider = Literal["qerl-nvfp4", "qerl-mxfp4", "qerl-bf16", "qerl-fp8-flow", "flash-fp8", "flash-int8"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityCase:
    """Settings of a row."""

    shape: str
    provider: str
    lora_rank: int
    expert_rank: int = 0
    kv: str
    head: str
    kernels: str = "auto"
    """As engine.kernels; the row has what the engine chose."""
    target_entropy: float
    exact_mode: bool
    router_replay: bool | None = None
    num_layers: int | None = None
    batch: int
    prompt_tokens: int
    max_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityOptions(BenchOptions):
    providers: tuple[ParityProvider, ...] = ("qerl-nvfp4", "qerl-bf16")
    """Formats of the frozen linear weights."""

    kvs: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """Data types of the KV cache."""

    heads: tuple[Literal["bf16", "fp8", "nvfp4"], ...] = ("bf16",)
    """Formats of the LM head."""

    entropies: tuple[float, ...] = (2.0,)
    """Target entropies per token, in nats; the random LM head is scaled to each."""

    exacts: tuple[bool, ...] = (False, True)
    """Values of engine.exact."""

    router_replays: tuple[bool, ...] = (True, False)
    """Values of algo.router_replay, for a mixture of experts outside of exact mode."""

    kernels: Literal["auto", "hopper", "portable", "torch"] = "auto"
    """Kernels of decode steps, as engine.kernels."""

    num_layers: int | None = None
    """Take only the first layers of the shape; default: all."""

    batch: int = 8
    """Number of prompts, with one sample each."""

    prompt_tokens: int = 256
    """Tokens per prompt."""

    max_tokens: int = 1024
    """Tokens per sample."""

    lora_rank: int = 32
    """LoRA rank."""

    expert_rank: int = 0
    """LoRA rank of the experts of a mixture; 0: no adapter."""

    def __post_init__(self):
        check_positive(self, "batch", "prompt_tokens", "max_tokens", "lora_rank")
        check_not_negative(self, "expert_rank")
        if min(self.entropies, default=1.0) <= 0:
            raise UserError(f"entropies must be positive, got {min(self.entropies)}")


def bench_parity(options: ParityOptions) -> None:
    """Write a row for each provider, entropy, head, KV type and mode."""
    architecture, device = first_layers(shape(options.shape), options.num_layers), cuda_device()
    measure_cases(options, architecture, device, row_writer(options))


def first_layers(a: Architecture, num_layers: int | None) -> Architecture:
    """Return the architecture with this many of its layers; None: all."""
    if num_layers is None:
        return a
    require(
        0 < num_layers <= a.num_layers,
        f"--num-layers must be from 1 to the shape's {a.num_layers}, got {num_layers}",
    )
    return dataclasses.replace(a, num_layers=num_layers, layer_kinds=a.layer_kinds[:num_layers])


def measure_cases(
    options: ParityOptions, architecture: Architecture, device: torch.device, rows: RowWriter
) -> None:
    for head in options.heads:
        check_head(head, architecture.vocab_size, architecture.width)
    for provider in options.providers:
        rank, expert_rank = options.lora_rank, options.expert_rank
        decoder, error = try_random_decoder(architecture, provider, rank, device, expert_rank=expert_rank)
        modes = modes_of(options, architecture)
        for entropy, head, kv, (exact, replay) in product(
            options.entropies, options.heads, options.kvs, modes
        ):
            settings = {"kv": kv, "head": head, "target_entropy": entropy}
            settings |= {"exact_mode": exact, "router_replay": replay}
            case = make_case(ParityCase, options, provider=provider, **settings)
            figures = None
            if decoder is not None:
                figures, error = attempt(partial(measure_case, case, decoder), device)
            rows.add({"bench": "parity"} | dataclasses.asdict(case) | (figures or {"error": error}))
        del decoder
        Meter(device).clear()


def modes_of(options: ParityOptions, a: Architecture) -> list[tuple[bool, bool | None]]:
    """Return the pairs (exact mode, router replay). The values of exact mode are the engine's own, whose
    routes are the same ones, so replay has no say there."""
    replays = [None] if a.mixture is None else list(options.router_replays)
    return [(exact, replay) for exact in options.exacts for replay in ([None] if exact else replays)]


def measure_case(case: ParityCase, decoder: Decoder) -> dict[str, Any]:
    """Measure one case; the decoder gets a new head."""
    Meter(decoder.device).clear()
    vocab_size = decoder.architecture.vocab_size
    decoder.lm_head = LMHead(random_head(decoder, logit_std(case.target_entropy, vocab_size)))
    decoder.lm_head.pack(case.head)
    config = run_config(case)
    tokenizer: Any = NullTokenizer(vocab_size)
    format = SAMPLERS.get(case.provider)
    sampler = decoder if format is None else make_sampler_copy(decoder, format)
    engine = PagedEngine(sampler, tokenizer, config.engine, stop_token_ids=frozenset())
    prompts_P = random_prompts(case.batch, case.prompt_tokens, vocab_size)
    sampling = sampling_of(config)
    score = partial(engine.score, sampling=sampling) if case.exact_mode else None
    learner = Learner(decoder, config, score=score)

    def run() -> tuple[list[Group], dict[str, float], float]:
        groups = engine.generate(GenerateRequest(prompts_P, num_samples=1, sampling=sampling, seed=0, step=0))
        start_s = time.perf_counter()
        metrics = learner.step([_without_advantage(group) for group in groups])
        return groups, metrics, time.perf_counter() - start_s

    run()  # record graphs and compile kernels
    groups, metrics, read_s = run()
    return {
        "abs_diff": metrics["mismatch_abs"],
        "kl": metrics["mismatch_kl"],
        "max_diff": metrics["mismatch_max"],
        "early_diff": metrics["mismatch_early"],
        "late_diff": metrics["mismatch_late"],
        "sample_diff": metrics["mismatch_sample"],
        **{name: metrics[name] for name in ("route_changes", "route_change_rows") if name in metrics},
        "kernels": engine.kernels,
        "entropy": round(metrics["entropy"], 4),
        "exact": metrics["mismatch_max"] == 0,
        "rollout_tok_per_s": round(engine.stats.tokens_per_s, 1),
        "read_s": round(read_s, 4),
        "sampled_tokens": sum(len(s.tokens_T) for group in groups for s in group.samples_G),
    }


@cache
def logit_std(entropy: float, vocab_size: int) -> float:
    """Return the standard deviation of normal logits whose softmax has this mean entropy."""
    if entropy >= math.log(vocab_size):
        return 0.0
    shape_TV = max(_DRAWS // vocab_size, 1), vocab_size
    logits_TV = torch.randn(shape_TV, generator=torch.Generator().manual_seed(0))
    low, high = 0.0, _MAX_SPREAD
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        mean = torch.distributions.Categorical(logits=middle * logits_TV).entropy().mean().item()
        low, high = (middle, high) if mean > entropy else (low, middle)
    return low


def random_head(decoder: Decoder, spread: float) -> Tensor:
    a, device = decoder.architecture, decoder.device
    weight_VD = torch.empty(a.vocab_size, a.width, dtype=decoder.compute, device=device)
    rng = torch.Generator(device).manual_seed(0)
    return weight_VD.normal_(0, spread / math.sqrt(a.width), generator=rng)


def _without_advantage(group: Group) -> Group:
    """Return the group with zero rewards and advantages, so that the learner only scores it."""
    samples_G = [dataclasses.replace(s, reward=0.0, advantage=0.0) for s in group.samples_G]
    return dataclasses.replace(group, samples_G=samples_G)


def run_config(case: ParityCase) -> RunConfig:
    kernels: Any = case.kernels
    return RunConfig(
        num_prompts=case.batch,
        num_generations=2,  # the minimum; the groups have one sample and no advantage
        adapter=AdapterConfig(rank=case.lora_rank),
        algo=AlgoConfig(router_replay=case.router_replay is not False),
        sample=SampleConfig(max_tokens=case.max_tokens),
        engine=EngineConfig(
            max_num_seqs=case.batch,
            kv_cache_dtype="fp8" if case.kv == "fp8" else "auto",
            exact=case.exact_mode,
            kernels=kernels,
        ),
    )
