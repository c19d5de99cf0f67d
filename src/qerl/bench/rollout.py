"""Measure a training step's sampling on a decoder with random weights: `qerl bench rollout`.

    first_s          wall-clock time of the first call of the engine's generate, prefill included
    first_open_s     part of it before the first prefill: making the KV cache, compiling decode kernels
    compile_s        part of that: compiling the first batch's decode kernels that the disk cache lacks
    first_prefill_s  part of it: scheduling, prefills and first tokens
    record_s         part of it: the first step of each number of rows, and recording its CUDA graph
    call_s           wall-clock time of a later call
    tok_per_s        sampled tokens / call_s
    tail_N_s         part of call_s in which fewer than N samples were unfinished
    floor_s          least time of the decode steps of this very schedule (schedule.py), with a head of the
                     format floor_head; prefill not counted

Figures but the first call's are medians of the later calls. Every sample has a length of its own, drawn from
--seed, and ends there: no token stops it. Prompts are distinct random tokens.
"""

import dataclasses
import statistics
from typing import Any

from qerl.bench.case import FORMATS, SamplingCase, make_case
from qerl.bench.decode import endless_engine, random_prompts
from qerl.bench.measure import Meter, cuda_device
from qerl.bench.options import BenchRolloutOptions
from qerl.bench.record import Origin, row_writer
from qerl.bench.roofline import LIMITS
from qerl.bench.schedule import Lengths, rollout_floor_s, tail_s
from qerl.engine import PagedEngine, Stats
from qerl.errors import RunError
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder, shape
from qerl.types import GenerateRequest, Prompt, Sampling

_TAILS = (8, 16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutCase(SamplingCase):
    num_samples: int
    rows: int
    lengths: str
    median_tokens: int
    sigma: float
    seed: int

    @property
    def lengths_S(self) -> list[int]:
        return make_case(Lengths, self, kind=self.lengths).of(self.num_samples)


def bench(options: BenchRolloutOptions) -> None:
    """Write a row for each provider."""
    architecture, device, rows = shape(options.shape), cuda_device(), row_writer(options)
    for provider in options.providers:
        case = make_case(RolloutCase, options, provider=provider)
        format, rank = FORMATS[provider], case.lora_rank or None
        decoder = random_decoder(
            architecture, format=format, rank=rank, device=device, seed=0, head=case.head
        )
        rows.add(make_row(case, measure_case(case, decoder, options.runs), rows.origin))
        del decoder
        Meter(device).clear()


def measure_case(case: RolloutCase, decoder: Decoder, runs: int) -> dict[str, Any]:
    """Measure a new engine's first call, then `runs` calls."""
    meter = Meter(decoder.device)
    meter.clear()
    meter.start()
    engine = endless_engine(decoder, max_num_seqs=case.rows, kv=case.kv, kernels=case.kernels)
    vocab_size = decoder.architecture.vocab_size
    prompts_P = random_prompts(case.num_samples // case.group_size, case.prompt_tokens, vocab_size)
    first, *later = [_generate(engine, case, prompts_P, step) for step in range(1 + runs)]

    def median(figure: str) -> float:
        return round(statistics.median(getattr(stats, figure) for stats in later), 4)

    return {
        **{f"first_{name}": round(getattr(first, name), 3) for name in ("open_s", "prefill_s")},
        "first_s": round(first.generate_s, 3),
        "compile_s": round(first.compile_s, 3),
        "record_s": round(first.record_s, 3),
        "call_s": median("generate_s"),
        "prefill_s": median("prefill_s"),
        "prefill_forwards": first.prefill_forwards,
        "tokens": first.num_tokens,
        "tok_per_s": round(statistics.median(stats.tokens_per_s for stats in later), 1),
        "steps": first.decode_forwards,
        "preemptions": max(stats.num_preemptions for stats in later),
        **{
            f"tail_{n}_s": round(statistics.median(tail_s(stats.finish_s, n) for stats in later), 3)
            for n in _TAILS
        },
        "peak_gb": meter.peak_gb(),
        "kernels": engine.kernels,
        "runs": runs,
    }


def _generate(engine: PagedEngine, case: RolloutCase, prompts_P: list[Prompt], step: int) -> Stats:
    lengths_S, size = case.lengths_S, case.group_size
    request = GenerateRequest(
        prompts_P,
        num_samples=size,
        sampling=Sampling(max_tokens=max(lengths_S), temperature=1.0),
        seed=0,
        step=step,
        max_tokens_P_G=[lengths_S[first : first + size] for first in range(0, len(lengths_S), size)],
    )
    groups = engine.generate(request)
    sampled_S = [len(sample.tokens_T) for group in groups for sample in group.samples_G]
    if sampled_S != lengths_S:
        raise RunError(f"the engine sampled {sum(sampled_S)} tokens instead of {sum(lengths_S)}")
    return engine.stats


def make_row(case: RolloutCase, figures: dict[str, Any], origin: Origin) -> dict[str, Any]:
    limit, floor = LIMITS.get(origin.gpu), {"floor_s": None, "floor_fraction": None, "floor_head": None}
    if limit is not None:
        floor_s = rollout_floor_s(limit, shape(case.shape), case, case.lengths_S, case.rows)
        fraction = round(floor_s / figures["call_s"], 4)
        floor = {"floor_s": round(floor_s, 4), "floor_fraction": fraction, "floor_head": case.head}
    return {"bench": "rollout"} | dataclasses.asdict(case) | figures | floor
