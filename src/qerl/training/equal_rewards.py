"""Notice a run that learns nothing, as the rewards within its groups do not differ."""

from collections.abc import Mapping

from qerl.config import RunConfig

NUM_STEPS, MIN_INFORMATIVE = 10, 0.1


class EqualRewards:
    """Count the steps in a row in which under a tenth of the groups had rewards that differ.

    Not where a run learns otherwise too: from a teacher, from branches of a sample, from groups that were
    drawn in place of equal ones, or from the lengths of samples."""

    def __init__(self, config: RunConfig):
        self._num_steps = 0
        algo = config.algo
        learns_otherwise = algo.branching != "none" or algo.dynamic_sampling or algo.overlong == "shape"
        self._is_told = not (learns_otherwise or config.distil.is_on)

    def notice(self, metrics: Mapping[str, float]) -> str | None:
        """Take a step's metrics; return a line at the tenth such step in a row."""
        if not self._is_told or "reward" not in metrics or "informative" not in metrics:
            return None
        self._num_steps = self._num_steps + 1 if metrics["informative"] < MIN_INFORMATIVE else 0
        if self._num_steps != NUM_STEPS:
            return None
        return (
            f"for {NUM_STEPS} steps under {MIN_INFORMATIVE:.0%} of the groups had rewards that differ (mean"
            f" reward of the last {metrics['reward']:.3f}), and equal rewards teach nothing: take rows that"
            " the model solves sometimes, more samples a prompt, or a reward that tells its answers apart"
        )
