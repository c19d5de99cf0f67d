"""Options of `python -m benchmarks peer`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from qerl.config.check import check_positive
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PeerOptions:
    files: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder with the model and gsm8k/."""

    by: Literal["qerl", "trl", "trl-static", "trl-continuous", "trl-vllm"] = "qerl"
    """trl: TRL's GRPOTrainer, which samples by model.generate. trl-static: with a KV cache of fixed size.
    trl-continuous: by transformers' continuous batching. trl-vllm: by vLLM in the same process."""

    model: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    """The hub's name of the model."""

    format: Literal["nvfp4", "mxfp4", "nf4", "fp8", "int8", "bf16"] = "bf16"
    """qerl: format of the frozen weights. TRL's are in BF16."""

    num_steps: int = 20
    """Steps of 64 prompts with 8 samples each."""

    microbatch: int = 32
    """TRL: samples in a forward and backward pass, padded to the longest; take what fits."""

    seed: int = 0
    """Seed of the rows' order and of the samples."""

    test: bool = True
    """Answer all test problems afterwards."""

    out: Path | None = None
    """File to append the lines to."""

    def __post_init__(self):
        check_positive(self, "num_steps", "microbatch")
        require(self.by == "qerl" or self.format == "bf16", f"by {self.by} needs format bf16")


def bench_peer(options: PeerOptions) -> None:
    """Train and print a line for each step, then one with medians and the accuracy on all test problems."""
    from benchmarks.peers.peer import run_peer  # the studies need scipy, which no other benchmark does

    run_peer(options)
