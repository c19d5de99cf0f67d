"""The rollouts of a distillation: the student's samples, rows to imitate if asked, and what the teacher says.

    samples     of num_prompts prompts, less the share of rows
    rows        of distil.data, num_generations for each prompt that is replaced
    teacher     scores all of them; with several ranks each scores its share

A sample that the teacher fails on is left out of the loss and counted. The task's reward, if it has one, is
measured and not learned from.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from qerl.config import RunConfig, SftConfig
from qerl.errors import RunError, quantity
from qerl.learner.distributed import Ranks
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.checkpoint.tokenizer import stop_token_ids
from qerl.tasks.rows.demonstrations import Demonstration
from qerl.tasks.rows.sft_rows import DEMONSTRATIONS, SftRows
from qerl.tasks.rows.table import check_file
from qerl.tasks.scoring import Failure
from qerl.tracking import StepLog
from qerl.training.rollouts.rollout import GroupRollouts, Rewards, TrainPrompts
from qerl.training.rollouts.teacher import Teacher
from qerl.types import Group, RolloutEngine, TeacherLogprobs


class DistilRollouts:
    def __init__(
        self,
        config: RunConfig,
        engine: RolloutEngine,
        rewards: Rewards,
        train_prompts: TrainPrompts,
        *,
        teacher: Teacher,
        rows: SftRows[Demonstration] | None,
        ranks: Ranks,
        notice: Callable[[str], None],
    ):
        """rows: of `read_off_policy_rows`."""
        self._teacher, self._rows, self._ranks, self._notice = teacher, rows, ranks, notice
        num_replaced = round(config.distil.off_policy_share * config.num_prompts)
        self._num_rows = num_replaced * config.num_generations
        self._sampled: GroupRollouts | None = None
        if num_replaced < config.num_prompts:
            sampled = dataclasses.replace(
                config,
                num_prompts=config.num_prompts - num_replaced,
                learn=dataclasses.replace(config.learn, updates_per_step=1),
            )
            self._sampled = GroupRollouts(sampled, engine, rewards, train_prompts)

    def state(self) -> dict[str, float] | None:
        """None: all groups are rows."""
        return None if self._sampled is None else self._sampled.state()

    def load(self, state: dict[str, float] | None) -> None:
        if self._sampled is not None and state is not None:
            self._sampled.load(state)

    def sample(self, step: int, log: StepLog) -> list[Group]:
        """Return the step's groups, each sample with the teacher's logprobs."""
        groups = [] if self._sampled is None else self._sampled.sample(step, log)
        if self._rows is not None and self._num_rows:
            groups = [*groups, *self._rows.batch(step, self._num_rows)]
        with log.span("teacher"):
            of_share = self._teacher.score(self._ranks.share(groups))
            scores_P_G = self._ranks.interleave(self._ranks.gather(of_share))
        failures = [score for scores_G in scores_P_G for score in scores_G if isinstance(score, Failure)]
        log.add(num_failed_teacher=len(failures))
        self._report(failures, sum(map(len, scores_P_G)))
        return [with_teacher_logprobs(*pair) for pair in zip(groups, scores_P_G, strict=True)]

    def _report(self, failures: list[Failure], num_samples: int) -> None:
        """Notice each cause with an example; raise RunError if every sample has failed."""
        counts = Counter(failure.cause for failure in failures)
        examples = {failure.cause: failure.message for failure in failures}
        if failures and len(failures) == num_samples:
            cause, count = counts.most_common(1)[0]
            raise RunError(
                f"distil.teacher: no sample of the step has the teacher's logprobs; {count} of {num_samples}:"
                f" {cause}: {examples[cause]}; the same command resumes from the last checkpoint"
            )
        for cause, count in counts.items():
            samples = quantity(count, "sample")
            self._notice(f"no teacher's logprobs for {samples}: {cause}: {examples[cause]}")


def with_teacher_logprobs(group: Group, scores_G: list[TeacherLogprobs | Failure]) -> Group:
    """Return the group with the teacher's logprobs of each sample, except where that failed."""
    samples_G = [
        sample if isinstance(score, Failure) else dataclasses.replace(sample, teacher=score)
        for sample, score in zip(group.samples_G, scores_G, strict=True)
    ]
    return dataclasses.replace(group, samples_G=samples_G)


def read_off_policy_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> SftRows[Demonstration] | None:
    """Read distil.data as `qerl sft` does; None without off_policy_share."""
    distil, source = config.distil, locate(config.model.path)
    if not (distil.is_on and distil.off_policy_share):
        return None
    check_file("distil.data", distil.data)
    max_length = min(2048, architecture_of(source.open()).max_positions)  # that of qerl sft
    allowed = config.task.allow_special_tokens
    sft = SftConfig(
        data=distil.data,
        split=distil.split,
        eval_fraction=0.0,
        max_length=max_length,
        allow_special_tokens=allowed,
    )
    stop_ids = stop_token_ids(tokenizer, source)
    return SftRows.read(sft, tokenizer, stop_ids, DEMONSTRATIONS, max_evaluated=0, seed=config.seed)
