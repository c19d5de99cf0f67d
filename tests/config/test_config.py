import ast
import dataclasses
import inspect
import json

import pytest

from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    ControlConfig,
    EngineConfig,
    LearnConfig,
    ModelConfig,
    NoiseConfig,
    RayConfig,
    RunConfig,
    TaskConfig,
    algo,
    noise,
    options,
    run,
)
from qerl.config.recipes import RECIPES
from qerl.config.stored import parse_run_config
from qerl.errors import UserError


def test_json_brings_back_the_same_config():
    for recipe in RECIPES.values():
        assert parse_run_config(json.loads(json.dumps(dataclasses.asdict(recipe())))) == recipe()


def test_an_unknown_key_is_refused_by_name():
    data = dataclasses.asdict(RunConfig())
    data["learn"]["learning_rat"] = 1.0
    with pytest.raises(UserError, match=r"config\.learn has no field learning_rat"):
        parse_run_config(data)


BY_SAMPLE = NoiseConfig(scope="sample", noise_in="both")
BY_GROUP, REMOTE = NoiseConfig(scope="group"), RayConfig(address="local")


def run_with(**parts):
    return dataclasses.replace(RunConfig(), **parts)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LearnConfig(learning_rate=0.0), "learn.learning_rate"),
        (lambda: LearnConfig(betas=(0.9, 1.0)), "learn.betas"),
        (lambda: LearnConfig(weight_decay=-0.1), "learn.weight_decay"),
        (lambda: AdapterConfig(alpha=0.0), "adapter.alpha"),
        (lambda: AlgoConfig(overlong="shape", overlong_buffer=0), "algo.overlong_buffer"),
        (lambda: AlgoConfig(advantage="beta", overlong="shape"), "algo.overlong"),
        (lambda: AlgoConfig(importance_cap=0.0), "algo.importance_cap"),
        (lambda: AlgoConfig(importance="icepop", importance_floor=2.0), "algo.importance_floor"),
        (lambda: AlgoConfig(geometric_low=1.1), "algo.geometric_low"),
        (lambda: ControlConfig(factor=1.0), "noise.control.factor"),
        (lambda: ControlConfig(sigma_max=1e-5), "noise.control.sigma_max"),
        (lambda: NoiseConfig(schedule="adaptive", sigma_start=0.5), "noise.sigma_start"),
        (lambda: NoiseConfig(schedule="plappert", noise_in="both"), "noise.control.measure"),
        (
            lambda: RunConfig(num_steps=5, noise=NoiseConfig(schedule="adaptive")),
            "noise.control.warmup_steps",
        ),
        (lambda: TaskConfig(rewards=("exact",), reward_weights=(1.0, 2.0)), "task.reward_weights"),
        (lambda: RunConfig(num_generations=1), "num_generations"),
        (lambda: RunConfig(seed=-1), "seed"),
        (
            lambda: run_with(model=ModelConfig(sampler_format="int8"), engine=EngineConfig(exact=True)),
            "model.sampler_format",
        ),
        (
            lambda: run_with(model=ModelConfig(sampler_format="fp8"), adapter=AdapterConfig(kind="full")),
            "model.sampler_format",
        ),
        (lambda: run_with(noise=BY_SAMPLE, algo=AlgoConfig(branching="deep")), "algo.branching"),
        (lambda: run_with(ray=REMOTE, noise=BY_GROUP, algo=AlgoConfig(branching="deep")), "ray.address"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field(make, field):
    with pytest.raises(UserError, match=field):
        make()


@pytest.mark.parametrize("module", [run, algo, noise, options])
def test_every_field_is_documented(module):
    """tyro shows the string under a field as its help; nested configs are documented by their own fields."""
    undocumented = []
    for cls in [n for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.ClassDef)]:
        for here, below in zip(cls.body, [*cls.body[1:], None], strict=True):
            is_field = isinstance(here, ast.AnnAssign)
            is_nested = is_field and ast.unparse(here.annotation).endswith("Config")
            has_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if is_field and not is_nested and not has_text:
                undocumented.append(f"{cls.name}.{ast.unparse(here.target)}")
    assert not undocumented
