"""Run one training job by qerl or by TRL on this machine: `python -m benchmarks peer FOLDER --by trl`.

FOLDER has the model and gsm8k/{train,test}.jsonl, as `python -m studies run gsm8k --files FOLDER` reads them.
The job is that of the studies: the same rows in the same order, prompts, reward, LoRA (rank, alpha, targets),
AdamW, constant rate, loss (dapo, clipped at 0.8 and 1.28, no KL), samples, tokens, temperature 1, one update
a step. TRL gets the weights that qerl reads, decoded to BF16. Lines of JSON, also appended to --out:

    of a step   step_s = generate_s + reward_s + learn_s, the rest of the step; tokens, that were sampled;
                tokens_per_s = tokens / generate_s; reward; memory_gb, the peak so far
    of the run  medians of the steps after the first, and accuracy on all test problems afterwards, unless
                --no-test. qerl's engine answers them with the adapter that was learned: one program
                measures all peers

What is set in TRL's favor: trl_peer.py.
"""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.peers.options import PeerOptions
from benchmarks.peers.qerl_peer import train_by_qerl
from qerl.config import LearnConfig, RunConfig
from qerl.models.device import resolve_device
from qerl.tracking.provenance import environment
from studies.catalog_real import BASE
from studies.real_models import test_figures, with_local_files
from studies.study import with_fields

_MEDIANS = "step_s", "generate_s", "reward_s", "learn_s", "tokens", "tokens_per_s"
_ACCURACIES = "greedy", "sampled", "strict_greedy", "strict_sampled", "pass@8", "maj@8"


def run_peer(options: PeerOptions, base: RunConfig = BASE) -> None:
    """Train and print a line for each step, then one with medians and the accuracy on all test problems."""
    steps: list[dict[str, Any]] = []

    def add(step: dict[str, Any]) -> None:
        steps.append(step)
        _write(options, step)

    with tempfile.TemporaryDirectory() as folder:
        config = peer_config(options, base, Path(folder))
        adapter = _trainer(options)(config, add)
        figures = test_figures(config, adapter) if options.test else {}
    kept = steps[1:] or steps
    medians = {name: statistics.median(step[name] for step in kept) for name in _MEDIANS}
    facts = environment(config.model.device)
    _write(
        options,
        {
            "num_steps": len(steps),
            **{name: round(value, 4) for name, value in medians.items()},
            "train_s": round(sum(step["step_s"] for step in steps), 3),
            "memory_gb": max(step["memory_gb"] for step in steps),
            **{name: figures[name] for name in _ACCURACIES if options.test},
            **{name: facts[name] for name in ("commit", "is_dirty", "device", "torch", "transformers")},
        },
    )


def peer_config(options: PeerOptions, base: RunConfig, folder: Path) -> RunConfig:
    """Return the job of all peers. folder: for its files."""
    fields = {
        "seed": options.seed,
        "num_steps": options.num_steps,
        "out": str(folder / "run"),
        "model.path": options.model,
        "model.format": options.format,
        "noise.schedule": "none",
        "evaluate.num_prompts": 0,
        "evaluate.every": None,
        "checkpoint.every": options.num_steps,
        "learn.warmup_ratio": 0.0,
        "learn.max_tokens_per_microbatch": LearnConfig().max_tokens_per_microbatch,
    }
    config = with_local_files(with_fields(base, fields), options.files)
    return dataclasses.replace(config, model=resolve_device(config.model))


def _trainer(
    options: PeerOptions,
) -> Callable[[RunConfig, Callable[[dict[str, Any]], None]], dict[str, Tensor]]:
    """Return what trains and returns the adapter by PEFT's names; it gets each step's figures."""
    if options.by == "qerl":
        return train_by_qerl
    from benchmarks.peers.trl_peer import TrlPeer  # TRL takes seconds to import

    return TrlPeer(options.microbatch, generation=options.by).train


def _write(options: PeerOptions, figures: dict[str, Any]) -> None:
    name = options.model.rpartition("/")[2]
    line = json.dumps({"bench": "peer", "by": options.by, "model": name, "format": options.format, **figures})
    print(line, flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(line + "\n")
