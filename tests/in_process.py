"""Rewards, votes and chat templates computed in the process of the run, for tests of other things.

A reward worker is three processes, a template one, and each fork of a process of a gigabyte takes about 0.03
CPU seconds. The real ones run in tests/tasks, tests/faults and two files of tests/training (conftest.py);
rewards that run programs, environments and agents have their processes everywhere.
"""

import functools
import pickle
from collections.abc import Callable
from typing import Any

from qerl.errors import UserError
from qerl.tasks import majority_vote, reward, reward_calls, template_process
from qerl.tasks.scoring import score
from qerl.tasks.worker_pool import Jobs, WorkerPool


class InProcessPool(WorkerPool):
    """Does each job when it is given; like a worker, with copies of items and outcomes."""

    def _start(self) -> None:
        """It needs no process."""

    def begin(self, *, deadline_s: float) -> Jobs:
        self.jobs = Jobs(self, deadline_s)
        return self.jobs

    def advance(self, jobs: Jobs, *, waits: bool) -> None:
        while jobs.waiting:
            index = jobs.waiting.popleft()
            jobs.outcomes[index] = _copied(self._work(_copied(jobs.items[index])))

    def stop(self) -> None:
        """Nothing was started."""


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _pool(work: Callable[[Any], Any], **settings: Any) -> WorkerPool:
    is_plain = isinstance(work, functools.partial) and work.func is score
    if is_plain and not any(hasattr(function, "notice") for function in work.args[0]):
        return InProcessPool(work, **settings)
    return WorkerPool(work, **settings)


def _render(_: object, tokenizer: Any, messages: Any, options: dict[str, Any]) -> str:
    text, reason = template_process._rendered(tokenizer, messages, options)
    if text is None:
        raise UserError(reason)
    return text


def install_pools(patch: Any) -> None:
    patch.setattr(reward, "WorkerPool", _pool)
    patch.setattr(reward_calls, "WorkerPool", _pool)
    patch.setattr(majority_vote, "WorkerPool", InProcessPool)


def install_templates(patch: Any) -> None:
    patch.setattr(template_process.TemplateProcess, "render", _render)
