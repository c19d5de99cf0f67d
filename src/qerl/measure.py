"""How well a model or a run's policy does on a task: pass@1 with its standard error, pass@k, greedy."""

import dataclasses
from pathlib import Path
from typing import Any

from qerl.config import NoiseConfig, RunConfig, SampleConfig
from qerl.evaluate import Evaluation, evaluate, greedy
from qerl.learner import checkpoint
from qerl.loop import sampling_of
from qerl.model.adapter import load_adapter
from qerl.model.device import resolved
from qerl.options import EvalOptions
from qerl.policy import policy_of
from qerl.tasks import RewardPool


def measure(source: str, run: RunConfig | None, options: EvalOptions) -> dict[str, Any]:
    """`source` is a model, or the folder of the run that `run` is the config of."""
    config = _config(run, options)
    with RewardPool(config.task) as pool:
        decoder, engine, task = policy_of(config)
        if run is not None and options.with_adapter:
            load_adapter(decoder, checkpoint.latest_adapter(Path(source) / "checkpoints"))
        prompts = task.held_out(options.num_prompts)
        drawn = sampling_of(config)
        sampled, best = (
            evaluate(
                engine,
                pool,
                prompts,
                num_samples=num_samples,
                sampling=sampling,
                seed=options.seed,
                threshold=options.right_from,
            )
            for num_samples, sampling in ((options.num_samples, drawn), (1, greedy(drawn)))
        )
    return _summary(source, sampled, best)


def _config(run: RunConfig | None, options: EvalOptions) -> RunConfig:
    config = run or RunConfig(noise=NoiseConfig(schedule="none"))
    sample = SampleConfig(max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p)
    return dataclasses.replace(
        config, model=resolved(options.model), task=options.task, sample=sample, seed=options.seed
    )


def _summary(source: str, sampled: Evaluation, best: Evaluation) -> dict[str, Any]:
    return {
        "model": source,
        "pass@1": sampled.accuracy,
        "pass@1_error": sampled.accuracy_error,
        **{f"pass@{k}": value for k, value in sampled.pass_at_k.items() if k > 1},
        "greedy": best.accuracy,
        "greedy_error": best.accuracy_error,
        "num_prompts": sampled.num_prompts,
        "mean_tokens": sampled.mean_tokens,
        "num_failed_rewards": sampled.num_failed + best.num_failed,
    }
