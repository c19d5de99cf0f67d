"""Files of BFCL as they are published: JSON lines named .json, and possible_answer/ beside them."""

import json

import pytest

import tiny_run
from material import CHATML, jsonl, tokenizer
from qerl.cli.main import command
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool, Task
from qerl.tasks.early_checks import check_task_files
from qerl.tracking.json_lines import read_lines
from qerl.types import Group, Sample

TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML
FUNCTION = {
    "name": "shapes.area",
    "description": "Compute the area of a triangle.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float", "description": "The base."},
            "points": {"type": "tuple", "items": {"type": "dict", "properties": {"type": {"type": "any"}}}},
        },
        "required": ["base"],
    },
}


def write(folder, *, name="BFCL_v3_simple.json", num=12, answers=True):
    rows = [
        {
            "id": f"simple_{i}",
            "question": [[{"role": "user", "content": f"Area of base {i}?"}]],
            "function": [FUNCTION],
        }
        for i in range(num)
    ]
    if answers:
        (folder / "possible_answer").mkdir()
        right = [
            {"id": f"simple_{i}", "ground_truth": [{"shapes.area": {"base": [i], "points": ["", []]}}]}
            for i in reversed(range(num))
        ]
        jsonl(folder / "possible_answer" / name, right)
    return jsonl(folder / name, rows)


def task_of(path, **fields):
    return TaskConfig(name=path, rewards=("calls",), num_held_out=2, reward_workers=1, **fields)


def test_the_questions_are_prompts_with_tools_and_the_answers_come_by_id(tmp_path):
    config = task_of(write(tmp_path))
    check_task_files(config)
    task = Task(config, tokenizer(TEMPLATE), seed=0, max_prompt_tokens=2000)
    assert "has the columns of BFCL: prompt is its question" in task.known_columns[0]
    (prompt,) = task.train_prompts(0, 1)
    shown = json.loads(prompt.text.partition("<|im_start|>")[0])["function"]["parameters"]
    assert shown["type"] == "object" and shown["properties"]["base"]["type"] == "number"
    points = shown["properties"]["points"]
    assert points["type"] == "array" and points["items"]["properties"] == {"type": {"type": "string"}}
    base = int(prompt.messages[0]["content"].split()[-1][:-1])
    assert prompt.columns["answer"] == [{"shapes.area": {"base": [base], "points": ["", []]}}]
    texts = [f"[shapes.area(base={base})]", f"[shapes.area(base={base + 1})]"]
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=t, finish="stop", version=0) for t in texts]
    with RewardPool(config) as pool:
        assert pool.is_built_in
        pool.check(prompt)
        assert pool.score([Group(prompt=prompt, samples_G=samples)]) == [[1.0, 0.5]]


def test_a_file_without_answers_is_refused_but_for_one_where_no_call_is_right(tmp_path):
    with pytest.raises(UserError, match=r"has no answers: .*possible_answer/BFCL_v3_simple\.json"):
        check_task_files(task_of(write(tmp_path, answers=False)))
    config = task_of(write(tmp_path, name="BFCL_v3_irrelevance.json", answers=False))
    task = Task(config, tokenizer(TEMPLATE), seed=0, max_prompt_tokens=2000)
    assert task.train_prompts(0, 1)[0].columns["answer"] == []


def test_rows_of_another_set_with_the_same_columns_need_no_answers_of_bfcl(tmp_path):
    rows = [{"id": i, "question": f"{i}?", "function": "f", "answer": str(i)} for i in range(12)]
    check_task_files(TaskConfig(name=jsonl(tmp_path / "own.jsonl", rows), rewards=("numeric",)))


def test_a_question_of_several_turns_is_left_out_and_named(tmp_path):
    path = write(tmp_path)
    rows = list(map(json.loads, (tmp_path / "BFCL_v3_simple.json").read_text().splitlines()))
    rows[3]["question"] *= 2
    jsonl(tmp_path / "BFCL_v3_simple.json", rows)
    task = Task(task_of(path), tokenizer(TEMPLATE), seed=0, max_prompt_tokens=2000)
    assert any("line 4" in line for line in task.take_faults()) and task.num_bad == 1


def test_qerl_data_shows_it_and_a_step_trains_on_it(tmp_path, capsys):
    model = tiny_run.write_model(tmp_path / "model", max_positions=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    path = write(tmp_path)
    assert command(["data", path, "--model", str(model), "--json"]) is None
    view = json.loads(capsys.readouterr().out)
    assert view["train"]["usable"] == 12
    run = tmp_path / "run"
    command(
        f"train --task {path} --reward calls --model {model} --out {run} --num-steps 1 --num-prompts 2"
        " --num-generations 2 --sample.max-tokens 8 --task.num-held-out 2 --evaluate.num-prompts 2"
        " --model.device cpu".split()
    )
    (step,) = read_lines(run / "metrics.jsonl")
    assert step["reward"] == 0.0 and step["num_failed_rewards"] == 0 and step["accuracy"] == 0.0
