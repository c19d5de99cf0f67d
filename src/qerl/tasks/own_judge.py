"""The reward `judge` with task.judge.url base: the run's own model without its adapter rates each sample.

Rubric, score, file of replies and limits are those of judge.py. The replies come from this process, all of a
step at once: `answer_by` says from what. They are greedy, so a second try would say the same: there are no
retries.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError, require
from qerl.tasks.judge import JudgeFailed, Ledger, Rubric, readable
from qerl.tasks.scoring import Failure, failure_of

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
        self._rubric = Rubric(self._settings)
        self._answer: Answer | None = None

    def answer_by(self, answer: Answer, name: str) -> None:
        """Take replies from here. name: of the model, under which they are kept."""
        settings = dataclasses.replace(self._settings, model=name)
        self._answer, self._ledger = answer, Ledger(settings)

    def score_calls(self, calls: Sequence[dict[str, list[Any]]]) -> list[float | Failure]:
        """Return the reward of each call's sample, or why it has none."""
        if self._answer is None:
            raise UserError(
                "task.judge.url base rates samples while a model is trained; set the URL of an endpoint"
            )
        messages = [self._message(call) for call in calls]
        replies = {message: self._ledger.reply(message) for message in messages}
        rewards: dict[str, float | Failure] = {}
        requests: list[str] = []
        for message in (message for message, reply in replies.items() if reply is None):
            try:
                self._ledger.take_turn()
                requests.append(message)
            except JudgeFailed as error:  # a limit is reached
                rewards[message] = failure_of("judge", error)
        for message, reply in zip(requests, self._answer(requests) if requests else (), strict=True):
            rewards[message] = reply if isinstance(reply, Failure) else self._reward(reply)
            if isinstance(reply, str) and isinstance(rewards[message], float):
                self._ledger.keep(message, reply)
        for message, reply in replies.items():
            if reply is not None:
                rewards[message] = self._reward(reply)
        return [rewards[message] for message in messages]

    def _message(self, call: dict[str, list[Any]]) -> str:
        row = {name: values[0] for name, values in call.items()}
        prompt, completion = readable(row.pop("prompts")), readable(row.pop("completions"))
        return self._rubric.message(prompt, completion, row)

    def _reward(self, reply: str) -> float | Failure:
        try:
            return self._rubric.reward(reply)
        except JudgeFailed as error:
            return failure_of("judge", error)
