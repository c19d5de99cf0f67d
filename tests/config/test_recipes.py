import dataclasses
import math
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import tyro
from safetensors.torch import load_file

import tiny_run
from qerl import train
from qerl.config import AlgoConfig, NoiseConfig, RunConfig, recipes
from qerl.config.recipes import METHODS, RECIPES, big_math, dapo_math, demo, demo_long, gsm8k
from qerl.tracking.json_lines import read_lines


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_a_complete_config(name):
    assert isinstance(RECIPES[name](), RunConfig)


def test_each_recipe_runs_in_a_folder_of_its_own():
    assert len({recipe().out for recipe in RECIPES.values()}) == len(RECIPES)


@pytest.mark.parametrize("recipe", [gsm8k, big_math])
def test_the_papers_settings_for_both_runs(recipe):
    config = recipe()
    noise, algo, learn = config.noise, config.algo, config.learn
    assert (noise.sigma_start, noise.sigma_end, noise.num_stages) == (1e-2, 5e-4, 10)
    assert (noise.schedule, noise.unit, noise.noise_in) == ("exponential", "absolute", "sampler")
    assert (algo.epsilon, algo.epsilon_high, algo.beta, algo.advantage) == (0.2, 0.28, 0.0, "group")
    assert (algo.dynamic_sampling, algo.overlong) == (False, "mask")
    assert learn.optim == "adamw", "a departure from table 4, named in recipes/paper.py and docs/gsm8k.md"
    assert (learn.learning_rate, learn.betas, learn.weight_decay) == (1e-5, (0.9, 0.99), 0.1)
    assert (learn.lr_scheduler_type, learn.warmup_ratio, learn.max_grad_norm) == ("cosine", 0.1, 0.2)
    assert (config.model.format, config.adapter.rank, len(config.adapter.target_modules)) == ("nvfp4", 32, 7)
    assert (config.num_prompts, config.sample.temperature) == (128, 1.0)


def test_the_papers_settings_for_gsm8k():
    config = gsm8k()
    assert config.model.path == "Qwen/Qwen2.5-3B-Instruct"
    assert (config.num_steps, config.num_generations, config.sample.max_tokens) == (600, 8, 4096)
    assert (config.learn.updates_per_step, config.learn.num_iterations, config.algo.loss_type) == (
        4,
        1,
        "grpo",
    )


def test_the_papers_settings_for_big_math():
    config = big_math()
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    assert (config.num_steps, config.num_generations, config.sample.max_tokens) == (1000, 16, 8192)
    assert (config.learn.updates_per_step, config.learn.num_iterations, config.algo.loss_type) == (
        1,
        1,
        "dapo",
    )


def test_dapos_own_settings_for_its_own_problems():
    config = dapo_math()
    assert (config.algo.loss_type, config.algo.epsilon, config.algo.epsilon_high) == ("dapo", 0.2, 0.28)
    assert (config.algo.dynamic_sampling, config.algo.overlong) == (True, "shape")
    assert config.model == big_math().model and config.noise == big_math().noise


def test_a_right_answer_is_right_with_or_without_its_tags():
    for recipe in (gsm8k, big_math, dapo_math, recipes.math):
        correct, tagged = recipe().task.reward_weights
        assert recipe().evaluate.success_threshold is None  # 1 for built-in rewards
        assert tagged < 1 <= correct


def test_the_demo_takes_short_samples_of_short_prompts_and_few_steps():
    config = demo()
    assert (config.model.path, config.model.format) == ("smollm2-135m-instruct", "nvfp4")
    assert (config.num_prompts, config.num_generations, config.num_steps) == (16, 8, 24)
    assert (config.sample.max_tokens, config.sample.stop, config.task.chat) == (6, ("\n",), "messages")
    assert (config.learn.learning_rate, config.learn.lr_scheduler_type) == (5e-4, "cosine")
    assert (config.evaluate.num_prompts, config.noise.schedule) == (128, "none")


def test_the_long_demo_takes_chats_and_noise():
    config = demo_long()
    assert (config.model.path, config.model.format) == ("smollm2-135m-instruct", "nvfp4")
    assert (config.num_prompts, config.num_generations, config.num_steps) == (16, 8, 40)
    assert (config.sample.max_tokens, config.sample.temperature, config.task.chat) == (16, 1.0, "all")
    assert (config.learn.learning_rate, config.learn.lr_scheduler_type) == (5e-4, "cosine")
    assert (config.adapter.rank, len(config.adapter.target_modules)) == (32, 7)
    assert (config.algo.loss_type, config.algo.beta, config.noise.unit) == ("grpo", 0.0, "relative")


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [(demo, "The sum of {} is"), (demo_long, "What is {}? Answer with just the number.")],
)
def test_the_demos_problems_are_sums_of_two_numbers_up_to_a_hundred(recipe, asked):
    import reasoning_gym

    task = recipe().task
    problems = reasoning_gym.create_dataset(task.gym, seed=0, size=200, **dict(task.gym_options))
    for problem in (problems[i] for i in range(200)):
        left, right = problem["metadata"]["expression"].split(" + ")
        assert int(left) + int(right) == int(problem["answer"])
        assert min(int(left), int(right)) >= 0 and max(int(left), int(right)) <= 100
        assert task.template.format_map(problem) == asked.format(f"{left} + {right}")


def test_every_value_of_a_method_has_a_recipe():
    """A loss, an advantage, a correction or a rule that no recipe takes is one that nobody runs."""
    algos = [recipe().algo for recipe in METHODS.values()]
    hints = get_type_hints(AlgoConfig)
    for field in ("loss_type", "advantage", "importance"):
        assert {getattr(algo, field) for algo in algos} >= set(get_args(hints[field])) - {
            "leave_one_out",
            "batch",
            "ratio",
            "nll",  # the loss of `qerl sft`
        }
    assert {name for algo in algos for name in algo.reject} == {"geometric", "veto"}
    noises = [recipe().noise for recipe in METHODS.values()]
    assert {noise.schedule for noise in noises} == {"exponential", "adaptive", "plappert", "none"}
    assert {noise.control.measure for noise in noises if noise.is_controlled} == {"kl", "entropy"}
    assert {noise.scope for noise in noises} == {"step", "group", "sample"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_differs_from_the_long_demo_by_itself_alone(name):
    config = METHODS[name]()
    assert config != demo_long() and config.out == f"runs/{name}"
    same = dataclasses.replace(
        config,
        out=demo_long().out,
        algo=demo_long().algo,
        noise=demo_long().noise,
        model=demo_long().model,
        learn=dataclasses.replace(config.learn, updates_per_step=1),
    )
    assert same == demo_long()


FIRST, *OTHERS = METHODS


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_methods_recipe_runs(name, tiny_files, tmp_path):
    """Three steps of the tiny model: every step's numbers are finite, and the weights change."""
    given = [*tiny_run.options(tiny_files, tmp_path / "run"), "--num-steps", "3"]
    if METHODS[name]().noise.is_controlled:
        given += ["--noise.control.warmup-steps", "1"]
    config = tyro.cli(RunConfig, default=METHODS[name](), args=[*given, "--evaluate.num-prompts", "0"])
    train(config)
    steps = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert len(steps) == 3
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert sum(step.get("grad_norm", 0) > 0 for step in steps) >= 2
    if config.model.sampler_format is not None:
        assert min(step["mismatch_abs"] for step in steps) > 1e-4
    saved = sorted((tmp_path / "run" / "checkpoints").glob("*/adapter_model.safetensors"))
    first, last = load_file(saved[0]), load_file(saved[-1])
    assert any(not first[name].equal(last[name]) for name in first)


def test_the_page_of_methods_has_every_value_and_recipe():
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    algo, noise = get_type_hints(AlgoConfig), get_type_hints(NoiseConfig)
    values = [v for field in ("loss_type", "advantage", "importance") for v in get_args(algo[field])]
    values += [*get_args(noise["schedule"]), *get_args(noise["scope"])]
    missing = [v for v in [*values, "geometric", "veto"] if f"`{v}`" not in page]
    assert not missing and not [name for name in METHODS if f"`{name}`" not in page]


def test_a_recipe_gives_a_new_equal_config_that_can_be_derived_from():
    longer = dataclasses.replace(demo(), num_steps=90)
    assert (longer.num_steps, demo().num_steps) == (90, 24)
    assert dataclasses.replace(longer, num_steps=24) == demo()
