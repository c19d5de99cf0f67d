"""Tools and environment_factory of TRL over qerl's environments."""

import json
import random

import pytest

import tiny_run
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.tasks.environment import Call
from qerl.trl import GRPOConfig, GRPOTrainer
from qerl.trl.tools import make_environment, with_tool_calls


def add(left: int, right: int) -> int:
    """
    Add two numbers.

    Args:
        left: The first number.
        right: The second number.
    """
    return left + right


class Counter:
    """An environment in TRL's form."""

    def reset(self, **row) -> str:
        self.total, self.start = 0, random.randrange(1000)
        return f" start {self.start}"

    def grow(self, by: int) -> str:
        """
        Grow the total.

        Args:
            by: How much.
        """
        if by < 0:
            raise ValueError("too small")
        self.total += by
        return f"total {self.total}"

    def get_reward(self) -> float:
        return float(self.total)


def total_reward(environments, completions, answer, **kwargs):
    assert answer == ["7"]
    return [
        env.total * sum(len(turn.get("tool_calls", ())) for turn in completions[0]) for env in environments
    ]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_run_tools_of_the_samples_own_environment_which_gives_the_reward_at_the_end():
    environment, schemas = make_environment([add], Counter, [(total_reward, 0.5)])
    assert [schema["function"]["name"] for schema in schemas] == ["add", "grow"]
    row = {"prompt": [{"role": "user", "content": "Go."}], "answer": "7"}
    with RewardPool(TaskConfig(), functions=[environment]) as pool:
        assert pool.scores_episodes and pool.extends_prompt
        a, b = (0, 0), (0, 1)
        openings = pool.play([Call("reset", key, row, seed=5) for key in (a, b)])
        assert openings[0].messages == openings[1].messages and "start" in openings[0].messages[0]["content"]
        turn = f"Sure. {call('grow', by=3)}{call('add', left=1, right=2)}"
        one, other = pool.play([Call("step", a, turn), Call("step", b, call("grow", by=-1))])
        assert [m["content"] for m in one.messages] == ["total 3", "3"] and not one.is_done
        assert other.messages == [{"role": "tool", "content": "{'error': 'too small'}"}]
        (last,) = pool.play([Call("step", a, "It is 3.")])
        assert last.is_done and last.messages == [] and last.reward is None
        said = [{"role": "assistant", "content": turn}, *one.messages, {"role": "assistant", "content": "3."}]
        scored = pool.play(
            [Call("score", a, said), Call("score", b, [{"role": "assistant", "content": "x"}])]
        )
        assert [reply.reward for reply in scored] == [3 + 0.5 * 3 * 2, 0.0]


def test_reward_functions_see_calls_and_results_by_name():
    turns = [{"role": "assistant", "content": f"Hm. {call('add', left=1)}"}, {"role": "tool", "content": "1"}]
    first, second = with_tool_calls(turns, {"add"})
    function = {"name": "add", "arguments": {"left": 1}}
    assert (
        first["tool_calls"] == [{"type": "function", "function": function}]
        and "<tool" not in first["content"]
    )
    assert second == {"role": "tool", "name": "add", "content": "1"}
    assert "tool_calls" not in with_tool_calls(turns, {"other"})[0]


@pytest.mark.parametrize("text", ["", " ", "\n\n", "\t \n", " a ", "{", "<tool_call>"])
def test_a_turn_without_calls_keeps_its_text_white_space_too(text):
    turns = [{"role": "assistant", "content": text}]
    assert with_tool_calls(turns, {"add"}) == with_tool_calls(turns, set()) == turns


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_run.write_model(tmp_path_factory.mktemp("model"), max_positions=1024)
    path = folder / "chat_template.jinja"
    path.write_text("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + path.read_text())
    return str(folder)


def arguments(out, **more):
    given = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
    }
    return GRPOConfig(output_dir=str(out), **given | {"bf16": False} | more)


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def test_an_environment_owns_data_tools_and_reward(model, tmp_path):
    trainer = GRPOTrainer(model, args=arguments(tmp_path), environment_factory=Counter)
    trainer.train()
    found = samples(tmp_path)
    assert len(found) == 8 and all(sample["reward"] == 0.0 for sample in found)
    assert all(sample["prompt"].startswith("[grow]<|im_start|> start ") for sample in found)


def test_tools_are_offered_and_the_functions_get_conversations(model, tmp_path):
    def reward(completions, **kwargs):
        return [float(turns[-1]["role"] == "assistant") for turns in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]
    args = arguments(tmp_path, reward_weights=[3.0], max_tool_calling_iterations=2)
    trainer = GRPOTrainer(model, reward, args, rows, tools=[add])
    assert trainer.config.task.environment.max_turns == 3
    trainer.train()
    assert all(s["prompt"].startswith("[add]") and s["reward"] == 3.0 for s in samples(tmp_path))


def test_what_cannot_be_done_is_refused(tmp_path):
    for more, message in (
        ({"tools": [lambda x: x]}, "^tools: "),
        ({"environment_factory": {"a": Counter, "b": Counter}}, "environment_factory: one environment"),
        ({"environment_factory": object}, "environment_factory: its object has no reset"),
        ({"rollout_func": print}, "rollout_func is not supported"),
        ({}, "reward_funcs: there is no reward function"),
        ({"tools": [add]}, "reward_funcs is empty, and the environment has no get_reward"),
    ):
        with pytest.raises(UserError, match=message):
            GRPOTrainer("model", None, arguments(tmp_path), [{"prompt": "a"}] * 4, **more)
