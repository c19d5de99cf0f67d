"""Which samples of a problem give the same answer, for a majority to be counted.

    votes("math", ["It is 0.5.", r"\\boxed{\\frac12}", "3", ""])  ->  ["0.5", "0.5", "3", None]

A vote is the answer as the first of those wrote it who gave it; None gives none. Equal is what the grader of
the same name calls equal. The work is done in a process that can be killed, since comparing may not end; then
answers are equal only as strings.
"""

from collections.abc import Callable
from functools import partial

from qerl.tasks.answer import final_answers
from qerl.tasks.graders import last_number
from qerl.tasks.math_equal import is_equal
from qerl.tasks.worker_pool import WorkerLost, WorkerPool

_DEADLINE_S = 60.0


def exact_vote(text: str) -> str | None:
    return text.strip() or None


def numeric_vote(text: str) -> str | None:
    number = last_number(text)
    return None if number is None else str(number)


def math_vote(text: str) -> str | None:
    answers = final_answers(text)
    return answers[-1] if answers else None


_VOTES: dict[str, tuple[Callable[[str], str | None], Callable[[str, str], bool]]] = {
    "exact": (exact_vote, str.__eq__),
    "numeric": (numeric_vote, str.__eq__),
    "math": (math_vote, is_equal),
}


def votes(grader: str, texts_G: list[str]) -> list[str | None]:
    vote, equal = _VOTES[grader]
    spellings: dict[str, str] = {}
    for answer in filter(None, map(vote, texts_G)):
        if answer not in spellings:
            firsts = dict.fromkeys(spellings.values())
            spellings[answer] = next((first for first in firsts if equal(first, answer)), answer)
    return [None if (answer := vote(text)) is None else spellings[answer] for text in texts_G]


class Votes:
    """`votes` for many problems. Its processes start with it, and end with the `with` that it stands in."""

    def __init__(self, *, num_workers: int = 2):
        self._crew = WorkerPool(_work, num_workers=num_workers)

    def __enter__(self) -> "Votes":
        return self

    def __exit__(self, *exception: object) -> None:
        self._crew.stop()

    def count(self, grader: str, texts_P_G: list[list[str]]) -> list[list[str | None]]:
        outcomes = self._crew.run([(grader, texts_G) for texts_G in texts_P_G], deadline_s=_DEADLINE_S)
        as_strings = partial(map, _VOTES[grader][0])
        return [
            list(as_strings(texts_G)) if isinstance(outcome, WorkerLost) else outcome
            for outcome, texts_G in zip(outcomes, texts_P_G, strict=True)
        ]


def _work(item: tuple[str, list[str]]) -> list[str | None]:
    return votes(*item)


def voting_grader(rewards: tuple[str, ...]) -> str | None:
    """The first reward that reads an answer; None where a majority means nothing."""
    return next((name for name in rewards if name in _VOTES), None)
