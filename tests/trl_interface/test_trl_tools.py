"""Tools and environment_factory of TRL over qerl's environments."""

import asyncio
import dataclasses
import json
import random
import re

import pytest
from PIL import Image
from transformers import AutoTokenizer

import tiny_run
from qerl.config import TaskConfig
from qerl.errors import RunError, UserError
from qerl.tasks import RewardPool
from qerl.tasks.call_forms.choice import form_of
from qerl.tasks.environment import Call
from qerl.trl import GRPOConfig, GRPOTrainer
from qerl.trl.tools import make_environment, of_conversations, with_tool_calls
from qerl.types import Group, Prompt, Sample


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


class Mirror:
    """Another environment, with another tool and another reward."""

    def reset(self, **row) -> str:
        assert not {"environment", "tools"} & row.keys()
        return " look"

    def turn(self) -> str:
        """Turn around."""
        return "done"

    def get_reward(self) -> float:
        return 5.0


def test_rows_name_their_environment_and_are_shown_its_tools_only(model, tmp_path):
    names = ["counter", "mirror"] * 4
    rows = [{"prompt": [{"role": "user", "content": "?"}], "environment": name} for name in names]
    factory = {"counter": Counter, "mirror": Mirror}
    GRPOTrainer(model, None, arguments(tmp_path), rows, environment_factory=factory).train()
    with pytest.raises(UserError, match="environment of a row is 'mirror': environment_factory has counter"):
        GRPOTrainer(model, None, arguments(tmp_path), rows, environment_factory={"counter": Counter})
    with pytest.raises(UserError, match="environment_factory has no environment: give factories by name"):
        GRPOTrainer(model, None, arguments(tmp_path), rows, environment_factory={})
    kinds = {(s["prompt"].partition("<|im_start|>")[0], s["reward"]) for s in samples(tmp_path)}
    assert kinds <= {("[grow]", 0.0), ("[turn]", 5.0)} and kinds
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shown = {name: step[name] for step in steps for name in step if name.startswith("reward_in_")}
    assert shown.items() <= {"reward_in_counter": 0.0, "reward_in_mirror": 5.0}.items() and shown


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
        ({"environment_factory": object}, "environment_factory: its object has no reset"),
        ({"rollout_func": print}, "rollout_func is not supported"),
        ({}, "reward_funcs: there is no reward function"),
        ({"tools": [add]}, "reward_funcs is empty, and the environment has no get_reward"),
    ):
        with pytest.raises(UserError, match=message):
            GRPOTrainer("model", None, arguments(tmp_path), [{"prompt": "a"}] * 4, **more)


class Seat:
    """An environment of which there are as many as addresses."""

    addresses = iter(())

    def __init__(self):
        self.address, self.num_resets = next(Seat.addresses), 0

    def reset(self, **row) -> str:
        self.num_resets += 1
        return "begin"

    def look(self) -> str:
        """Look around."""
        return f"{self.address} {self.num_resets}"

    def get_reward(self) -> float:
        return 1.0


def looks(pool, keys):
    replies = pool.play([Call("step", key, call("look")) for key in keys])
    return [reply.messages[0]["content"] for reply in replies]


def test_environments_are_made_once_and_reset_for_each_episode():
    Seat.addresses = iter(["a", "b"])
    environment, _ = make_environment([], Seat, [])
    row = {"prompt": [{"role": "user", "content": "Go."}]}
    with RewardPool(TaskConfig(), functions=[environment]) as pool:
        for number in (1, 2, 3):
            keys = [(number, 0), (number, 1)]
            pool.play([Call("reset", key, row) for key in keys])
            assert looks(pool, keys) == [f"a {number}", f"b {number}"]
            pool.play([Call("close", key) for key in keys])
        pool.play([Call("reset", (9, g), row) for g in range(2)])
        (third,) = pool.play([Call("reset", (9, 2), row)])
    assert third.cause == "not supported" and "has no more than 2 environments" in third.message
    assert next(Seat.addresses) == "a"  # none was used up to learn of the tools


def test_functions_that_are_not_async_may_run_a_loop_of_their_own():
    class Road(Counter):
        def __init__(self):
            self.loop = asyncio.new_event_loop()

        def reset(self, **row) -> str:
            return self.loop.run_until_complete(self._later("begin"))

        def look(self) -> str:
            """Look around."""
            return asyncio.run(self._later("road"))

        async def wait(self) -> str:
            """Wait."""
            return await self._later("waited")

        async def _later(self, text):
            await asyncio.sleep(0)
            return text

    environment, _ = make_environment([], Road, [])
    with RewardPool(TaskConfig(), functions=[environment]) as pool:
        (opening,) = pool.play([Call("reset", (0, 0), {"prompt": "Go."})])
        assert opening.messages == [{"role": "user", "content": "begin"}]
        (reply,) = pool.play([Call("step", (0, 0), call("look") + call("wait"))])
    assert [message["content"] for message in reply.messages] == ["road", "waited"]


class Camera:
    """Returns what no text can say."""

    def reset(self, kind="text", **row):
        self.kind = kind
        return self.look() if kind.startswith("reset") else None

    def look(self) -> list:
        """Look around."""
        image = Image.new("RGB", (4, 4))
        return {
            "text": [{"type": "text", "text": "a "}, {"type": "text", "text": "road"}],
            "block": [{"type": "image", "image": image}, {"type": "text", "text": "road"}],
            "picture": image,
            "nested": {"view": [image]},
            "audio": [{"type": "audio", "audio": b""}],
            "object": object(),
            "rows": [("a", 1)],
            "reset block": [{"type": "image_url", "image_url": "x"}],
            "reset text": [{"type": "text", "text": "begin"}],
        }[self.kind]

    def get_reward(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("block", "the tool look returned a block of type image: only texts are supported"),
        ("picture", r"the tool look returned <PIL.Image.Image .* at 0x\w+>: only texts are supported"),
        ("nested", r"the tool look returned .* at 0x\w+>"),
        ("audio", "the tool look returned a block of type audio"),
        ("object", r"the tool look returned <object object at 0x\w+>"),
        ("reset block", "reset returned a block of type image_url"),
    ],
)
def test_a_result_that_is_no_text_ends_the_run_by_name(kind, said):
    environment, _ = make_environment([], Camera, [])
    with RewardPool(TaskConfig(), functions=[environment]) as pool:
        (reply,) = pool.play([Call("reset", (0, 0), {"prompt": "Go.", "kind": kind})])
        if not kind.startswith("reset"):
            (reply,) = pool.play([Call("step", (0, 0), call("look"))])
        assert reply.cause == "not supported" and re.search(said, reply.message)
        sample = Sample(tokens_T=[1], logprobs_T=[0.0], text="", finish="stop", version=0)
        failed = dataclasses.replace(sample, failure=(reply.cause, reply.message))
        prompt = Prompt(index=0, text="Go.", tokens_T=[1], columns={}, messages=None)
        with pytest.raises(UserError, match=rf"^task\.rewards: Camera\.\w+: {said}"):
            pool.score([Group(prompt=prompt, samples_G=[sample, failed])])


def test_blocks_of_texts_and_other_values_are_texts():
    environment, _ = make_environment([], Camera, [])
    with RewardPool(TaskConfig(), functions=[environment]) as pool:
        for kind, text in (("text", "a road"), ("rows", "[('a', 1)]")):
            pool.play([Call("reset", (0, 0), {"prompt": "Go.", "kind": kind})])
            (reply,) = pool.play([Call("step", (0, 0), call("look"))])
            assert reply.messages == [{"role": "tool", "content": text}]
        (reply,) = pool.play([Call("reset", (0, 0), {"prompt": "Go.", "kind": "reset text"})])
        assert reply.messages == [{"role": "user", "content": "begin"}]


def test_no_more_environments_exist_than_a_generation_of_trl_has_samples(model, tmp_path):
    Seat.addresses = iter(["a", "b"])
    args = arguments(
        tmp_path,
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=1,
        gradient_accumulation_steps=4,
    )
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]
    trainer = GRPOTrainer(model, args=args, train_dataset=rows, environment_factory=Seat)
    assert trainer.config.num_prompts == 4 and trainer.config.task.environment.max_environments == 2
    trainer.train()
    assert [sample["reward"] for sample in samples(tmp_path)] == [1.0] * 16


def test_a_run_in_which_most_episodes_fail_ends_with_an_error(model, tmp_path):
    class Broken(Counter):
        def reset(self, number=0, **row) -> str:
            if number % 4:
                raise ConnectionError("the server is gone")
            return super().reset(**row)

    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "number": i} for i in range(8)]
    args = arguments(tmp_path, per_device_train_batch_size=32, max_steps=1)
    trainer = GRPOTrainer(model, args=args, train_dataset=rows, environment_factory=Broken)
    with pytest.raises(RunError, match=r"^24 of 32 episodes have failed: .*the server is gone"):
        trainer.train()
    trainer = GRPOTrainer(model, args=args, train_dataset=rows, environment_factory=Broken)
    with pytest.raises(UserError, match=r"^evaluate: 24 of 32 episodes have failed"):
        trainer.evaluate(rows)


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "mistral", "llama3"])
def test_turns_are_read_in_the_form_of_the_tokenizers_template(name):
    form = form_of("", name)
    text = {
        "qwen_xml": "<tool_call><function=add>\n<parameter=left>1</parameter></function></tool_call>",
        "glm45": "<tool_call>add\n<arg_key>left</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "mistral": 'add{"left": 1}',
        "llama3": '{"name": "add", "parameters": {"left": 1}}',
    }[name]
    turns = [{"role": "assistant", "content": text}]
    (turn,) = with_tool_calls(turns, {"add"}, form)
    assert turn["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"left": 1}}}]
    seen = of_conversations(lambda completions: completions, {"add"}, form)(completions=[turns])
    assert seen == [[turn]]


def test_a_trainer_takes_the_form_of_its_tokenizer(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += "{# <function= #}"
    rows = [{"prompt": [{"role": "user", "content": "Go."}]}]
    args = GRPOConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, max_steps=1)
    trainer = GRPOTrainer(
        model, lambda completions: [0.0], args, rows, tools=[add], processing_class=tokenizer
    )
    assert trainer._rewards[-1].call_form.name == "qwen_xml"
    plain = GRPOTrainer(model, lambda completions: [0.0], args, rows, tools=[add])
    assert plain._rewards[-1].call_form.name == "hermes"
