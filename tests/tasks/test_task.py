import dataclasses
from itertools import chain

import pytest

from material import SUMS, jsonl, tokenizer
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import Task

TEMPLATE = "What is {metadata[expression]}? Answer with just the number."
GYM = TaskConfig(gym_options=SUMS, template=TEMPLATE, num_rows=5000, num_held_out=32)


def built(config, seed=0, max_prompt_tokens=500):
    return Task(config, tokenizer(), seed=seed, max_prompt_tokens=max_prompt_tokens)


def from_file(tmp_path, num_rows=20, num_held_out=4, long=(), **arguments):
    """Row i asks `i`; the long ones are over 100 tokens."""
    rows = [{"prompt": str(i) + " long" * 40 * (i in long), "answer": i} for i in range(num_rows)]
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=num_held_out)
    return built(config, max_prompt_tokens=100, **arguments)


def indices(prompts):
    return [prompt.index for prompt in prompts]


def test_a_gym_prompt_is_the_row_of_its_index():
    prompt = built(GYM).train_prompts(0, 4)[0]
    expression = prompt.columns["metadata"]["expression"]
    assert prompt.messages == [
        {"role": "user", "content": f"What is {expression}? Answer with just the number."}
    ]
    assert prompt.columns["answer"] == str(sum(map(int, expression.split(" + "))))
    assert prompt.columns["question"] == f"Calculate {expression}."


def test_prompts_depend_on_seed_step_and_round_alone():
    one, other = built(GYM), built(GYM)
    later = other.train_prompts(30, 8, 2)
    assert one.train_prompts(5, 8) == other.train_prompts(5, 8)
    assert one.train_prompts(30, 8, 2) == later
    assert one.train_prompts(30, 8) == other.train_prompts(30, 8) != later


def test_another_seed_gives_another_order_of_the_same_rows():
    one, other = built(GYM, seed=0), built(GYM, seed=1)
    assert indices(one.train_prompts(0, 16)) != indices(other.train_prompts(0, 16))
    assert one.held_out(32) == other.held_out(32)


def test_no_row_comes_twice_in_an_epoch_and_each_epoch_has_its_own_order(tmp_path):
    task = from_file(tmp_path)
    epochs = [[indices(task.train_prompts(4 * epoch + i, 4)) for i in range(4)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(chain(*epoch)) == list(range(16))
    assert epochs[0] != epochs[1] != epochs[2]


def test_rows_left_over_at_the_end_of_an_epoch_do_not_meet_the_next_epoch_in_one_step(tmp_path):
    task = from_file(tmp_path)
    steps = [indices(task.train_prompts(i, 5)) for i in range(60)]
    assert all(len(set(step)) == 5 for step in steps)
    assert all(len(set(chain(*steps[i : i + 3]))) == 15 for i in range(0, 60, 3))
    assert {row for step in steps for row in step} == set(range(16))


def test_further_rounds_bring_rows_that_the_step_has_not_had_and_disturb_no_later_step(tmp_path):
    task = from_file(tmp_path, num_rows=44)
    rounds = [indices(task.train_prompts(1, 8, round)) for round in range(6)]
    assert [len(rows) for rows in rounds] == [8, 8, 8, 8, 8, 0]
    assert sorted(chain(*rounds)) == list(range(40))
    assert indices(task.train_prompts(1, 8, 2)) == rounds[2]
    assert indices(task.train_prompts(2, 8)) == indices(from_file(tmp_path, num_rows=44).train_prompts(2, 8))


def test_rounds_of_different_steps_differ():
    task = built(GYM)
    one, other = (set(indices(task.train_prompts(step, 16, 1))) for step in (0, 1))
    assert len(one & other) < 4  # of 16 among some 4,000


def test_held_out_are_the_last_rows_and_are_never_learned_from(tmp_path):
    task = from_file(tmp_path)
    assert indices(task.held_out(4)) == [16, 17, 18, 19]
    assert indices(task.held_out(2)) == [16, 17]
    assert len(task.held_out(100)) == 4
    learned = {row for step in range(8) for row in indices(task.train_prompts(step, 4))}
    assert learned == set(range(16))


def test_a_held_out_file_leaves_all_rows_of_the_other_to_learn_from(tmp_path):
    train, test = (
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(6)])
        for name in ("train", "test")
    )
    task = built(TaskConfig(name=train, held_out_split=test, num_held_out=4))
    assert [prompt.messages[0]["content"] for prompt in task.held_out(9)] == [f"test {i}" for i in range(4)]
    assert sorted(indices(task.train_prompts(0, 6))) == list(range(6))
    with pytest.raises(UserError, match=r"task\.held_out_split .*no\.jsonl: no such file"):
        built(TaskConfig(name=train, held_out_split=str(tmp_path / "no.jsonl"), num_held_out=4))


def test_a_row_that_makes_the_prompt_of_a_held_out_row_is_not_learned_from(tmp_path):
    rows = [{"prompt": str(i % 7), "answer": 0} for i in range(20)]
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=2)
    task = built(config)
    held_out = {prompt.text for prompt in task.held_out(2)}
    learned = [prompt for step in range(6) for prompt in task.train_prompts(step, 4)]
    assert not held_out & {prompt.text for prompt in learned}
    assert task.num_repeated == 4  # rows 18 and 19 ask 4 and 5, as do 4, 5, 11 and 12


def test_long_prompts_are_dropped_counted_once_and_replaced(tmp_path):
    task = from_file(tmp_path, long=(3, 8, 18))
    assert indices(task.held_out(4)) == [15, 16, 17, 19]
    steps = [indices(task.train_prompts(i, 4)) for i in range(6)]
    assert [len(step) for step in steps] == [4] * 6
    assert {row for step in steps for row in step} <= set(range(15)) - {3, 8}
    assert task.num_dropped == 3


def test_a_prompt_of_exactly_the_allowed_length_stays(tmp_path):
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [{"prompt": "1234", "answer": 0}]), num_held_out=0)
    length = len(built(config).train_prompts(0, 1)[0].tokens_T)
    assert len(built(config, max_prompt_tokens=length).train_prompts(0, 1)) == 1
    with pytest.raises(UserError, match=f"1 longer than {length - 1} tokens"):
        built(config, max_prompt_tokens=length - 1).train_prompts(0, 1)


def test_more_prompts_a_step_than_rows_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"num_prompts is 17, but .* only 16 training rows"):
        from_file(tmp_path).train_prompts(0, 17)


def test_holding_out_everything_is_refused(tmp_path):
    for num in (20, 21):
        with pytest.raises(UserError, match="leaves none to train on"):
            from_file(tmp_path, num_held_out=num)


def test_holding_out_nothing_gives_no_held_out_prompts(tmp_path):
    task = from_file(tmp_path, num_held_out=0)
    assert task.held_out(8) == []
    assert sorted(indices(task.train_prompts(0, 20))) == list(range(20))


def test_a_held_out_split_is_evaluated_on_under_indices_of_its_own(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"prompt": f"a{i}", "answer": i} for i in range(6)])
    jsonl(folder / "test.jsonl", [{"prompt": "a3", "answer": 3}, {"prompt": "b", "answer": 1}])
    config = TaskConfig(name=str(folder), held_out_split="test", num_held_out=1)
    task = built(config)
    assert [(p.index, p.columns["answer"]) for p in task.held_out(5)] == [(6, 3)]
    assert sorted(indices(task.train_prompts(0, 5))) == [0, 1, 2, 4, 5]
    assert indices(built(dataclasses.replace(config, num_held_out=9)).held_out(9)) == [6, 7]


def test_the_name_says_what_is_learned(tmp_path):
    assert built(GYM).name == "reasoning-gym basic_arithmetic"
    assert from_file(tmp_path).name == str(tmp_path / "x.jsonl")


def file_of(folder, num_rows, name="x.jsonl"):
    rows = [{"prompt": f"{name} {i}", "answer": i} for i in range(num_rows)]
    return jsonl(folder / name, rows)


@pytest.mark.parametrize(("num_rows", "expected"), [(40, 32), (640, 32), (2000, 100), (6000, 256)])
def test_a_share_of_the_own_training_rows_is_held_out(tmp_path, num_rows, expected):
    task = built(TaskConfig(name=file_of(tmp_path, num_rows)))
    assert len(task.held_out(None)) == expected


@pytest.mark.parametrize(("given", "expected"), [(None, 300), (32, 32), (0, 0), (1000, 300)])
def test_a_file_of_held_out_rows_is_held_out_whole_unless_a_number_says_less(tmp_path, given, expected):
    names = {"name": file_of(tmp_path, 8), "held_out_split": file_of(tmp_path, 300, "held-out.jsonl")}
    task = built(TaskConfig(**names, num_held_out=given))
    assert len(task.held_out(None)) == expected


def test_rows_that_differ_in_another_column_alone_are_apart_where_all_prompts_are_the_same(tmp_path):
    rows = [{"prompt": "Play.", "k": i % 6} for i in range(12)]
    same = built(TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=2))
    assert sorted(indices(same.train_prompts(0, 8))) == [0, 1, 2, 3, 6, 7, 8, 9]  # not 4 and 5: k as held out
    rows[0]["prompt"] = "Go."
    other = built(TaskConfig(name=jsonl(tmp_path / "y.jsonl", rows), num_held_out=2))
    with pytest.raises(UserError, match="has only 1 training rows"):
        other.train_prompts(0, 8)
