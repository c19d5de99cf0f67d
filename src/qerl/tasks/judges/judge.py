"""The reward `judge`: a model behind an OpenAI-compatible endpoint rates samples by a rubric (rubric.py).

    reward = (score - min_score) / (max_score - min_score)        score: the last one in the judge's reply

Replies, and the number and cost of requests, are in a file that the worker processes share (ledger.py). A
reply without a score, or a request that fails, costs its sample alone. A call of several requests has 4 of
them open at once. The key is in the environment variable QERL_JUDGE_KEY, and nowhere else.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import require
from qerl.tasks.judges.ledger import Ledger, cost_of, highest_cost
from qerl.tasks.judges.openai_client import OpenAIClient, RequestFailed
from qerl.tasks.judges.rubric import JudgeFailed, JudgeRequest, rubric_of
from qerl.tasks.scoring import Failure, Scope, failure_of

KEY_VARIABLE = "QERL_JUDGE_KEY"
_OPEN_REQUESTS = 4


class Judge:
    """The reward; raises UserError if its settings cannot work."""

    __name__ = "judge"

    def __init__(self, config: TaskConfig):
        settings = config.judge
        require(settings.url != "", "the reward judge needs task.judge.url: the URL of an endpoint, or base")
        limit, cost = settings.max_cost, highest_cost(settings, "")
        may_ask = limit is None or cost <= limit
        require(may_ask, f"task.judge.max_cost is {limit}, but a request may cost {cost:.4g} and more")
        self._settings, self._model = settings, settings.model
        self._rubric = rubric_of(settings)
        self._client = OpenAIClient(
            settings.url, key_variable=KEY_VARIABLE, timeout_s=settings.timeout_s, retries=settings.retries
        )
        self._ledger = Ledger(settings)

    @property
    def reward_scope(self) -> Scope:
        return self._rubric.scope

    def num_deadlines(self, num_samples: int) -> int:
        """Return the largest number of requests of a call that are made one after the other."""
        return max(1, math.ceil(self._rubric.max_requests(num_samples) / _OPEN_REQUESTS))

    def __call__(self, **arguments: list[Any]) -> list[float | Failure]:
        """Return a number in [0, 1] for each sample of the call, or why there is none."""
        requests = self._rubric.requests(arguments)
        with ThreadPoolExecutor(_OPEN_REQUESTS) as threads:
            scores = list(threads.map(self._scores, requests))
        return self._rubric.rewards(arguments, scores)

    def _scores(self, request: JudgeRequest) -> list[float] | Failure:
        try:
            reply = self._ledger.reply(request.message)
            if reply is not None:
                return self._rubric.scores(reply, request)
            reply = self._ask(request.message)
            scores = self._rubric.scores(reply, request)
        except JudgeFailed as error:
            return failure_of("judge", error)
        self._ledger.keep(request.message, reply)  # only what can be read: another try may be better
        return scores

    def _ask(self, message: str) -> str:
        answer = self._answer(message)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            content = None
        if not isinstance(content, str):
            raise JudgeFailed("the endpoint's answer has no message")
        return content

    def _answer(self, message: str) -> dict[str, Any]:
        request, cost, reserved = None, None, highest_cost(self._settings, message)

        def begin_again() -> None:
            nonlocal request
            if request is not None:
                self._ledger.settle(request, None)
            request = None
            request = self._ledger.begin(reserved)

        try:
            self._model = self._model or self._client.first_model()
            begin_again()
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": message}],
                "temperature": 0,
                "max_tokens": self._settings.max_tokens,
            }
            answer = self._client.post("chat/completions", body, begin_again)
            cost = cost_of(self._settings, answer.get("usage"))
            return answer
        except RequestFailed as error:
            cost = 0.0 if error.is_free else None
            raise JudgeFailed(f"{error.cause}: {error.message}") from None
        finally:
            if request is not None:
                self._ledger.settle(request, cost)
