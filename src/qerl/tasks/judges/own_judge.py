"""The reward `judge` with task.judge.url base: the run's own model without its adapter rates the samples.

Rubric and score are those of judge.py, the file of replies and limits those of ledger.py. The replies come
from this process, all of a step at once: `answer_by` says from what. They are greedy, so a second try would
say the same: there are no retries.
"""

import dataclasses
from collections.abc import Callable, Sequence

from qerl.config import TaskConfig
from qerl.errors import UserError, require
from qerl.tasks.judges.ledger import Ledger
from qerl.tasks.judges.rubric import JudgeFailed, JudgeRequest, rubric_of
from qerl.tasks.reward_calls import merged
from qerl.tasks.scoring import Arguments, Failure, failure_of

BASE = "base"
"""task.judge.url of this judge."""
Answer = Callable[[list[str]], list[str | Failure]]
"""Messages -> replies."""


class OwnJudge:
    __name__ = "judge"

    def __init__(self, config: TaskConfig):
        self._settings = config.judge
        name = config.judge.model
        require(name is None, f"task.judge.url base is the run's own model: unset task.judge.model {name}")
        self._rubric = rubric_of(self._settings)
        self._answer: Answer | None = None

    def answer_by(self, answer: Answer, name: str) -> None:
        """Take replies from here. name: of the model, under which they are kept."""
        settings = dataclasses.replace(self._settings, model=name)
        self._answer, self._ledger = answer, Ledger(settings)

    def score_groups(self, calls_P_G: Sequence[Sequence[Arguments]]) -> list[list[float | Failure]]:
        """Return the reward of each sample of each group, or why it has none."""
        if self._answer is None:
            raise UserError(
                "task.judge.url base rates samples while a model is trained; set the URL of an endpoint"
            )
        by_group = self._rubric.scope == "group"
        calls = [merged(calls_G) for calls_G in calls_P_G if calls_G]
        calls = calls if by_group else [call for calls_G in calls_P_G for call in calls_G]
        requests = [self._rubric.requests(call) for call in calls]
        scores = self._scores({each.message: each for several in requests for each in several})
        rewards = iter(
            reward
            for call, several in zip(calls, requests, strict=True)
            for reward in self._rubric.rewards(call, [scores[each.message] for each in several])
        )
        return [[next(rewards) for _ in calls_G] for calls_G in calls_P_G]

    def _scores(self, requests: dict[str, JudgeRequest]) -> dict[str, list[float] | Failure]:
        """Return the scores by message."""
        assert self._answer is not None
        scores: dict[str, list[float] | Failure] = {}
        unanswered: list[str] = []
        for message, request in requests.items():
            reply = self._ledger.reply(message)
            if reply is not None:
                scores[message] = self._read(reply, request)
                continue
            try:
                self._ledger.begin()
                unanswered.append(message)
            except JudgeFailed as error:  # a limit is reached
                scores[message] = failure_of("judge", error)
        for message, reply in zip(unanswered, self._answer(unanswered) if unanswered else (), strict=True):
            scores[message] = reply if isinstance(reply, Failure) else self._read(reply, requests[message])
            if isinstance(reply, str) and not isinstance(scores[message], Failure):
                self._ledger.keep(message, reply)
        return scores

    def _read(self, reply: str, request: JudgeRequest) -> list[float] | Failure:
        try:
            return self._rubric.scores(reply, request)
        except JudgeFailed as error:
            return failure_of("judge", error)
