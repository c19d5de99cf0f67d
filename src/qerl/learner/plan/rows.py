"""The number of rows that a micro-batch has."""

from qerl.config import RunConfig


def microbatch_rows(config: RunConfig, prompt_tokens: int) -> int:
    """Return the rows of the largest micro-batch if all samples have the maximum length.

    It holds whole groups, or parts of a group with as many samples as fit, at least one (learner/packing.py).
    With branches, there is one more group for each sample.
    """
    limit, branch = config.learn.microbatch_tokens, config.sample.max_tokens - 1
    group = prompt_tokens + config.num_generations * branch
    num_groups = config.num_prompts * (1 if config.algo.branching == "none" else 1 + config.num_generations)
    num_groups = -(-num_groups // config.learn.updates_per_step)
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
