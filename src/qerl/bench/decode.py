"""Measure rollouts on a decoder with random weights: `qerl bench decode`.

    tok_per_s  sampled tokens / wall-clock time of one call of the engine's generate, prefill included
    step_ms    (wall-clock time - prefill) / decode steps
    prefill_s  time of the prefill
    compile_s  part of start_s: compiling num_compiled kernels in parallel, before the first step
    floor_ms   least time of a mean step (roofline.py); floor_fraction is its share of batch / tok_per_s, and
               floor_head the format in which it counts the head
    start_s    time until the engine has sampled for the first time: making the weights on the device (they
               are not read from a disk), compiling kernels or loading them from the cache, recording graphs
               and sampling a few tokens; without imports

Figures are medians of the runs; the first run also allocates the KV cache. Prompts are distinct random
tokens, batch / group_size of them with group_size samples each. Samples have no stop token; a run in
which one stops early raises RunError.
"""

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from qerl.algo.seeds import mix
from qerl.aqn.norm_noise import noised
from qerl.bench.case import FORMATS, DecodeCase, make_case
from qerl.bench.measure import Meter, cuda_device
from qerl.bench.options import BenchDecodeOptions
from qerl.bench.record import Origin, row_writer
from qerl.bench.roofline import LIMITS, step_floor_ms
from qerl.config import EngineConfig
from qerl.engine import PagedEngine, Stats
from qerl.errors import RunError
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder, shape
from qerl.types import GenerateRequest, Prompt, Sampling

_FIRST_TOKENS = 4


class NullTokenizer:
    """Tokenizer of a random model: all tokens decode to the empty string."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 (a tokenizer's attribute)
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return self._vocab_size

    def encode(self, text: str, **_: Any) -> list[int]:
        return [0] * len(text)

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, tokens_T: list[int], **_: Any) -> str:
        return ""


def bench(options: BenchDecodeOptions) -> None:
    """Write a row for each provider, rank, batch and noise."""
    architecture = shape(options.shape)
    device = cuda_device()
    rows = row_writer(options)
    for provider in options.providers:
        for rank in options.lora_ranks:
            start_s = time.perf_counter()
            format, head = FORMATS[provider], options.head
            decoder = random_decoder(
                architecture, format=format, rank=rank or None, device=device, seed=0, head=head
            )
            Meter(device).wait()
            made_s = time.perf_counter() - start_s
            for case in _cases(options, provider, rank):
                rows.add(make_row(case, measure_case(case, decoder, made_s, options.runs), rows.origin))
            del decoder
            Meter(device).clear()


def measure_case(case: DecodeCase, decoder: Decoder, ready_s: float, runs: int) -> dict[str, Any]:
    """Measure a new engine's first call, then `runs` calls; making the decoder took ready_s."""
    meter = Meter(decoder.device)
    meter.clear()  # free the engine of the previous case
    meter.start()
    start_s = time.perf_counter()
    engine = endless_engine(decoder, max_num_seqs=case.batch, kv=case.kv, kernels=case.kernels)
    vocab_size = decoder.architecture.vocab_size
    prompts_P = random_prompts(case.batch // case.group_size, case.prompt_tokens, vocab_size)
    with noised(decoder.noise_table, sigma=case.noise_sigma, unit="absolute", seed=0, step=0) as num_norms:
        assert bool(num_norms) == (case.noise_sigma > 0)
        _generate(engine, case, prompts_P, max_tokens=_FIRST_TOKENS, step=0)
        ready_s += time.perf_counter() - start_s
        engine.wait_compiled()  # kernels that this batch does not launch
        each = [_generate(engine, case, prompts_P, case.max_tokens, step=1 + run) for run in range(runs)]
    return {
        "tok_per_s": round(statistics.median(stats.tokens_per_s for stats in each), 1),
        "step_ms": round(statistics.median(step_ms(stats) for stats in each), 4),
        "prefill_s": round(statistics.median(stats.prefill_s for stats in each), 4),
        "start_s": round(ready_s, 2),
        **compile_figures(engine),
        "peak_gb": meter.peak_gb(),
        "kernels": engine.kernels,
        "runs": runs,
    }


def endless_engine(decoder: Decoder, *, max_num_seqs: int, kv: str, kernels: str) -> PagedEngine:
    """Return an engine whose samples end by length alone. kv: bf16 or fp8; kernels: as in EngineConfig."""
    tokenizer: Any = NullTokenizer(decoder.architecture.vocab_size)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        kv_cache_dtype="auto" if kv == "bf16" else "fp8",
        kernels=kernels,  # type: ignore[arg-type]
    )
    return PagedEngine(decoder, tokenizer, config, stop_token_ids=frozenset())


def compile_figures(engine: PagedEngine) -> dict[str, float]:
    """Return the seconds of compiling kernels ahead and their number, or zeros with PyTorch's operations."""
    report = engine.compile_report()
    compile_s, count = (0.0, 0) if report is None else (report.compile_s, report.num_compiled)
    return {"compile_s": round(compile_s, 2), "num_compiled": count}


def random_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[Prompt]:
    return [
        Prompt(
            index=index,
            text="",
            tokens_T=random.Random(mix(0, index)).choices(range(vocab_size), k=num_tokens),
            messages=None,
            columns={},
        )
        for index in range(num_prompts)
    ]


def step_ms(stats: Stats) -> float:
    return 1e3 * (stats.generate_s - stats.prefill_s) / stats.decode_forwards


def _cases(options: BenchDecodeOptions, provider: str, rank: int) -> Iterator[DecodeCase]:
    for batch in options.batches:
        for sigma in options.noise_sigmas:
            fields = {"provider": provider, "lora_rank": rank, "batch": batch, "noise_sigma": sigma}
            yield make_case(DecodeCase, options, **fields)


def _generate(
    engine: PagedEngine, case: DecodeCase, prompts_P: list[Prompt], max_tokens: int, step: int
) -> Stats:
    sampling = Sampling(max_tokens=max_tokens, temperature=1.0)
    engine.generate(
        GenerateRequest(prompts_P, num_samples=case.group_size, sampling=sampling, seed=0, step=step)
    )
    stats = engine.stats
    if stats.num_tokens != case.batch * max_tokens:
        raise RunError(f"the engine sampled {stats.num_tokens} tokens instead of {case.batch * max_tokens}")
    return stats


def make_row(case: DecodeCase, figures: dict[str, Any], origin: Origin) -> dict[str, Any]:
    floor = floor_figures(case, figures["tok_per_s"], origin.gpu)
    return {"bench": "decode"} | dataclasses.asdict(case) | figures | floor


def floor_figures(case: DecodeCase, tok_per_s: float, gpu: str) -> dict[str, Any]:
    """Return the floor of a step and the share of it; None for a GPU without known limits."""
    if (limit := LIMITS.get(gpu)) is None:
        return {"floor_ms": None, "floor_fraction": None, "floor_head": None}
    least_ms = step_floor_ms(limit, shape(case.shape), case)
    fraction = round(tok_per_s * least_ms / 1e3 / case.batch, 4)
    return {"floor_ms": round(least_ms, 4), "floor_fraction": fraction, "floor_head": case.head}
