"""Meaningless extremes of every numeric field of every config are refused in one line."""

import dataclasses
import typing
from pathlib import Path

import pytest

from qerl.cli.data import DataOptions
from qerl.cli.plan import PlanOptions
from qerl.cli.sft import SftOptions
from qerl.config import AgentConfig, RunConfig, SampleConfig, options
from qerl.config.bounds import MAX_SAMPLES
from qerl.config.conflicts import CONFLICTS
from qerl.config.recipes import RECIPES
from qerl.errors import UserError

FOLDER = Path("x")
MADE = {
    RunConfig: RunConfig(),
    SftOptions: SftOptions(),
    PlanOptions: PlanOptions(),
    DataOptions: DataOptions(),
    options.EvalOptions: options.EvalOptions(),
    options.GenerateOptions: options.GenerateOptions(),
    options.ServeOptions: options.ServeOptions(),
    options.QuantizeOptions: options.QuantizeOptions(model="m", out=FOLDER, calibrate="awq", data=FOLDER),
    options.ExportOptions: options.ExportOptions(run=FOLDER, out=FOLDER, form="nvfp4"),
}
HUGE, SMALL = (10**30, 1e308, 10**400), (1e-300, 5e-324)


def numeric(kind, before=()):
    """(names, its type: int or float, whether it is a tuple) of each field that may hold a number."""
    for name, hint in typing.get_type_hints(kind).items():
        text = str(hint) if not isinstance(hint, type) else hint.__name__
        if dataclasses.is_dataclass(hint):
            yield from numeric(hint, (*before, name))
        elif name != "gym_options" and ("int" in text or "float" in text) and "Literal" not in text:
            yield (*before, name), float if "float" in text else int, "tuple" in text.lower()


def with_value(settings, names, value):
    first, *rest = names
    inner = value if not rest else with_value(getattr(settings, first), rest, value)
    return dataclasses.replace(settings, **{first: inner})


FIELDS = [(kind, *field) for kind in MADE for field in numeric(kind)]


def test_the_fields_are_all_there():
    assert len(FIELDS) > 300
    assert {kind for kind, *_ in FIELDS} == set(MADE)


@pytest.mark.parametrize("value", [*HUGE, *SMALL], ids=["1e30", "1e308", "400 digits", "1e-300", "least"])
def test_an_extreme_is_refused_by_the_name_of_its_field(value):
    for kind, names, number, is_tuple in FIELDS:
        if number is int and isinstance(value, float):
            continue  # no such option can be given
        entries = (("q_proj", value),) if names[-1].endswith("_pattern") else (0.5, value)
        with pytest.raises(UserError) as refused:
            with_value(MADE[kind], names, entries if is_tuple else value)
            pytest.fail(f"{kind.__name__}.{'.'.join(names)} takes {value}")
        message = str(refused.value)
        assert names[-1] in message and len(message) < 600, (names, message)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RunConfig(num_generations=10**9), "num_generations must be at most 65,536, got 1000000000"),
        (lambda: RunConfig(num_steps=10**30), "num_steps must be at most 1,000,000,000, got a number"),
        (lambda: RunConfig(num_steps=10**400), "got a number of 401 characters"),
        (
            lambda: RunConfig(num_prompts=10**5, num_generations=1000),
            f"must be at most {MAX_SAMPLES:,} samples",
        ),
        (
            lambda: RunConfig(sample=SampleConfig(temperature=1e-300)),
            "sample.temperature must be at least 0.0001",
        ),
        (lambda: RunConfig(agent=AgentConfig(call_timeout_s=1e30)), "agent.call_timeout_s must be at most"),
        (lambda: options.EvalOptions(temperature=1e-300), "temperature must be at least 0.0001"),
        (lambda: RunConfig(seed=2**63), "seed must be at most 9,223,372,036,854,775,807"),
    ],
)
def test_a_message_names_the_bound(make, text):
    with pytest.raises(UserError) as refused:
        make()
    assert text in str(refused.value)


def test_what_is_in_use_is_taken():
    assert CONFLICTS and all(recipe() for recipe in RECIPES.values())
    learn = dataclasses.replace(RunConfig().learn, max_grad_norm=1e9, adam_epsilon=1e-20, learning_rate=1e-12)
    assert RunConfig(learn=learn, seed=2**63 - 1).learn == learn
    assert options.EvalOptions(temperature=0.0).temperature == 0.0
