"""No number of a config or of a command's options may be NaN or infinite, wherever it stands."""

import dataclasses
import json
import math
import typing

import pytest

from qerl.bench import options as bench_options
from qerl.cli.plan import PlanOptions
from qerl.config import RunConfig, TaskConfig, options
from qerl.config.stored import read_run_config
from qerl.errors import UserError

KINDS = (
    *(RunConfig, PlanOptions, options.EvalOptions, options.GenerateOptions, options.ServeOptions),
    *(bench_options.BenchDecodeOptions, bench_options.BenchStepOptions, bench_options.BenchLearnOptions),
)


def with_value(settings, names, value):
    """The settings with another value of one field of theirs, or of a part of theirs."""
    first, *rest = names
    inner = value if not rest else with_value(getattr(settings, first), rest, value)
    return dataclasses.replace(settings, **{first: inner})


def float_fields(kind, before=()):
    """(names, a tuple of how many floats, or None) of each field that may hold a float."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from float_fields(hint, (*before, name))
        elif "float" in str(hint):
            yield (*before, name), "tuple" in str(hint)


CASES = [(kind, names, is_tuple) for kind in KINDS for names, is_tuple in float_fields(kind)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_field_takes_a_number_that_is_not_finite(value):
    assert len(CASES) > 60
    for kind, names, is_tuple in CASES:
        given = (0.5, value) if is_tuple else value
        given = (("min_digits", value),) if names[-1] in ("gym_options", "alpha_pattern") else given
        with pytest.raises(UserError, match=names[-1]):
            with_value(kind(), names, given)


@pytest.mark.parametrize("name", ["learn.learning_rate", "sample.temperature"])
def test_a_number_that_is_not_finite_is_named_with_its_part(name):
    with pytest.raises(UserError, match=rf"^{name} must be finite, got inf$"):
        with_value(RunConfig(), name.split("."), math.inf)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_stored_config_is_held_to_the_same_rule(tmp_path, number):
    data = json.dumps({"config": {"learn": {"learning_rate": 7.5}}}).replace("7.5", number)
    (tmp_path / "run.json").write_text(data)
    with pytest.raises(UserError, match=r"^learn\.learning_rate must be finite"):
        read_run_config(str(tmp_path))
    with pytest.raises(UserError, match="chat_template_kwargs must be a JSON object"):
        TaskConfig(chat_template_kwargs=f'{{"budget": {number}}}')
