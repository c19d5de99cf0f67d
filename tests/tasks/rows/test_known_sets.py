"""Files of known data sets, in their own columns: rows of our own in the same form."""

import dataclasses
import json

import pytest

from material import jsonl, tokenizer
from qerl.cli.evaluate import own_tasks
from qerl.config import TaskConfig
from qerl.config.options import EvalOptions
from qerl.config.recipes import RECIPES
from qerl.errors import UserError
from qerl.tasks import RewardPool, Task
from qerl.tasks.rows.checks import check_rows
from qerl.tasks.rows.known_sets import with_known_defaults
from qerl.types import Group, Sample

GSM8K = [
    {"question": f"Ann has {i} pens and buys 1,000.", "answer": f"{i} + 1,000 = <<>>\n#### 1,0{i:02}"}
    for i in range(12)
]
MATH = [
    {
        "problem": f"Find $x = {i} + 1$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"$\\boxed{{{i + 1}}}$",
    }
    for i in range(12)
]
MATH_ANSWER = [{"problem": row["problem"], "answer": str(i + 1), "level": "1"} for i, row in enumerate(MATH)]
MBPP = [
    {
        "text": f"Write a function to add {i}.",
        "code": f"def add{i}(x):\r\n  return x + {i}",
        "task_id": i,
        "test_setup_code": "three = 3" if i == 0 else "",
        "test_list": [f"assert add{i}({'three' if i == 0 else 3}) == {i + 3}", f"assert add{i}(0) == {i}"],
        "challenge_test_list": [],
    }
    for i in range(12)
]
HUMANEVAL = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def add(x: int) -> int:\n    """ Add {i} to x. """\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {i}\n",
        "test": f"\n\nMETADATA = {{}}\n\n\ndef check(candidate):\n    assert candidate(3) == {i + 3}\n",
    }
    for i in range(12)
]
CASES = {
    "gsm8k": ("gsm8k", GSM8K, lambda i: f"<think>Add.</think><answer>1,0{i:02}</answer>", 1.1),
    "math": ("math", MATH, lambda i: f"<think>Add.</think><answer>{i + 1}</answer>", 1.1),
    "math with answers": ("math", MATH_ANSWER, lambda i: f"<think>Add.</think><answer>{i + 1}</answer>", 1.1),
    "mbpp": ("code", MBPP, lambda i: f"```python\ndef add{i}(x):\n    return x + {i}\n```", 1.0),
    "humaneval": ("code", HUMANEVAL, lambda i: f"```python\ndef add(x):\n    return x + {i}\n```", 1.0),
}


def config_of(folder, recipe, rows, **changes):
    task = RECIPES[recipe]().task
    code = dataclasses.replace(task.code, unsafe=True)
    name = jsonl(folder / "rows.jsonl", rows)
    settings = {"name": name, "held_out_split": None, "num_held_out": 2, "reward_workers": 1, "code": code}
    return dataclasses.replace(task, **settings | changes)


def built(config):
    return Task(config, tokenizer(), seed=0, max_prompt_tokens=500)


def rewards_of(config, prompts, texts):
    """The reward of each text as the sample of its prompt."""
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=text, finish="stop", version=0) for text in texts]
    groups = [Group(prompt=p, samples_G=[s]) for p, s in zip(prompts, samples, strict=True)]
    with RewardPool(config) as pool:
        pool.check(prompts[0])
        return [reward for (reward,) in pool.score(groups)]


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_takes_the_raw_file_and_its_right_answers_earn_all(tmp_path, case):
    recipe, rows, right, best = CASES[case]
    config = config_of(tmp_path, recipe, rows)
    task = built(config)
    prompts = [*task.train_prompts(0, 4), *task.held_out(None)]
    assert task.notices(config, reads_answer=True) == []
    rights = [right(prompt.index) for prompt in prompts]
    assert rewards_of(config, prompts, rights) == pytest.approx([best] * len(prompts))
    assert rewards_of(config, prompts, ["I do not know 99."] * len(prompts)) == [0.0] * len(prompts)


@pytest.mark.parametrize(("recipe", "rows"), [("gsm8k", GSM8K), ("math", MATH_ANSWER)])
def test_a_prompt_asks_for_the_tags_that_a_reward_counts(tmp_path, recipe, rows):
    config = config_of(tmp_path, recipe, rows)
    assert "tags" in config.rewards
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in built(config).train_prompts(0, 1)[0].text


def test_an_mbpp_prompt_names_the_function_by_its_tests(tmp_path):
    prompt = built(config_of(tmp_path, "code", MBPP)).train_prompts(0, 1)[0]
    assert f"assert add{prompt.index}(0) == {prompt.index}" in prompt.text and "```python" in prompt.text


@pytest.mark.parametrize(("recipe", "rows"), [("math", MATH_ANSWER), ("code", MBPP), ("code", HUMANEVAL)])
def test_a_column_that_was_added_is_said(tmp_path, recipe, rows):
    (line,) = built(config_of(tmp_path, recipe, rows)).known_columns
    assert (
        "rows.jsonl has the columns of" in line and f"{RECIPES[recipe]().task.answer_column} is its " in line
    )


def test_a_file_of_training_rows_and_one_of_held_out_rows_are_the_two_splits(tmp_path):
    held_out = jsonl(tmp_path / "test.jsonl", GSM8K[8:])
    task = built(config_of(tmp_path, "gsm8k", GSM8K[:8], held_out_split=held_out, num_held_out=None))
    assert len(task.held_out(None)) == 4
    assert sorted(prompt.index for prompt in task.train_prompts(0, 8)) == list(range(8))


@pytest.mark.parametrize("recipe", ["gsm8k", "math"])
def test_a_split_of_the_hub_is_refused_beside_a_file(tmp_path, recipe):
    with pytest.raises(
        UserError, match=r"task\.held_out_split test: .*rows\.jsonl is a file, which has no splits"
    ):
        built(config_of(tmp_path, recipe, GSM8K, held_out_split="test"))


@pytest.mark.parametrize("rows", [MBPP, HUMANEVAL])
def test_tests_are_not_compared_with_a_number(tmp_path, rows):
    with pytest.raises(UserError, match=r"task\.rewards numeric: .* which is for the reward code"):
        built(TaskConfig(name=jsonl(tmp_path / "rows.jsonl", rows), num_held_out=2))


@pytest.mark.parametrize(
    "changes", [{"prompt_column": "problm"}, {"answer_column": "anser"}], ids=["prompt", "answer"]
)
def test_a_misspelt_column_is_not_replaced(tmp_path, changes):
    config = config_of(tmp_path, "math", MATH_ANSWER, **changes)
    with pytest.raises(UserError, match=r"no column .(problm|anser)"):
        prompts = built(config).train_prompts(0, 1)
        rewards_of(config, prompts, ["1"])


def test_a_row_without_its_text_is_left_out_by_its_line(tmp_path):
    task = built(config_of(tmp_path, "code", [*MBPP, {**MBPP[0], "text": None}]))
    assert task.num_bad == 1 and "line 13" in task.take_faults()[0]


@pytest.mark.parametrize(
    ("rows", "reward", "asks"),
    [(GSM8K, "numeric", "<answer>"), (MATH_ANSWER, "math", "<answer>"), (MBPP, "code", "```python")],
)
def test_an_evaluation_of_a_raw_file_has_its_reward_and_template(tmp_path, rows, reward, asks):
    name = jsonl(tmp_path / "rows.jsonl", rows)
    (task,) = own_tasks([name], EvalOptions()).values()
    said = []
    task = with_known_defaults(task, said.append, keeps_rewards=False)
    assert len(said) == 1 and "rows.jsonl has the columns of" in said[0] and f"reward {reward}" in said[0]
    assert task.rewards == (reward,) and asks in task.template
    given = with_known_defaults(
        dataclasses.replace(task, template="{question}!"), said.append, keeps_rewards=True
    )
    assert (given.template, given.rewards) == ("{question}!", (reward,))


def test_other_rows_are_left_as_they_are(tmp_path):
    own = TaskConfig(name=jsonl(tmp_path / "own.jsonl", [{"prompt": f"{i}", "answer": i} for i in range(9)]))
    said = []
    assert with_known_defaults(own, said.append, keeps_rewards=False) == own and not said
    assert built(dataclasses.replace(own, num_held_out=2)).known_columns == []


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_other_kinds_of_files_have_the_same_columns(tmp_path, ending):
    import pandas

    path = tmp_path / f"rows.{ending}"
    table = pandas.DataFrame([json.loads(json.dumps(row)) for row in MATH_ANSWER])
    table.to_csv(path, index=False) if ending == "csv" else table.to_parquet(path)
    task = built(config_of(tmp_path, "math", MATH_ANSWER, name=str(path)))
    assert task.train_prompts(0, 1)[0].columns["solution"] in {row["answer"] for row in MATH_ANSWER}
    for each in task.renderers:
        check_rows(each, strict=True)
