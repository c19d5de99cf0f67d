"""Train the job of peer.py by qerl, and read its own figures of each step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from qerl.config import RunConfig
from qerl.learner.checkpoint import latest_adapter
from qerl.tracking.json_lines import read_lines
from qerl.training.session import train


def train_by_qerl(config: RunConfig, add: Callable[[dict[str, Any]], None]) -> dict[str, Tensor]:
    """Train, give each step's figures to `add`, and return the adapter."""
    train(config)
    for record in read_lines(Path(config.out) / "metrics.jsonl"):
        generate_s, reward_s = record["rollout_s"], record.get("reward_s", 0.0)
        add(
            {
                "step": record["step"],
                "step_s": round(record["step_s"], 4),
                "generate_s": round(generate_s, 4),
                "reward_s": round(reward_s, 4),
                "learn_s": round(record["step_s"] - generate_s - reward_s, 4),
                "tokens": record["sampled_tokens"],
                "tokens_per_s": round(record["sampled_tokens"] / generate_s, 1),
                "reward": record["reward"],
                "entropy": record["entropy"],
                "memory_gb": round(record["memory_gb"], 3),
            }
        )
    return latest_adapter(Path(config.out) / "checkpoints")
