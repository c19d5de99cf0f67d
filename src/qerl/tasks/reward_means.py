"""Average the values of each of several rewards, before their weights: the metrics `rewards/NAME/mean`."""

import itertools
import math
from collections.abc import Mapping, Sequence

from qerl.tasks.scoring import Failure

Sums = Mapping[str, tuple[float, int]]
"""{"tags": (2.5, 8)}: the sum of a reward's values, and their number."""


class RewardTally:
    """Collects the values of each reward until they are taken."""

    def __init__(self, names: Sequence[str]):
        """names: of the rewards; the second one of a name gets _2 at its end."""
        self._names = distinct_names(names)
        self._values: dict[str, list[float]] = {name: [] for name in self._names}

    def add(self, index: int, values: Sequence[float | Failure | None]) -> None:
        """Add values of the reward at this index; a failure, or None, is no value."""
        self._values[self._names[index]] += [each for each in values if isinstance(each, float | int)]

    def take(self) -> Sums:
        """Return the sums, and begin anew."""
        taken, self._values = self._values, {name: [] for name in self._names}
        return {name: (math.fsum(each), len(each)) for name, each in taken.items()}


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return a, a_3, a_2 for a, a, a_2: a repeated name gets the first number that no other name has."""
    distinct: dict[str, None] = {}
    for name in names:
        if name in distinct:
            numbered = (f"{name}_{number}" for number in itertools.count(2))
            name = next(each for each in numbered if each not in distinct and each not in names)
        distinct[name] = None
    return list(distinct)


def reward_means(sums: Sequence[Sums]) -> dict[str, float]:
    """Return the metric of each of several rewards that has values, by what each rank has taken."""
    totals = {name: [each[name] for each in sums] for name in (sums[0] if sums else ())}
    if len(totals) < 2:
        return {}
    pairs = {name: tuple(map(sum, zip(*each, strict=True))) for name, each in totals.items()}
    return {f"rewards/{name}/mean": total / count for name, (total, count) in pairs.items() if count}
