"""Sample a task's prompts for a calibration, in as few calls of the engine as its tokens allow.

A call takes as many steps as its longest sample has tokens, however few samples run. The first call has the
prompts that are needed if every sample is as long as it may be, so none is sampled in vain; the next ones
have those that the mean length so far asks for.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from qerl.config import RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.engine.stats import Stats
from qerl.tasks import Task
from qerl.training.calibration_cache import new_prompts
from qerl.training.rollouts.evaluation import EVALUATION_STEP
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

NUM_SAMPLES, MAX_SAMPLE_TOKENS = 4, 256
MAX_BATCHES = 32
"""Batches of num_prompts training prompts that may be sampled."""
_ENOUGH = 0.95
"""No further call is made for less than the rest of this share of the wanted tokens."""

SampledGroups = list[tuple[list[int], list[list[int]]]]
"""Prompts, each with its distinct samples."""


class CalibrationSamples(NamedTuple):
    groups: SampledGroups
    stats: Stats
    num_calls: int


def sample_groups(config: RunConfig, engine: LocalEngine, task: Task, num_wanted: int) -> CalibrationSamples:
    """Return num_wanted tokens, a little more or less, of prompts and samples, if the task has as many."""
    max_tokens = min(config.sample.max_tokens, MAX_SAMPLE_TOKENS)
    sampling = dataclasses.replace(sampling_of(config), max_tokens=max_tokens)
    prompts = itertools.chain.from_iterable(new_prompts(config, task, MAX_BATCHES))
    groups, stats, num_tokens, num_calls = SampledGroups(), Stats(), 0, 0
    while num_tokens < _ENOUGH * num_wanted and (first := next(prompts, None)) is not None:
        mean = num_tokens / len(groups) if groups else len(first.tokens_T) + NUM_SAMPLES * max_tokens
        num_prompts = math.ceil((num_wanted - num_tokens) / mean)
        request = GenerateRequest(
            [first, *itertools.islice(prompts, num_prompts - 1)],
            num_samples=NUM_SAMPLES,
            sampling=sampling,
            seed=config.seed,
            step=EVALUATION_STEP,
        )
        for group in engine.generate(request):
            distinct = dict.fromkeys(tuple(sample.tokens_T) for sample in group.samples_G)
            groups.append((group.prompt.tokens_T, list(map(list, distinct))))
        num_tokens = sum(len(prompt) + sum(map(len, samples)) for prompt, samples in groups)
        stats, num_calls = stats + engine.stats, num_calls + 1
    return CalibrationSamples(groups, stats, num_calls)
