"""Recipes: functions that return complete configs, to run as they are or to start from.

paper.py      the demos, GSM8K in minutes, and QeRL's own runs
methods.py    the long demo with one method each: losses, advantages, corrections, noise, precision
"""

from collections.abc import Callable

from qerl.config import RunConfig
from qerl.config.recipes.methods import METHODS
from qerl.config.recipes.paper import (
    PAPER,
    big_math,
    code,
    dapo_math,
    demo,
    demo_long,
    gsm8k,
    gsm8k_small,
    higher_lower,
    math,
    plain,
)

RECIPES: dict[str, Callable[[], RunConfig]] = PAPER | METHODS
