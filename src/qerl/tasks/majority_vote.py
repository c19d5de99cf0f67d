"""Find which samples of a problem give the same answer, for majority voting.

    votes("math", ["It is 0.5.", r"\\boxed{\\frac12}", "3", ""])  ->  ["0.5", "0.5", "3", None]

A vote is the answer as the first sample with an equal answer wrote it; None is no answer. Answers are equal
if the grader of the same name says so. The comparison runs in a process that can be killed, because it may
not terminate; answers are then compared as strings.
"""

from collections.abc import Callable

from qerl.tasks.answer import final_answers
from qerl.tasks.graders import last_number
from qerl.tasks.math_equal import is_equal
from qerl.tasks.worker_pool import WorkerLost, WorkerPool

_DEADLINE_S = 60.0


_VOTES: dict[str, tuple[Callable[[str], str | None], Callable[[str, str], bool]]] = {
    "exact": (lambda text: text.strip() or None, str.__eq__),
    "numeric": (lambda text: None if (number := last_number(text)) is None else str(number), str.__eq__),
    "math": (lambda text: (final_answers(text) or [None])[-1], is_equal),
}
"""By grader: the answer that a text gives, and whether two answers are equal."""


def votes(grader: str, texts_G: list[str]) -> list[str | None]:
    vote, equal = _VOTES[grader]
    spellings: dict[str, str] = {}
    for answer in filter(None, map(vote, texts_G)):
        if answer not in spellings:
            firsts = dict.fromkeys(spellings.values())
            spellings[answer] = next((first for first in firsts if equal(first, answer)), answer)
    return [None if (answer := vote(text)) is None else spellings[answer] for text in texts_G]


class VotePool:
    """Run `votes` for many problems in worker processes. Use it in a `with` statement, which ends them."""

    def __init__(self, *, num_workers: int = 2):
        self._pool = WorkerPool(lambda item: votes(*item), num_workers=num_workers)

    def __enter__(self) -> "VotePool":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.stop()

    def count(self, grader: str, texts_P_G: list[list[str]]) -> list[list[str | None]]:
        outcomes = self._pool.run([(grader, texts_G) for texts_G in texts_P_G], deadline_s=_DEADLINE_S)
        return [
            list(map(_VOTES[grader][0], texts_G)) if isinstance(outcome, WorkerLost) else outcome
            for outcome, texts_G in zip(outcomes, texts_P_G, strict=True)
        ]


def voting_grader(rewards: tuple[str, ...]) -> str | None:
    """Return the first reward that compares answers; None if no majority can be taken."""
    return next((name for name in rewards if name in _VOTES), None)
