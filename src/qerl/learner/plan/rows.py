"""The number of rows that a micro-batch has."""

from qerl.config import RunConfig


def full_rows(config: RunConfig, prompt_tokens: int) -> int:
    """Return the most rows of a micro-batch whatever the samples' lengths: shorter ones fill it better."""
    group = prompt_tokens + config.num_generations * (config.sample.max_tokens - 1)
    all_rows = group * _num_groups(config)
    return max(min(config.learn.microbatch_tokens, all_rows), microbatch_rows(config, prompt_tokens))


def microbatch_rows(config: RunConfig, prompt_tokens: int) -> int:
    """Return the rows of the largest micro-batch if all samples have the maximum length.

    It holds whole groups, or parts of a group with as many samples as fit, at least one. learner/packing.py
    makes them no larger, and of about one size. With branches, there is one more group for each sample.
    """
    limit, branch = config.learn.microbatch_tokens, config.sample.max_tokens - 1
    group = prompt_tokens + config.num_generations * branch
    num_groups = _num_groups(config)
    if group <= limit:
        return group * min(limit // group, num_groups)
    most = space = 0
    for _ in range(num_groups):
        left = config.num_generations
        while left:
            space = space if space >= prompt_tokens + branch else limit
            count = min(max((space - prompt_tokens) // max(branch, 1), 1), left)
            space, left = space - prompt_tokens - count * branch, left - count
            most = max(most, limit - space)
    return most


def _num_groups(config: RunConfig) -> int:
    """Return the groups of an update."""
    num_groups = config.num_prompts * (1 if config.algo.branching == "none" else 1 + config.num_generations)
    return -(-num_groups // config.learn.updates_per_step)
