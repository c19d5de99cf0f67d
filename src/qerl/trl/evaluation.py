"""GRPOTrainer.evaluate: rewards of samples of held-out prompts, without noise."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from qerl.config import RunConfig
from qerl.config.stored import with_start_day
from qerl.errors import require
from qerl.learner import checkpoint
from qerl.tasks import RewardPool, Task
from qerl.tasks.reward import format_failures
from qerl.training.engines.multi_turn import with_environment
from qerl.training.policy import load_tokenizer_and_limit, load_trained_sampler
from qerl.training.rollouts.evaluation import EVALUATION_STEP, sample_and_score, sampled_tokens
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

_logger = logging.getLogger("qerl.trl")


def evaluate(
    config: RunConfig, functions: Sequence[Callable[..., Any]], *, num_samples: int
) -> dict[str, float]:
    """Sample every held-out prompt of config.task with the newest checkpoint of config.out, if any."""
    begin_s = time.perf_counter()
    checkpoints = Path(config.out) / "checkpoints"
    newest = checkpoint.find_latest(checkpoints)[0]
    with RewardPool(config.task, functions=functions) as pool:
        config = with_start_day(config, Path(config.out))
        tokenizer, max_prompt_tokens = load_tokenizer_and_limit(config)
        task = Task(config.task, tokenizer, seed=config.seed, max_prompt_tokens=max_prompt_tokens)
        sampler = load_trained_sampler(
            config, tokenizer, None if newest is None else checkpoints, _logger.warning
        )
        engine = with_environment(sampler, pool, config.task.environment, max_prompt_tokens)
        request = GenerateRequest(
            task.held_out(None),
            num_samples=num_samples,
            sampling=sampling_of(config),
            seed=config.seed,
            step=EVALUATION_STEP,
        )
        groups, rewards_P_G = sample_and_score(engine, pool.score, request)
        failures = pool.take_failures()
    failed = [sample for group in groups for sample in group.samples_G if sample.failure is not None]
    for line in format_failures(failures):
        _logger.warning(line)
    count = num_samples * len(groups)
    require(2 * len(failed) <= count, f"evaluate: {len(failed)} of {count} episodes have failed")
    known_P_G = [[r for r in rewards_G if r is not None] for rewards_G in rewards_P_G]
    known_P_G = [known for known in known_P_G if known]
    runtime_s = time.perf_counter() - begin_s
    return {
        "reward": fmean(r for known in known_P_G for r in known),
        "reward_std": fmean(map(pstdev, known_P_G)),
        "completions/mean_length": fmean(n for group in groups for n in sampled_tokens(group)),
        "num_prompts": len(groups),
        "runtime": round(runtime_s, 3),
        "samples_per_second": round(len(groups) * num_samples / runtime_s, 3),
    }
