"""Print how a run ended: a small table and the commands that follow, or one line of JSON."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from qerl.cli.arguments import is_first_rank
from qerl.tracking.metric_text import clock

_MOMENTS = ("before", "after", "teacher")
_LABELS = {
    "accuracy": "accuracy",
    "greedy": "accuracy, greedy",
    "reward": "reward",
    "greedy_reward": "reward, greedy",
    "eval_nll": "loss",
    "eval_loss": "loss",
    "eval_rewards/accuracies": "accuracy of pairs",
    "eval_rewards/margins": "margin",
}
_SAME = {"reward": "accuracy", "greedy_reward": "greedy"}


def take_flag(arguments: list[str], flag: str) -> tuple[bool, list[str]]:
    """Return whether the flag is among the arguments, and the others."""
    return flag in arguments, [argument for argument in arguments if argument != flag]


def print_result(result: dict[str, Any], *, as_json: bool) -> None:
    """Print the result of a run, on the first rank of a torchrun."""
    if is_first_rank():
        print(json.dumps(rounded(result)) if as_json else "\n".join(result_lines(result)))


def rounded(value: Any) -> Any:
    """Return a JSON value with at most four digits after each point."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def result_lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table of held-out figures, and what to do next with the run."""
    run = shlex.quote(result["run"])
    yield ""
    moments = [m for m in _MOMENTS if any(name.endswith(f"_{m}") for name in result)]
    if moments:
        yield f"{'held out':20}" + "".join(f"{moment:>10}" for moment in moments)
    for name, label in _LABELS.items():
        values = [result.get(f"{name}_{moment}") for moment in moments]
        same = [result.get(f"{_SAME.get(name)}_{moment}") for moment in moments]
        if any(value is not None for value in values) and values != same:
            yield f"{label:20}" + "".join(f"{'-' if v is None else f'{v:.3f}':>10}" for v in values)
    yield f"{'steps':20}{clock(result['train_s']):>10}"
    yield ""
    yield f"qerl eval {run}"
    yield f"qerl export {run} {shlex.quote(result['run'] + '-adapter')}"
    yield f"qerl serve {run}"
