r"""Named benchmarks of `qerl eval`: data set, prompt and grader.

    gsm8k      openai/gsm8k:main          test    1,319   question, answer (ends in #### and a number)
    math-500   HuggingFaceH4/MATH-500     test      500   problem, answer
    aime24     HuggingFaceH4/aime_2024    train      30   problem, answer
    aime25     math-ai/aime25             test       30   problem, answer
    amc23      math-ai/amc23              test       40   question, answer (27.0 stands for 27)

`math-500=FILE` reads a file with the same columns. QeRL's paper names neither the copies nor the prompts;
the prompt is the one that the recipes train with.
"""

import dataclasses
from collections.abc import Iterable

from qerl.config import TaskConfig
from qerl.config.recipes.paper import GSM8K_TEMPLATE, MATH_TEMPLATE
from qerl.config.task import ROW_FILES
from qerl.errors import UserError, did_you_mean, require

_MATH = TaskConfig(split="test", prompt_column="problem", template=MATH_TEMPLATE, rewards=("math",))
BENCHMARKS = {
    "gsm8k": dataclasses.replace(
        _MATH, name="openai/gsm8k:main", prompt_column="question", template=GSM8K_TEMPLATE
    ),
    "math-500": dataclasses.replace(_MATH, name="HuggingFaceH4/MATH-500"),
    "aime24": dataclasses.replace(_MATH, name="HuggingFaceH4/aime_2024", split="train"),
    "aime25": dataclasses.replace(_MATH, name="math-ai/aime25"),
    "amc23": dataclasses.replace(_MATH, name="math-ai/amc23", prompt_column="question"),
}


def parse_benchmarks(arguments: Iterable[str]) -> dict[str, TaskConfig]:
    """Return the tasks by benchmark name."""
    tasks: dict[str, TaskConfig] = {}
    for name, task in map(parse_benchmark, arguments):
        require(name not in tasks, f"benchmark {name} is given twice")
        tasks[name] = task
    return tasks


def is_rows_file(argument: str) -> bool:
    """True for a file of the user's own, which is no named benchmark: my.jsonl, but not gsm8k=my.jsonl."""
    return "=" not in argument and argument.endswith(ROW_FILES)


def parse_benchmark(argument: str) -> tuple[str, TaskConfig]:
    """Parse `aime24`, or `aime24=FILE` with a file, a folder or another hub id."""
    name, equals, place = argument.partition("=")
    if name not in BENCHMARKS:
        choices = f"; choose from {', '.join(BENCHMARKS)} (BENCHMARK=FILE reads a file)"
        raise UserError(f"unknown benchmark {name}{did_you_mean(name, BENCHMARKS) or choices}")
    if equals and not place:
        raise UserError(f"{argument} needs a file, a folder or a hub id after =")
    return name, dataclasses.replace(BENCHMARKS[name], name=place or BENCHMARKS[name].name)
