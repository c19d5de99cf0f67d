"""What the commands other than train can be told."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from qerl.config import ModelConfig, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    with_adapter: bool = True
    """Of a run: with what it learned (its newest checkpoint), or without."""

    num_prompts: int = 256
    """Problems to try."""

    num_samples: int = 4
    """Samples of each problem at the temperature."""

    temperature: float = 1.0
    """Divides the logits; the greedy figure is always given too."""

    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability."""

    max_tokens: int = 1024
    """Longest sample."""

    seed: int = 0
    """Names the random numbers of the samples, and the problems of a procedural task."""

    right_from: float = 1.0
    """A sample counts as right when its reward is at least this."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    model: tyro.conf.Positional[str]
    """A folder with safetensors, a .gguf file, a hub id, or smollm2-135m-instruct."""

    out: tyro.conf.Positional[Path]
    """The folder to write."""

    format: Literal["nvfp4"] = "nvfp4"
    """The weights' format."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `qerl train` wrote."""

    out: Path | None = None
    """The page; by default report.html in the first run's folder."""
