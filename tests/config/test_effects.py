"""No setting that was given is ignored in silence: each acts, or a line names it."""

import dataclasses
import typing

import pytest

from qerl.cli.main import command
from qerl.config import (
    AdapterConfig,
    AgentConfig,
    AlgoConfig,
    DistilConfig,
    DpoConfig,
    ModelConfig,
    NoiseConfig,
    RolloutConfig,
    RunConfig,
    SampleConfig,
    SftConfig,
    TaskConfig,
)
from qerl.config.conflicts import holding
from qerl.config.effects import (
    FACTS,
    NEEDS,
    RunFacts,
    effect_notices,
    settings_without_effect,
    without_unused,
)
from qerl.config.recipes import RECIPES
from qerl.errors import UserError

NOTHING = RunFacts(
    is_mixture=False, has_environment=False, has_chat_template=False, has_template=False, has_ranks=False
)
ALL = RunFacts(**dict.fromkeys([name.removeprefix("facts.") for name in FACTS], True))


def fields_of(kind, before=""):
    """The dotted name of each field that is no section."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from fields_of(hint, f"{before}{name}.")
        else:
            yield before + name


FIELDS = list(fields_of(RunConfig))


def value_of(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def with_value(settings, name, value):
    first, _, rest = name.partition(".")
    inner = with_value(getattr(settings, first), rest, value) if rest else value
    return dataclasses.replace(settings, **{first: inner})


TEXTS = {
    "agent.function": "agent.py:play",
    "distil.teacher": "runs/teacher",
    "task.name": "rows.jsonl",
    "task.judge.pattern": r"(\d)",
    "task.rewards": ("exact",),
    "task.gym_options": (("min_terms", 3),),
    "task.env_options": '{"a": 1}',
    "task.chat_template_kwargs": '{"a": 1}',
    "learn.betas": (0.5, 0.5),
    "adapter.target_modules": ("q_proj",),
}


def others(name):
    """Values of a field that are not its default; the config takes at least one of them."""
    default, hint = value_of(RunConfig(), name), hint_of(RunConfig, name.split("."))
    choices = [
        c for part in flat(hint) for c in typing.get_args(part) if typing.get_origin(part) is typing.Literal
    ]
    if name in TEXTS:
        return [TEXTS[name]]
    if isinstance(default, bool):
        return [not default]
    if choices:
        is_tuple = isinstance(default, tuple)
        return [(choice,) if is_tuple else choice for choice in choices if choice != default]
    if isinstance(default, int | float):
        return (
            [default / 2, default * 2, default + 1, 0.5, 2]
            if isinstance(default, float)
            else [default + 1, 1]
        )
    if isinstance(default, str) or str in flat(hint):
        return ["other"]
    return [(1.0,)] if isinstance(default, tuple) else [3, 0.5]


def hint_of(kind, parts):
    hint = typing.get_type_hints(kind)[parts[0]]
    return hint_of(hint, parts[1:]) if parts[1:] else hint


def flat(hint):
    """The members of a union or of a tuple's type, and theirs."""
    inner = () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint)
    return [hint, *(each for part in inner for each in flat(part))]


def changed(name, config=None):
    """A config with another value of the field than the default; None if it takes none of them."""
    for value in others(name):
        if value == value_of(RunConfig(), name):
            continue
        try:
            return with_value(config or RunConfig(), name, value)
        except UserError:
            continue
    return None


def needs(name):
    parts = name.split(".")
    own = [NEEDS[key] for end in range(len(parts)) if (key := ".".join(parts[: end + 1])) in NEEDS]
    return [condition for condition in own if name not in condition.split()]


CONDITIONAL = [name for name in FIELDS if needs(name)]


def test_every_entry_of_the_table_is_a_field_or_a_section():
    known = {".".join(name.split(".")[:end]) for name in FIELDS for end in range(1, 4)}
    assert NEEDS.keys() <= known


def test_a_divergence_that_no_loss_has_and_the_column_of_texts_are_named_for_preferences():
    dpo = DpoConfig(loss_type=("sft",), f_divergence_type="js_divergence")
    config = RunConfig(sft=SftConfig(data="pairs.jsonl", text_column="body"), dpo=dpo)
    unused = settings_without_effect(config)
    assert "sft.text_column body (needs no dpo.loss_type)" in unused
    assert any(line.startswith("dpo.f_divergence_type js_divergence (needs") for line in unused)
    both = dataclasses.replace(config, dpo=dataclasses.replace(dpo, loss_type=("sft", "sigmoid")))
    assert settings_without_effect(both) == unused[:1]


@pytest.mark.parametrize("name", CONDITIONAL)
def test_a_field_is_named_exactly_if_its_condition_does_not_hold(name):
    config = changed(name)
    if config is None:
        return  # refused in every value: the tests of conflicts have it
    for facts in (NOTHING, ALL):
        view = type("View", (), {"facts": facts, "__getattr__": lambda self, key: getattr(config, key)})()
        lacks = [condition for condition in needs(name) if not holding(view, condition)]
        named = [line for line in settings_without_effect(config, facts) if line.startswith(f"{name} ")]
        assert bool(named) == bool(lacks), (name, lacks, named)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            RunConfig(algo=AlgoConfig(overlong_buffer=32)),
            "algo.overlong_buffer 32 (needs algo.overlong shape)",
        ),
        (RunConfig(noise=NoiseConfig(schedule="none", sigma_start=0.1)), "noise.sigma_start 0.1 (needs"),
        (
            RunConfig(rollout=RolloutConfig(max_staleness=3)),
            "rollout.max_staleness 3 (needs rollout.partial)",
        ),
        (
            RunConfig(adapter=AdapterConfig(expert_rank=8)),
            "adapter.expert_rank 8 (needs adapter.experts not none)",
        ),
        (
            RunConfig(adapter=AdapterConfig(kind="full", rank=8), model=ModelConfig(format="bf16")),
            "adapter.rank 8 (needs adapter.kind lora)",
        ),
        (
            RunConfig(agent=AgentConfig(function="a.py:f"), task=TaskConfig(rewards=("exact",))),
            "task.rewards exact (needs no agent.function)",
        ),
        (RunConfig(task=TaskConfig(name="x.jsonl", split="test")), "task.split test (needs task.source hub"),
        (RunConfig(task=TaskConfig(held_out_split="x.jsonl")), "task.held_out_split x.jsonl (needs"),
        (
            RunConfig(distil=DistilConfig(teacher="runs/a", top_k=3), noise=NoiseConfig(schedule="none")),
            "distil.top_k 3 (needs distil.is_divergence)",
        ),
        (RunConfig(sft=SftConfig(data="a.jsonl", split="test")), "sft.split test (needs no sft.is_file)"),
    ],
)
def test_a_setting_without_effect_is_named_with_what_it_needs(config, line):
    (notice,) = effect_notices(config)
    assert notice.startswith("without effect: ") and line in notice


def test_a_recipes_settings_that_a_replaced_task_leaves_without_effect_are_dropped():
    recipe = RECIPES["demo"]()
    task = dataclasses.replace(recipe.task, name="x.jsonl", gym="aiw", num_rows=7)
    config = dataclasses.replace(recipe, task=task)
    named = settings_without_effect(
        without_unused(config, recipe, ["task.name", "task.gym", "task.num_rows"])
    )
    assert [line.split()[0] for line in named] == ["task.gym", "task.num_rows"]
    assert without_unused(recipe, recipe, []) == recipe


def test_a_recipes_setting_that_the_user_repeats_is_named():
    recipe = RECIPES["demo_long"]()
    config = dataclasses.replace(recipe, noise=dataclasses.replace(recipe.noise, schedule="none"))
    (line,) = settings_without_effect(without_unused(config, recipe, ["noise.schedule", "noise.unit"]))
    assert line.startswith("noise.unit relative ")


def test_settings_that_are_checked_together_are_dropped_together():
    recipe = RECIPES["gsm8k"]()
    config = dataclasses.replace(recipe, agent=AgentConfig(function="a.py:f"))
    task = without_unused(config, recipe, ["agent.function"]).task
    assert (task.rewards, task.reward_weights) == (("numeric",), ())


def test_settings_that_act_are_not_named():
    config = RunConfig(algo=AlgoConfig(overlong="shape", overlong_buffer=32), sample=SampleConfig(top_k=5))
    assert effect_notices(config) == effect_notices(config, NOTHING) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_no_setting_without_effect(name):
    facts = dataclasses.replace(NOTHING, has_environment=name == "higher_lower", has_template=True)
    assert effect_notices(RECIPES[name](), facts) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["eval", "m", "gsm8k", "--task.template", "x"], "eval: --task.template is for a file of your own"),
        (
            ["eval", "m", "gsm8k", "--task.num_held_out=3"],
            "eval: --task.num-held-out is for a file of your own",
        ),
        (["eval", "m", "a.jsonl", "--task.split", "test"], "eval: --task.split: a FILE is evaluated whole"),
        (["eval", "m", "a.jsonl", "--task.num-held-out", "3"], "a FILE is evaluated whole"),
        (["eval", "m", "--template", "x"], "for the run's own task give --task.template"),
        (["quantize", "m", "out", "--sequences", "3"], "--sequences needs --calibrate awq or gptq"),
        (["quantize", "m", "out", "--sequence-tokens=3"], "--sequence-tokens needs --calibrate awq or gptq"),
        (
            ["export", "run", "out", "--calibration-tokens", "3"],
            "--calibration-tokens needs --as nvfp4 or mxfp4",
        ),
    ],
)
def test_an_option_that_another_rules_out_is_refused(arguments, text):
    with pytest.raises(UserError) as refused:
        command(arguments)
    assert text in str(refused.value)
