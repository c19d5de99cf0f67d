"""Measure runs on several GPUs of one host: `python -m benchmarks samplers`.

    torchrun      a rank on each GPU, which samples and learns
    ray           a learner and a Ray worker on each other GPU, which sample one step ahead
    ray-killed    the same, one worker killed with SIGKILL after `kill_after` steps

    samples_per_s        samples of a step / step_s
    step_s and its parts medians of the steps from the fourth on, without the one that lost a worker.
                         rollout_s is sampling with torchrun, and what the learner waited for samples with Ray
    lost_step_s          the step that lost a worker, which a new one sampled for
    is_same              True if every step has the tokens and the gradient norms of the run that lost none
    staleness            the most of a step; resampled_prompts of the whole run

The model has random weights in the shape and a byte-level tokenizer; a sample is rewarded if its first token
is even, so that every step learns. Each run is a process group of its own and has demo_long's options.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.start import write_checkpoint
from qerl.bench.measure import cuda_device
from qerl.bench.options import BenchOptions
from qerl.bench.record import row_writer
from qerl.config import LearnConfig
from qerl.config.check import check_positive
from qerl.errors import RunError, UserError, require
from qerl.models.random_weights import shape
from qerl.tracking.json_lines import read_lines

_WARM_UP, _GROUP = 3, 8  # steps that are not counted; samples of a prompt
_REWARD = """\
def even(prompts, completions, completion_ids, **columns):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""
_TIMES = "step_s", "rollout_s", "learn_s", "publish_s"
_SAME = "sampled_tokens", "reward", "grad_norm", "entropy"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplersOptions(BenchOptions):
    shape: str = "qwen2.5-1.5b"
    """Shape of the model; its weights are random."""

    gpus: int = 4
    """GPUs of this host that a run uses."""

    num_prompts: int = 32
    """Prompts of a step, with 8 samples each."""

    max_tokens: int = 512
    """Most tokens of a sample; nearly all have as many."""

    num_steps: int = 8
    """Steps of a run."""

    kill_after: int = 3
    """Steps after which a worker is killed."""

    timeout_s: int = 300
    """Seconds after which a run counts as hung."""

    def __post_init__(self):
        check_positive(self, "num_prompts", "max_tokens", "kill_after", "timeout_s")
        require(self.gpus >= 2, f"gpus must be at least 2, got {self.gpus}")
        min_steps = max(_WARM_UP + 2, self.kill_after + 2)
        require(self.num_steps >= min_steps, f"num_steps must be at least {min_steps}, got {self.num_steps}")


def bench_samplers(options: SamplersOptions) -> None:
    """Write a row for each way to use the GPUs."""
    cuda_device()
    if (num_gpus := torch.cuda.device_count()) < options.gpus:
        raise UserError(f"gpus is {options.gpus}, and there are {num_gpus}")
    rows = row_writer(options)
    names = "shape", "gpus", "num_prompts", "max_tokens", "num_steps"
    case = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.shape, Path(folder) / "model")
        torch.cuda.empty_cache()  # the runs' own
        runs = {}
        for way in ("torchrun", "ray", "ray-killed"):
            is_killed = way == "ray-killed"
            runs[way] = run(
                command(way, options.gpus) + arguments(options, model),
                Path(folder) / way,
                kill_after=options.kill_after if is_killed else None,
                timeout_s=options.timeout_s,
            )
            measures = figures(runs[way], runs["ray"] if is_killed else None)
            rows.add({"bench": "samplers", "way": way, **case, "num_generations": _GROUP, **measures})


def write_model(name: str, folder: Path) -> Path:
    """Write the checkpoint with a tokenizer, the task's rows and its reward."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_checkpoint(shape(name), folder)
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    rows = (json.dumps({"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)}) for i in range(40))
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "even.py").write_text(_REWARD)
    return folder


def command(way: str, gpus: int) -> list[str]:
    if way == "torchrun":
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "-m", "qerl"]
        return [sys.executable, *start, "train", "demo_long"]
    ahead = ["--ray", "local", "--ray.num-samplers", str(gpus - 1), "--ray.max-staleness", "1"]
    return [sys.executable, "-m", "qerl", "train", "demo_long", *ahead]


def arguments(options: SamplersOptions, model: Path) -> list[str]:
    settings = {
        "model.path": model,
        "task.name": model / "sums.jsonl",
        "task.template": "{prompt}",
        "task.chat": "messages",
        "task.rewards": f"{model / 'even.py'}:even",
        "task.num-held-out": 4,
        "evaluate.num-prompts": 0,
        "num-prompts": options.num_prompts,
        "num-generations": _GROUP,
        "num-steps": options.num_steps,
        "sample.max-tokens": options.max_tokens,
        "learn.logprob-chunk-tokens": LearnConfig().logprob_chunk_tokens,  # demo_long's are for a CPU
    }
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def run(
    command: Sequence[str], out: Path, *, kill_after: int | None, timeout_s: float
) -> list[dict[str, Any]]:
    """Return the metrics of each step. kill_after: steps after which the second worker is killed."""
    log, metrics, end_s = out.with_suffix(".log"), out / "metrics.jsonl", time.monotonic() + timeout_s
    threads = str(max(1, (os.cpu_count() or 1) // 16))
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--out", str(out)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"OMP_NUM_THREADS": threads} | os.environ,
        )
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() > end_s:
                raise RunError(f"samplers: {out.name} did not end in {timeout_s:.0f} s")
            if kill_after and metrics.exists() and metrics.read_text().count("\n") >= kill_after:
                (pid,) = re.findall(r"^sampler 1 is process (\d+)", log.read_text(), flags=re.M)
                os.kill(int(pid), signal.SIGKILL)
                kill_after = None
    finally:
        _end(process)
    if kill_after and process.returncode == 0:
        raise RunError(f"samplers: {out.name} ended before a worker was killed")
    if process.returncode != 0:
        raise RunError(f"samplers: {out.name} ended with {process.returncode}: {log.read_text()[-2000:]}")
    return list(read_lines(metrics))


def _end(process: subprocess.Popen) -> None:
    """End a run that hangs. torchrun's ranks have process groups of their own, and it ends them itself."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figures(steps: list[dict[str, Any]], unbroken: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return a row's figures. unbroken: steps of the run that lost no worker."""
    lost = [step for step in steps if step.get("replaced_samplers")]
    counted = [step for step in steps[_WARM_UP:] if step not in lost]
    times = {name: round(statistics.median(step[name] for step in counted), 4) for name in _TIMES}
    row = {
        "samples_per_s": round(statistics.median(s["trained_samples"] / s["step_s"] for s in counted), 2),
        **times,
        "micro_tokens": steps[-1]["micro_tokens"],
        "staleness": max(step.get("staleness", 0.0) for step in steps),
    }
    if unbroken is None:
        return row
    return row | {
        "lost_step_s": round(sum(step["step_s"] for step in lost), 2),
        "replaced_samplers": sum(step["replaced_samplers"] for step in lost),
        "resampled_prompts": sum(step["resampled_prompts"] for step in steps),
        "is_same": _compared(steps) == _compared(unbroken),
    }


def _compared(steps: list[dict[str, Any]]) -> list[list[float]]:
    return [[step[name] for name in _SAME] for step in steps]
