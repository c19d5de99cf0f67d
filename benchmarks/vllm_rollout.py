"""Run vLLM on the lengths of `qerl bench rollout`: `python -m benchmarks vllm-rollout MODEL`.

MODEL is a checkpoint of the shape to compare, such as Qwen/Qwen2.5-7B-Instruct; weights are read unless
--load-format dummy makes random ones. Prompts are the same random tokens, and each sample has its own
max_tokens with stop tokens ignored. The row has the names of `qerl bench rollout`.
"""

import dataclasses
import datetime
import importlib
import json
import statistics
import time
from typing import Annotated, Any

import tyro

from qerl.bench.case import make_case
from qerl.bench.decode import random_prompts
from qerl.bench.options import BenchRolloutOptions
from qerl.bench.schedule import Lengths
from qerl.config.check import check_positive
from qerl.errors import UserError

_DEFAULTS = BenchRolloutOptions()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VllmRolloutOptions:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = "Qwen/Qwen2.5-7B-Instruct"
    """Checkpoint that vLLM loads."""

    quantization: str | None = None
    """vLLM's quantization of the weights; None: as the checkpoint says."""

    load_format: str = "dummy"
    """vLLM's load_format; dummy makes random weights of the checkpoint's shape."""

    num_samples: int = _DEFAULTS.num_samples
    """Samples of a rollout."""

    rows: int = _DEFAULTS.rows
    """Samples decoded at once, vLLM's max_num_seqs."""

    group_size: int = _DEFAULTS.group_size
    """Samples per prompt."""

    prompt_tokens: int = _DEFAULTS.prompt_tokens
    """Tokens per prompt."""

    median_tokens: int = _DEFAULTS.median_tokens
    """Median of the log-normal lengths."""

    sigma: float = _DEFAULTS.sigma
    """Standard deviation of a length's logarithm."""

    max_tokens: int = _DEFAULTS.max_tokens
    """Longest sample."""

    seed: int = _DEFAULTS.seed
    """Seed of the lengths."""

    runs: int = _DEFAULTS.runs
    """Rollouts after the first one; the row holds their median."""

    def __post_init__(self):
        check_positive(self, "num_samples", "rows", "group_size", "prompt_tokens", "median_tokens", "runs")
        check_positive(self, "sigma", "max_tokens")


def bench_vllm_rollout(options: VllmRolloutOptions) -> None:
    """Print a JSON row: times of vLLM's first and later calls, on the lengths of qerl bench rollout."""
    try:
        vllm: Any = importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(f"vLLM cannot be imported ({error}): install it, on a machine with its GPU") from None
    longest = options.prompt_tokens + options.max_tokens
    start_s = time.perf_counter()
    llm = vllm.LLM(
        model=options.model,
        quantization=options.quantization,
        load_format=options.load_format,
        max_num_seqs=options.rows,
        max_model_len=longest,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    loaded_s = time.perf_counter() - start_s
    lengths_S = lengths_of(options)
    first_s, *later_s = [_generate_s(vllm, llm, options, lengths_S) for _ in range(1 + options.runs)]
    call_s = statistics.median(later_s)
    row = {
        "bench": "rollout",
        "provider": f"vllm-{options.quantization or 'bf16'}",
        **dataclasses.asdict(options),
        "load_s": round(loaded_s, 2),
        "first_s": round(first_s, 3),
        "call_s": round(call_s, 4),
        "tokens": sum(lengths_S),
        "tok_per_s": round(sum(lengths_S) / call_s, 1),
        "vllm": vllm.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(row))


def lengths_of(options: VllmRolloutOptions) -> list[int]:
    """Return the lengths that `qerl bench rollout` has by the same seed."""
    return make_case(Lengths, options, kind="log-normal").of(options.num_samples)


def _generate_s(vllm: Any, llm: Any, options: VllmRolloutOptions, lengths_S: list[int]) -> float:
    """Return the wall-clock time of a call; each sample of a group is a request with the group's prompt."""
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    prompts_P = random_prompts(options.num_samples // options.group_size, options.prompt_tokens, vocab_size)
    requests = [{"prompt_token_ids": p.tokens_T} for p in prompts_P for _ in range(options.group_size)]
    each = [
        vllm.SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
        for length in lengths_S
    ]
    start_s = time.perf_counter()
    outputs = llm.generate(requests, each, use_tqdm=False)
    took_s = time.perf_counter() - start_s
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths_S
    return took_s
