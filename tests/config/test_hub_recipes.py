"""Recipes as they are written, the hub being a folder: rows with the columns of the published data sets."""

import dataclasses
import json

import datasets
import latex2sympy2_extended
import pytest

import tiny_run
from qerl import train
from qerl.config import EvalConfig, ModelConfig
from qerl.config.recipes import RECIPES
from qerl.tasks import RewardPool, Task
from qerl.types import Group, Sample

assert latex2sympy2_extended  # imported here, so that forked graders need not: 0.7 CPU seconds each

BIG_MATH = [
    {
        "prompt": f"What is {i} / 2?",
        "solution": f"{i}/2",
        "source": "orca_math",
        "domain": ["Mathematics -> Algebra"],
        "llama8b_solve_rate": 0.5,
    }
    for i in range(8)
]
DAPO = [
    {
        "prompt": f"Let $x = {i}$. Find $x^2$.",
        "solution": str(i * i),
        "data_source": "math_dapo",
        "source_prompt": [{"role": "user", "content": f"Solve ... Let $x = {i}$. Find $x^2$."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i * i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i:08}"},
    }
    for i in range(8)
]
MATH = [
    {
        "problem": f"Compute $\\frac{{{i}}}{{3}}$.",
        "level": "Level 2",
        "solution": f"It is $\\boxed{{\\frac{{{i}}}{{3}}}}$.",
        "type": "Algebra",
    }
    for i in range(8)
]
GSM8K = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(8)]
CODE = [
    {
        "source": "apps",
        "task_type": "verifiable_code",
        "in_source_id": str(i),
        "problem_statement": f"Read an integer and print {i} times it. The input will be stdin.",
        "gold_standard_solution": f"```python\nprint({i} * int(input()))\n```",
        "problem_id": f"vfc_{i}",
        "metadata": {
            "difficulty": "introductory",
            "memory_limit": None,
            "memory_limit_bytes": None,
            "problem_url": None,
            "time_limit": None,
        },
        "verification_info": {
            "language": "python",
            "test_cases": [
                {"fn_name": None, "input": f"{n}\n", "output": f"{i * n}\n", "type": "stdin_stdout"}
                for n in (1, 2)
            ],
        },
    }
    for i in range(2, 10)
]
HUB = {
    ("openai/gsm8k", "main", "train"): GSM8K[:6],
    ("openai/gsm8k", "main", "test"): GSM8K[6:],
    ("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "train"): BIG_MATH,
    ("open-r1/DAPO-Math-17k-Processed", "en", "train"): DAPO,
    ("DigitalLearningGmbH/MATH-lighteval", None, "train"): MATH[:6],
    ("DigitalLearningGmbH/MATH-lighteval", None, "test"): MATH[6:],
    ("open-r1/verifiable-coding-problems-python", None, "train"): CODE,
}
NAMES = ("gsm8k", "big_math", "dapo_math", "math")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=1024)


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    def load_dataset(path, subset=None, *, split):
        return datasets.Dataset.from_list(HUB[path, subset, split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def small(name, model, out):
    """The recipe with its own data, rewards and algorithm, and a model and counts that a CPU has time for."""
    config = RECIPES[name]()
    return dataclasses.replace(
        config,
        out=str(out),
        num_steps=2,
        num_prompts=2,
        num_generations=2,
        model=ModelConfig(path=str(model), dtype="fp32", device="cpu"),
        adapter=dataclasses.replace(config.adapter, rank=4),
        task=dataclasses.replace(config.task, num_held_out=2),
        sample=dataclasses.replace(config.sample, max_tokens=4),
        engine=dataclasses.replace(config.engine, kv_cache_gb=0.01),
        algo=dataclasses.replace(config.algo, overlong_buffer=2, max_rounds=2),
        noise=dataclasses.replace(config.noise, num_stages=2),
        learn=dataclasses.replace(config.learn, updates_per_step=min(config.learn.updates_per_step, 2)),
        evaluate=EvalConfig(num_prompts=2),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_in_the_asked_for_form_earns_all_and_another_little(name, model):
    from qerl.models.checkpoint.tokenizer import load_tokenizer

    task = dataclasses.replace(RECIPES[name]().task, num_held_out=2)
    built = Task(task, load_tokenizer(str(model)), seed=0, max_prompt_tokens=1000)
    prompt = built.train_prompts(0, 1)[0]
    assert "<think>" in prompt.text and "<answer>" in prompt.text
    gold = str(prompt.columns[task.answer_column])
    texts = [
        f"<think>so</think><answer>{gold}</answer>",
        f"It is \\boxed{{{gold}}}",
        "<think>a</think><answer>-9</answer>",
    ]
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=text, finish="stop", version=0) for text in texts]
    with RewardPool(task) as pool:
        (rewards,) = pool.score([Group(prompt=prompt, samples_G=samples)])
    assert rewards == [pytest.approx(1.1), pytest.approx(1.0), pytest.approx(0.1)]


def test_a_program_that_passes_earns_all(model):
    from qerl.models.checkpoint.tokenizer import load_tokenizer

    task = RECIPES["code"]().task
    code = dataclasses.replace(task.code, unsafe=True)  # what is graded needs no sandbox
    task = dataclasses.replace(task, num_held_out=2, reward_workers=1, code=code)
    built = Task(task, load_tokenizer(str(model)), seed=0, max_prompt_tokens=1000)
    prompt = built.train_prompts(0, 1)[0]
    assert "```python" in prompt.text and "print" in prompt.text
    gold = str(prompt.columns["gold_standard_solution"])
    texts = [f"So:\n{gold}\n", "```python\nprint(2)\n```", "I do not know."]
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=text, finish="stop", version=0) for text in texts]
    with RewardPool(task) as pool:
        assert pool.score([Group(prompt=prompt, samples_G=samples)]) == [[1.0, 0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", (*NAMES, "code"))
def test_the_recipe_trains(name, model, tmp_path):
    result = train(small(name, model, tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and 0 <= result["accuracy_after"] <= 1
