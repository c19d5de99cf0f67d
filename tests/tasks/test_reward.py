import asyncio
import json
import os
import sys
import time
from pathlib import Path

import pytest

from material import SUMS, group, tokenizer
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool, Task
from qerl.tasks.reward import format_failures, imported
from qerl.tasks.reward_means import distinct_names, reward_means
from qerl.types import Group


@pytest.fixture
def pool():
    """pool(function, ..., field=value) starts one; it is closed after the test."""
    started = []

    def start(*functions, **fields):
        started.append(RewardPool(TaskConfig(**fields), functions))
        return started[-1]

    yield start
    for one in started:
        one.close()


def by_name(completions, **kwargs):
    """The reward that the completion asks for."""
    ways = {
        "hang": lambda: time.sleep(600),
        "exit": lambda: os._exit(1),
        "raise": lambda: [1 / 0],
        "long": lambda: [1.0, 2.0],
        "text": lambda: ["1.0"],
        "nan": lambda: [float("nan")],
        "abstain": lambda: [None],
    }
    return ways.get(completions[0], lambda: [1.0])()


def test_rewards_come_by_group_and_sample(pool):
    groups = [group("7", "8", answer="7"), group("9", answer="9"), group(answer="1")]
    assert pool().score(groups) == [[1.0, 0.0], [1.0], []]
    assert pool().score([]) == []


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("hang", "over the deadline"),
        ("exit", "ended its process"),
        ("raise", "raised ZeroDivisionError"),
        ("long", "wrong length"),
        ("text", "not a number"),
        ("nan", "not finite"),
    ],
)
def test_a_reward_that_fails_costs_its_sample_and_is_counted_by_cause(pool, way, cause):
    one = pool(by_name, reward_timeout_s=1.5 if way == "hang" else 30.0)
    assert one.score([group("a", way), group("b", "c")]) == [[1.0, None], [1.0, 1.0]]
    assert one.failures == {cause: 1}
    (line,) = format_failures(one.take_failures())
    assert line.startswith(f"no reward for 1 sample: {cause}: ")
    assert not one.failures and not one.take_failures()
    assert one.score([group("a")]) == [[1.0]]


async def waits(completions):
    await asyncio.sleep(0)
    return json.loads(completions[0])


def test_a_failure_says_where_in_the_users_file_it_was(pool):
    here, line = Path(__file__).name, waits.__code__.co_firstlineno + 2
    one = pool(waits)
    one.attempt([group("x")])
    assert one.take_failures()["raised JSONDecodeError"][1].endswith(f"char 0) ({here}:{line})")


def test_failures_add_up_until_they_are_taken(pool):
    one = pool(by_name)
    one.score([group("raise", "nan", "ok")])
    one.score([group("raise", "ok")])
    taken = one.take_failures()
    assert {cause: count for cause, (count, _) in taken.items()} == {
        "raised ZeroDivisionError": 2,
        "not finite": 1,
    }
    assert taken["raised ZeroDivisionError"][1].startswith("by_name: division by zero")


def test_an_abstention_is_no_failure(pool):
    one = pool(by_name)
    assert one.score([group("abstain", "ok")]) == [[None, 1.0]]
    assert not one.failures


def test_a_step_without_any_reward_ends_the_run_with_the_most_common_cause(pool):
    one = pool(by_name)
    with pytest.raises(UserError, match="2 of 3 failed: raised ZeroDivisionError: by_name: division"):
        one.score([group("raise", "nan"), group("raise")])
    with pytest.raises(UserError, match="by_name returned None for every sample"):
        one.score([group("abstain", "abstain")])


def test_a_conversation_is_scored_as_messages_and_plain_text_as_strings(pool):
    def sees(prompts, completions, **kwargs):
        talk = [[{"role": "user", "content": "?"}]], [[{"role": "assistant", "content": "yes"}]]
        plain = ["What is 1 + 2?"], ["yes"]
        return [{True: 1.0}.get((prompts, completions) == talk, 2.0 * ((prompts, completions) == plain))]

    groups = [group("yes", messages=[{"role": "user", "content": "?"}]), group("yes")]
    assert pool(sees).score(groups) == [[1.0], [2.0]]


def test_completion_ids_are_the_samples_tokens(pool):
    assert pool(lambda completion_ids: [sum(completion_ids[0])]).score([group("ab")]) == [[97.0 + 98.0]]


def test_functions_take_the_place_of_the_configs_rewards_and_its_weights_are_theirs(pool):
    one = pool(
        lambda completions: [1.0], lambda completions: [10.0], rewards=("x", "y"), reward_weights=(2.0, 0.5)
    )
    assert one.score([group("a")]) == [[7.0]]
    with pytest.raises(UserError, match="a weight for each of 1 rewards, got 2"):
        pool(by_name, rewards=("x", "y"), reward_weights=(2.0, 0.5))


def test_several_built_in_rewards_are_weighted(pool):
    one = pool(rewards=("numeric", "tags"), reward_weights=(1.0, 0.25))
    texts = "<think>a</think><answer>7</answer>", "7", "<think>7</think><answer>8</answer>"
    assert one.score([group(*texts, answer="7")]) == [[1.25, 1.0, 0.25]]


def test_each_of_several_rewards_has_a_mean_before_its_weight_until_it_is_taken(pool):
    one = pool(rewards=("numeric", "tags"), reward_weights=(1.0, 0.25))
    texts = "<think>a</think><answer>7</answer>", "7", "<think>7</think><answer>8</answer>", "8"
    one.score([group(*texts, answer="7")])
    assert one.take_means() == {"rewards/numeric/mean": 0.5, "rewards/tags/mean": 0.5}
    assert one.take_means() == {}
    one.score([group("7", answer="7")])
    assert one.take_means() == {"rewards/numeric/mean": 1.0, "rewards/tags/mean": 0.0}


def test_failures_and_abstentions_have_no_share_in_a_mean_and_two_names_are_told_apart(pool):
    one = pool(lambda completions: [float(completions[0])], lambda completions: [None], by_name)
    one.score([group("2", "x", "4")])
    assert one.take_means() == {"rewards/<lambda>/mean": 3.0, "rewards/by_name/mean": 1.0}
    two = pool(lambda completions: [1.0], lambda completions: [2.0])
    two.score([group("a")])
    assert two.take_means() == {"rewards/<lambda>/mean": 1.0, "rewards/<lambda>_2/mean": 2.0}


def test_a_name_given_to_a_repeated_reward_is_not_that_of_another(pool):
    assert distinct_names(["a", "a", "a_2"]) == ["a", "a_3", "a_2"]
    assert distinct_names(["a", "a", "a", "a_2", "a_2"]) == ["a", "a_3", "a_4", "a_2", "a_2_2"]
    functions = [lambda completions, value=value: [value] for value in (1.0, 2.0, 3.0)]
    functions[2].__name__ = "<lambda>_2"
    one = pool(*functions)
    one.score([group("a")])
    means = {"rewards/<lambda>/mean": 1.0, "rewards/<lambda>_3/mean": 2.0, "rewards/<lambda>_2/mean": 3.0}
    assert one.take_means() == means


def test_one_reward_alone_has_no_mean_beside_the_reward(pool):
    one = pool()
    one.score([group("7", answer="7")])
    assert one.take_means() == {}


def test_the_means_of_ranks_are_those_of_all_samples():
    ranks = [{"a": (2.0, 4), "b": (1.0, 1)}, {"a": (6.0, 4), "b": (0.0, 0)}]
    assert reward_means(ranks) == {"rewards/a/mean": 1.0, "rewards/b/mean": 1.0}
    assert reward_means([]) == reward_means([{"a": (1.0, 1)}]) == {}


def test_math_runs_in_a_worker_and_is_killed_when_it_does_not_end(pool):
    import math_verify  # here, as a worker that is forked later need not: its deadline counts that too

    assert math_verify
    one = pool(rewards=("math",), reward_timeout_s=3.0)
    assert one.score([group(r"\boxed{\frac{1}{2}}", "$9^{9^{9^{9}}}$", "0.4", answer="0.5")])[0][::2] == [
        1.0,
        0.0,
    ]


def test_gym_samples_are_scored_from_prompt_to_reward(pool):
    config = {"gym_options": SUMS, "num_rows": 500, "num_held_out": 16, "rewards": ("gym",)}
    task = Task(TaskConfig(**config), tokenizer(), seed=0, max_prompt_tokens=500)
    groups = []
    for prompt in task.train_prompts(0, 4):
        samples_G = group(prompt.columns["answer"], "x").samples_G
        groups.append(Group(prompt=prompt, samples_G=samples_G))
    assert pool(**config).score(groups) == [[1.0, 0.0]] * 4


def test_a_column_that_is_not_there_is_refused_before_anything_is_scored(pool):
    def asks(completions, solution):
        return [1.0]

    with pytest.raises(
        UserError, match=r"asks needs solution, but the data has no such column; .* there are: answer, level"
    ):
        pool(asks).score([group("a", answer="1", level=2)])
    with pytest.raises(UserError, match=r"task.answer_column: no column 'gold' \(there are: answer\)"):
        pool(answer_column="gold").score([group("a", answer="1")])
    assert pool(by_name, answer_column="gold").score([group("a", answer="1")]) == [[1.0]]


def test_128_samples_of_a_trivial_reward_take_half_a_second_of_this_process_at_most(pool):
    one = pool(lambda completions: [1.0])
    groups = [group(*"abcdefgh", answer="x" * 500) for _ in range(16)]
    one.score(groups)
    start_s = time.process_time()
    one.score(groups)
    assert time.process_time() - start_s < 0.5


def test_no_process_is_left_after_the_with_block():
    with RewardPool(TaskConfig(), [lambda completions: [float(os.getpid())]]) as one:
        pids = {int(reward) for reward in one.score([group(*"abcdefgh")])[0]}
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def refused(name: str) -> str:
    with pytest.raises(UserError) as error:
        RewardPool(TaskConfig(rewards=(name,)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_reward_is_taken_from_a_file(pool, tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n\n"
        "@dataclasses.dataclass\nclass Judge:\n    bonus: float = 0.5\n"
        "def judge(completions, **kwargs):\n    return [Judge().bonus]\n"
    )
    assert pool(rewards=(f"{path}:judge",)).score([group("a")]) == [[0.5]]


def test_a_reward_imports_what_lies_beside_its_file_or_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as for the program `qerl`
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_a_reward.py").write_text("def value(completions): return [0.25]\n")
    (tmp_path / "colorsys.py").write_text("raise SystemExit\n")  # hides nothing that is installed
    (tmp_path / "mine.py").write_text("import colorsys\nfrom beside_a_reward import value as judge\n")
    for name in ("mine.py:judge", "beside_a_reward:value"):
        assert imported(name, "task.rewards")(["a"]) == [0.25]
        sys.path.remove(str(tmp_path))
        del sys.modules["beside_a_reward"]


def test_a_reward_edited_within_a_second_is_read_anew(tmp_path, monkeypatch):
    """Its .pyc would be taken for that of the edited file: both have one size and one second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, found = tmp_path / "edited.py", []
    for value in (1, 2):
        path.write_text(f"def score(**columns):\n    return {value}\n")
        os.utime(path, (1e9, 1e9))
        found.append(imported(f"{path}:score", "task.rewards")())
    assert found == [1, 2] and not (tmp_path / "__pycache__").exists()


def test_a_reward_is_taken_from_a_module(pool, tmp_path, monkeypatch):
    (tmp_path / "some_rewards.py").write_text("def judge(completions): return [0.75]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert pool(rewards=("some_rewards:judge",)).score([group("a")]) == [[0.75]]
    del sys.modules["some_rewards"]


def test_a_reward_that_cannot_be_had_is_refused_in_one_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("number = 1\ndef judge(completions): return [1.0]\n")
    assert "did you mean numeric" in refused("numerik") and "exact, numeric" in refused("numerik")
    assert "ModuleNotFoundError" in refused("no_such_module:judge")
    assert refused(f"{tmp_path}/other.py:judge").endswith("other.py:judge: no such file")
    assert "did you mean judge" in refused(f"{path}:juge")
    assert "number is of type int, not a function" in refused(f"{path}:number")
    path.write_text("raise SystemExit('stop\\nnow')\n")
    assert "cannot import" in refused(f"{path}:judge") and "SystemExit: stop" in refused(f"{path}:judge")
    path.write_text("def judge(:\n")
    assert "SyntaxError" in refused(f"{path}:judge")
