"""Call reward functions for one sample, a group or a batch at a time, and put their values together.

    sample    one call for each sample, of all functions of this scope
    group     a call of each function for each group, which may compare the group's samples
    batch     a call of each function for all groups that are scored together, their samples in order; where
              it fails, another one for each group

A call that fails costs the samples that it was for. Each call is one job of a worker process, with one
deadline, whatever its scope; only a judge says that a call takes several (num_deadlines).
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.scoring import Arguments, Failure, Parts, RewardCall, Scope, name_of, scope_of, score
from qerl.tasks.worker_pool import Jobs, WorkerPool


class RewardFunctions:
    """Functions with their weights and scopes, and the processes that run them."""

    def __init__(
        self,
        pairs: Sequence[tuple[Callable[..., Any], float]],
        of_user: Sequence[Callable[..., Any]],
        config: TaskConfig,
    ):
        """pairs: functions and weights. of_user: the user's among them, for which config.reward_scope is."""
        self.functions = [function for function, _ in pairs]
        self.weights = [weight for _, weight in pairs]
        self._scopes: list[Scope] = [
            scope_of(each, config.reward_scope if any(each is mine for mine in of_user) else "sample")
            for each in self.functions
        ]
        self._deadline_s, self._pool = config.reward_timeout_s, None
        if pairs:
            memory_bytes = int(config.reward_memory_gb * 1e9)
            work = functools.partial(score, self.functions)
            self._pool = WorkerPool(work, num_workers=config.reward_workers, memory_bytes=memory_bytes)

    @property
    def of_batch(self) -> list[str]:
        """Names of the functions that are called for a batch."""
        pairs = zip(self.functions, self._scopes, strict=True)
        return [name_of(function) for function, scope in pairs if scope == "batch"]

    def begin(self, counts: Counter[str]) -> "FunctionScores | None":
        """Return the scores of a batch that begins; None without functions."""
        if self._pool is None:
            return None
        jobs = self._pool.begin(deadline_s=self._deadline_s)
        return FunctionScores(self.functions, self._scopes, jobs, counts)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()


@dataclasses.dataclass(slots=True)
class _GroupCalls:
    calls_G: list[Arguments]
    samples: range
    """Jobs of the samples, one for each; empty if no function is called so."""
    wholes: list[int]
    """Jobs of the whole group."""


class FunctionScores:
    """The values of functions for groups that come one after the other."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        scopes: Sequence[Scope],
        jobs: Jobs,
        counts: Counter[str],
    ):
        """scopes: one for each function."""
        self._functions, self._scopes, self._jobs, self._counts = functions, scopes, jobs, counts
        self._groups: dict[int, _GroupCalls] = {}

    def add(self, key: int, calls_G: list[Arguments]) -> None:
        """Begin to score a group by the arguments of each of its samples."""
        by_sample, by_group = self._of("sample"), self._of("group")
        each = self._jobs.add([RewardCall(by_sample, call) for call in calls_G] if by_sample else [])
        wholes = self._add_whole(by_group, calls_G)
        self._groups[key] = _GroupCalls(calls_G, each, wholes)

    @property
    def busy_s(self) -> float:
        return self._jobs.busy_s

    def poll(self) -> None:
        """Keep the workers busy; does not wait for them."""
        self._jobs.poll()

    def parts(self, keys: Sequence[int]) -> list[list[Parts]]:
        """Return what the functions gave to each sample of these groups, which are one batch."""
        groups = [self._groups[key] for key in keys]
        slices, num = [], 0
        for group in groups:
            slices.append(slice(num, num + len(group.calls_G)))
            num += len(group.calls_G)
        calls = [call for group in groups for call in group.calls_G]
        by_batch = self._of("batch") if calls else ()
        batches = self._add_whole(by_batch, calls)
        outcomes = self._jobs.wait()
        failed = {
            job: i for i, job in zip(by_batch, batches, strict=True) if isinstance(outcomes[job], Failure)
        }
        if by_batch:
            self._split(failed, [group for group in groups if group.calls_G])
            outcomes = self._jobs.wait()
        whole = [outcomes[job] for job in batches if not isinstance(outcomes[job], Failure)]
        return [
            self._of_group(group, outcomes, [parts_S[place] for parts_S in whole])
            for group, place in zip(groups, slices, strict=True)
        ]

    def _split(self, failed: dict[int, int], groups: list[_GroupCalls]) -> None:
        """Call the functions that failed for the batch for each of its groups alone. failed: by job."""
        if len(groups) == 1:  # it was alone
            groups[0].wholes += failed
            return
        self._counts["num_split_reward_batches"] += len(failed)
        for group in groups:
            group.wholes += self._add_whole(list(failed.values()), group.calls_G)

    def _add_whole(self, functions: Sequence[int], calls: Sequence[Arguments]) -> list[int]:
        """Begin a call of each of these functions for all samples of the calls; return the jobs."""
        if not calls:
            return []
        arguments, jobs = merged(calls), []
        for i in functions:
            of_call = getattr(self._functions[i], "num_deadlines", lambda num_samples: 1)
            num_deadlines = of_call(len(arguments["prompts"]))
            jobs += self._jobs.add([RewardCall((i,), arguments)], num_deadlines=num_deadlines)
        return jobs

    def _of_group(
        self, group: _GroupCalls, outcomes: list[list[Parts] | Failure], more: list[list[Parts]]
    ) -> list[Parts]:
        """more: what functions gave that were called for the batch."""
        num = len(group.calls_G)
        by_sample = [outcomes[job] for job in group.samples] or [[{}] for _ in range(num)]
        parts_G = [each if isinstance(each, Failure) else each[0] for each in by_sample]
        outcomes_W = [outcomes[job] for job in group.wholes]
        wholes = [*more, *([each] * num if isinstance(each, Failure) else each for each in outcomes_W)]
        if set(self._scopes) != {"sample"}:
            is_failed = any(num and all(isinstance(p, Failure) for p in each) for each in wholes)
            self._counts["num_failed_reward_groups"] += is_failed
        for each in wholes:
            parts_G = [_joined(*pair) for pair in zip(parts_G, each, strict=True)]
        return parts_G

    def _of(self, scope: Scope) -> tuple[int, ...]:
        return tuple(index for index, each in enumerate(self._scopes) if each == scope)


def merged(calls: Sequence[Arguments]) -> Arguments:
    """Return the arguments of one call for the samples of these calls; None where a row lacks a column."""
    names = dict.fromkeys(name for call in calls for name in call)
    return {name: [value for call in calls for value in call.get(name, [None])] for name in names}


def _joined(first: Parts, second: Parts) -> Parts:
    if isinstance(first, Failure):
        return first
    return second if isinstance(second, Failure) else first | second
