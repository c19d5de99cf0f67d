"""The environment `higher_lower`: answer a wrong number with a hint and ask again.

    right in turn 1, 2, 3, ...   ->  reward 1, 1/2, 1/4, ...; the end
    wrong                        ->  reward 0, "The answer is higher. Answer with just the number."

As in the reward `numeric`, the last number of a turn is compared with the last one in the answer column.
"""

from typing import Any

from qerl.config import TaskConfig
from qerl.tasks.graders import gold_number, last_number


class HigherLower:
    answer_column = "answer"
    deterministic = True

    async def reset(self, row: dict[str, Any]) -> None:
        self._answer, self._reward = gold_number(row.get(self.answer_column)), 1.0

    async def step(self, completion: str) -> tuple[str | None, float, bool]:
        number = last_number(completion)
        if number == self._answer:
            return None, self._reward, True
        self._reward /= 2
        hint = "That is not a number."
        if number is not None:
            hint = f"The answer is {'higher' if number < self._answer else 'lower'}."
        return f"{hint} Answer with just the number.", 0.0, False


def higher_lower(config: TaskConfig) -> type[HigherLower]:
    """Return the environment class for the config's answer column."""
    return type("higher_lower", (HigherLower,), {"answer_column": config.answer_column})
