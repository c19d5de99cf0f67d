"""Measure what rounding a float model to 4 bits changes, and its time: `python -m benchmarks rounding`.

    nearest       each weight to its nearest code, the largest of a block to the largest (model.scales plain)
    search        block scales of the least squared error (model.scales mse)
    gptq          codes that keep the outputs on the task's prompts and the model's own samples, plain scales
    gptq+search   the same, with scales of the least squared error, weighted by the inputs

weight_error, kl (nats a token) and agreement are those of models/quantize/quantization_error.py, on held-out
prompts of the task: of each, all tokens but what all prompts begin with. seconds: from the float model's
files to the quantized model in memory; with gptq that is with the samples, and writing and reading the
checkpoint. Each case prints one line of JSON. Compare the kl of two cases on the same prompts only.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qerl.config import ModelConfig, RunConfig, SampleConfig, TaskConfig
from qerl.config.check import check_positive
from qerl.errors import require
from qerl.export.write import load_fp32_base
from qerl.learner.distributed import Ranks
from qerl.models.checkpoint.source import locate
from qerl.models.device import resolve_device
from qerl.models.quantize.quantization_check import prompt_probes
from qerl.models.quantize.quantization_error import Probe, quantization_error
from qerl.training.calibrated import with_calibrated_base
from qerl.training.policy import load_task

METHODS: dict[str, dict[str, Any]] = {
    "nearest": {"scales": "plain"},
    "search": {"scales": "mse"},
    "gptq": {"scales": "plain", "calibrate": "gptq"},
    "gptq+search": {"scales": "mse", "calibrate": "gptq"},
}
"""Fields of ModelConfig by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundingOptions:
    model: str = "smollm2-135m-instruct"
    """The float model: a folder, a .gguf file or a hub id."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    """Task whose training prompts GPTQ samples on and whose held-out prompts are measured."""

    formats: tuple[str, ...] = ("nvfp4",)
    """Formats to round to; gptq is for nvfp4."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Which of nearest, search, gptq, gptq+search."""

    num_prompts: int = 64
    """Held-out prompts."""

    max_tokens: int = 256
    """Longest sample that GPTQ calibrates on."""

    def __post_init__(self):
        check_positive(self, "num_prompts", "max_tokens")
        unknown = [name for name in self.methods if name not in METHODS]
        require(not unknown, f"methods: {', '.join(unknown)} is none of {', '.join(METHODS)}")


def bench_rounding(options: RoundingOptions) -> None:
    """Print a row of JSON for each format and method: errors on held-out prompts, and seconds."""
    probes: list[Probe] | None = None
    for format in options.formats:
        for method in options.methods:
            if "calibrate" in METHODS[method] and format != "nvfp4":
                continue
            with tempfile.TemporaryDirectory() as folder:
                config = _config(options, format, method, folder)
                if probes is None:
                    prompts = load_task(config)[1].held_out(options.num_prompts)
                    probes = prompt_probes([prompt.tokens_T for prompt in prompts], max_tokens=None)
                print(json.dumps({"format": format, "method": method} | _measure(config, probes)), flush=True)


def _config(options: RoundingOptions, format: str, method: str, folder: str) -> RunConfig:
    fields: dict[str, Any] = {"path": options.model, "format": format, **METHODS[method]}
    model, sample = ModelConfig(**fields), SampleConfig(max_tokens=options.max_tokens)
    return RunConfig(out=folder, model=resolve_device(model), task=options.task, sample=sample)


def _measure(config: RunConfig, probes: list[Probe]) -> dict[str, float]:
    original, begin = locate(config.model.path).open(), time.perf_counter()
    Path(config.out).mkdir(exist_ok=True)
    config = with_calibrated_base(config, Ranks(0, 1), lambda text: print(text, file=sys.stderr))
    decoder = load_fp32_base(config, torch.device(config.model.device))  # nothing but the weights is rounded
    if decoder.device.type == "cuda":
        torch.cuda.synchronize(decoder.device)
    seconds = time.perf_counter() - begin
    error = quantization_error(decoder, original, probes)
    return dataclasses.asdict(error) | {"seconds": round(seconds, 1)}
