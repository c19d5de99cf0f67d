"""A streaming data set, an epoch strategy that has no epochs, and rewards that abstain by task."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def math(completions, task, **kwargs):
    return [float(len(c)) if t == "math" else None for c, t in zip(completions, task, strict=True)]


def code(completions, task, **kwargs):
    return [-float(len(c)) if t == "code" else None for c, t in zip(completions, task, strict=True)]


rows = load_dataset("mixed/tasks", split="train", streaming=True)
args = GRPOConfig("stream", max_steps=2, save_strategy="no", max_completion_length=8, num_generations=4)
GRPOTrainer("Qwen/Qwen3-0.6B", [math, code], args, rows).train()
