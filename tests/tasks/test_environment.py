"""The environments' process: valid replies, and failures that affect one sample only."""

import asyncio
import dataclasses
import os
import time
from pathlib import Path

import numpy as np
import pytest

from material import CHATML, END, START, sample, tokenizer
from processes import PARENT, all_running
from qerl.config import EnvironmentConfig, EvalConfig, TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.tasks.environment import Call, EnvironmentReply
from qerl.tasks.higher_lower import higher_lower
from qerl.tasks.reward import resolve
from qerl.tasks.rows.prompt import chat_reply_tokens, plain_reply_tokens
from qerl.training.rollouts.rollout import environment_metrics, returned_metrics, rollout_metrics
from qerl.types import Episode, Group, Prompt


class Text(str):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Echo:
    """Does what a row or a completion asks for."""

    async def reset(self, row, seed):
        self.row, self.seed, self.num_steps = row, seed, 0
        if row.get("way") == "fail":
            raise KeyError("no such world")
        return row.get("opening")

    async def step(self, completion):
        self.num_steps += 1
        way, _, rest = completion.partition(" ")
        if way == "sleep":
            await asyncio.sleep(float(rest))
        elif way == "block":
            time.sleep(float(rest))
        elif way == "spin":
            while True:
                pass
        elif way == "swallow":
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
        elif way == "exit":
            raise SystemExit(3)
        elif way == "die":
            os._exit(3)
        elif way == "late":
            raise TimeoutError("of its own")
        given = {"nan": ("", float("nan"), False), "pair": ("", 1.0), "text": ("", "1", False)}
        given |= {"half": ("\ud83d", 1.0, False), "huge": ("", 1e308, False), "digits": ("", 10**400, False)}
        given |= {
            "own": (Text("hi"), 1.0, False),
            "critic": ([{"role": "x\ud83d", "content": ""}], 1.0, False),
        }
        given |= {"ints": ([1], 1.0, False), "numpy": (None, np.float32(0.5), np.bool_(True))}
        return given.get(
            way, (f"{self.seed} {self.num_steps} {completion}", float(self.num_steps), way == "end")
        )


@pytest.fixture
def pool():
    """pool(environment, ..., field=value) starts one; it is closed after the test."""
    started = []

    def start(*functions, **fields):
        started.append(RewardPool(TaskConfig(**({"reward_timeout_s": 30.0} | fields)), functions))
        return started[-1]

    yield start
    for one in started:
        one.close()


def children():
    """Processes that this one has started and that still run."""
    return sum(int(stat[PARENT]) == os.getpid() for stat in all_running().values())


def test_reward_workers_are_started_for_reward_functions_alone(pool):
    before = children()
    pool(Echo, reward_workers=3)
    stage = children() - before
    pool(Echo, lambda completions: [1.0], reward_workers=3)
    assert (stage, children() - before) == (2, 2 * stage + 1 + 3)  # each pool has a supervisor


def reset(one, num, **row):
    return one.play([Call("reset", (0, g), row, 7) for g in range(num)])


def stepped(one, *completions):
    return one.play([Call("step", (0, g), completion) for g, completion in enumerate(completions)])


def test_an_environment_lives_from_reset_to_close(pool):
    one = pool(Echo)
    assert reset(one, 2, opening="begin") == [EnvironmentReply([{"role": "user", "content": "begin"}])] * 2
    assert stepped(one, "a", "b") == [
        EnvironmentReply([{"role": "user", "content": f"7 1 {text}"}], 1.0, False) for text in "ab"
    ]
    assert stepped(one, "c")[0] == EnvironmentReply([{"role": "user", "content": "7 2 c"}], 2.0, False)
    assert stepped(one, "end")[0].is_done
    assert one.play([Call("close", (0, 0)), Call("close", (0, 1))]) == [
        EnvironmentReply([]),
        EnvironmentReply([]),
    ]
    assert stepped(one, "d")[0].cause == "died"


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("sleep 9", "over the deadline"),
        ("block 9", "over the deadline"),
        ("spin", "over the deadline"),
        ("exit", "raised SystemExit"),
        ("late", "raised TimeoutError"),
        ("nan", "not finite"),
        ("pair", "wrong length"),
        ("text", "not a number"),
        ("ints", "not messages"),
        ("half", "not messages"),
        ("critic", "not messages"),
        ("huge", "too large"),
        ("digits", "too large"),
    ],
)
def test_an_environment_that_fails_costs_its_own_sample_alone(pool, way, cause):
    one = pool(Echo, reward_timeout_s=1.0 if cause == "over the deadline" else 30.0)
    reset(one, 3)
    first, failed, last = stepped(one, "a", way, "b")
    assert failed.cause == cause and failed.message.startswith("Echo.step: ")
    assert (first.reward, last.reward) == (1.0, 1.0)
    first, last = one.play([Call("step", (0, 0), "a"), Call("step", (0, 2), "b")])
    assert (first.reward, last.reward) == (2.0, 2.0)


def test_messages_of_a_subclass_of_str_are_strings(pool):
    one = pool(Echo)
    reset(one, 2)
    own, other = stepped(one, "own", "a")
    assert own.messages == [{"role": "user", "content": "hi"}] and type(own.messages[0]["content"]) is str
    assert other.reward == 1.0


class Closing:
    """Tells by a file that it was closed."""

    async def reset(self, row):
        self.path = Path(row["path"])

    async def step(self, completion):
        raise ValueError(completion)

    async def close(self):
        self.path.touch()


def test_an_environment_that_failed_is_closed_all_the_same(pool, tmp_path):
    one = pool(Closing)
    reset(one, 1, path=str(tmp_path / "closed"))
    assert stepped(one, "a")[0].cause == "raised ValueError" and not (tmp_path / "closed").exists()
    assert one.play([Call("close", (0, 0))]) == [EnvironmentReply([])] and (tmp_path / "closed").exists()


@pytest.mark.parametrize("way", ["die", "swallow"])
def test_what_no_signal_stops_is_ended_with_its_process_and_the_next_round_has_another(pool, way):
    one = pool(Echo, reward_timeout_s=30.0 if way == "die" else 1.0)
    reset(one, 2)
    causes = {reply.cause for reply in stepped(one, "a", way)}
    assert causes == ({"ended its process"} if way == "die" else {"over the deadline"})
    assert stepped(one, "a")[0].cause == "died"
    assert reset(one, 1) == [EnvironmentReply([])] and stepped(one, "a")[0].reward == 1.0


def test_a_reset_that_raises_is_a_failure_too(pool):
    one = pool(Echo)
    (failure,) = reset(one, 1, way="fail")
    assert failure.cause == "raised KeyError"
    line = Echo.reset.__code__.co_firstlineno + 3
    assert failure.message == f"Echo.reset: 'no such world' ({Path(__file__).name}:{line})"


def test_calls_wait_together_and_no_more_of_them_than_allowed(pool):
    calls = ["sleep 1"] * 8
    together = pool(Echo, reward_timeout_s=20.0)
    few = pool(Counting, reward_timeout_s=20.0, environment=EnvironmentConfig(max_concurrent=3))
    reset(together, 8), reset(few, 8)
    begin_s = time.perf_counter()
    stepped(together, *calls)
    assert time.perf_counter() - begin_s < 8 / 2
    assert max(reply.reward for reply in stepped(few, *calls)) == 3


class Counting:
    """The reward is how many of its kind were in a step."""

    inside = 0

    async def reset(self, row):
        pass

    async def step(self, completion):
        Counting.inside += 1
        seen = Counting.inside
        await asyncio.sleep(0.05)
        Counting.inside -= 1
        return None, seen, False


class Plain:
    """Without await, seed and close."""

    def reset(self, row):
        return [{"role": "system", "content": str(row["prompt"]), "name": "left out"}]

    def step(self, completion):
        return None, None, True


def test_functions_may_be_plain_ones(pool):
    one = pool(Plain)
    assert reset(one, 1, prompt="x") == [EnvironmentReply([{"role": "system", "content": "x"}])]
    assert stepped(one, "a") == [EnvironmentReply([], None, True)]


def test_numbers_of_numpy_are_numbers(pool):
    one = pool(Echo)
    reset(one, 1)
    assert stepped(one, "numpy") == [EnvironmentReply([], 0.5, True)]


class Double:
    """Says its text twice; it has a score at the end and no seed."""

    def reset(self, row):
        self.row = row

    def step(self, completion):
        return completion * 2, 2.0, True

    def score(self, messages):
        return float(len(messages))


def test_a_row_names_the_environment_that_plays_it():
    config = TaskConfig(rewards=("x", "y"), reward_weights=(1.0, 0.5))
    with RewardPool(config, [Echo, Double]) as pool:
        rows = [{"environment": name, "prompt": "?", "opening": "hi"} for name in ("Echo", "Double", "Other")]
        calls = [Call("reset", (0, i), row, 7) for i, row in enumerate(rows)]
        first, second, other = pool.play(calls)
        assert (first.messages, second.messages) == ([{"role": "user", "content": "hi"}], [])
        assert other.cause == "not supported"
        assert other.message.endswith("a row's environment is 'Other'; there are: Echo, Double")
        (doubled,) = pool.play([Call("step", (0, 1), "ab")])
        assert doubled == EnvironmentReply([{"role": "user", "content": "abab"}], 1.0, True)
        scores = pool.play([Call("score", (0, i), [{}, {}]) for i in (0, 1)])
        assert [score.reward for score in scores] == [None, 1.0]
        assert pool.play([Call("close", (0, i)) for i in range(2)]) == [EnvironmentReply([])] * 2
        with pytest.raises(UserError, match="has no column environment that names one of Echo, Double"):
            pool.check(Prompt(index=0, text="?", tokens_T=[1], messages=None, columns={}))


def test_two_environments_of_one_name_are_refused():
    other = type("Echo", (Double,), {})
    with pytest.raises(UserError, match="two environments are named Echo, which a row could not tell apart"):
        RewardPool(TaskConfig(rewards=("x", "y")), [Echo, other])


def test_metrics_are_apart_for_each_environment():
    def group(name, *rewards):
        messages = [{"role": "assistant", "content": "a"}] * len(rewards)
        samples = [
            dataclasses.replace(sample("a"), reward=r, messages=messages, failure=None if r else ("x", "y"))
            for r in rewards
        ]
        prompt = Prompt(index=0, text="?", tokens_T=[1], messages=None, columns={"environment": name})
        return Group(prompt=prompt, samples_G=samples)

    groups = [group("Echo", 1.0, None), group("a b", 3.0), group("Echo", 2.0), group("a-b", 4.0)]
    metrics = environment_metrics(groups, ["Echo", "a b", "unused", "a-b"])
    assert metrics == {
        **{"reward_in_Echo": 1.5, "turns_in_Echo": pytest.approx(5 / 3), "failed_in_Echo": 1},
        **{"reward_in_a_b": 3.0, "turns_in_a_b": 1, "failed_in_a_b": 0},
        **{"reward_in_a_b_2": 4.0, "turns_in_a_b_2": 1, "failed_in_a_b_2": 0},
    }
    assert environment_metrics([group(None, 1.0), group("row 7", 1.0)], ["Echo", "a b"]) == {}


def test_a_column_that_names_none_of_the_environments_of_a_run_makes_no_metric(pool):
    one, several = pool(Echo), pool(Echo, Double)
    assert one.environments == () and several.environments == ("Echo", "Double")
    row = Prompt(index=0, text="?", tokens_T=[1], messages=None, columns={"environment": "world 17"})
    said = [{"role": "assistant", "content": "a"}]
    groups = [Group(prompt=row, samples_G=[dataclasses.replace(sample("a"), reward=1.0, messages=said)])]
    for each in (one, several):
        found = rollout_metrics(TaskConfig(), EvalConfig(), groups, each.environments)
        assert found["turns"] == 1 and not [name for name in found if "_in_" in name]


def test_metrics_of_agents_are_as_many_as_are_logged_whatever_rows_they_name():
    numbers = {"num_turns": 1, "num_tool_calls": 0, "num_tool_failures": 0, "waiting_share": 0.0}
    named = [{"moves": i, f"row_{i:03}": 1} for i in range(100)]
    found = returned_metrics([Episode(parts=(), **numbers, metrics=metrics) for metrics in named])
    assert len(found) == 64 and found["agent_moves"] == 49.5 and "agent_row_062" in found


def test_a_class_that_is_no_environment_is_refused_by_name():
    class Misspelled:
        def resett(self, row): ...
        def step(self, completion): ...

    with pytest.raises(
        UserError, match=r"Misspelled is a class, but not an environment: .* reset\(row, seed\)"
    ):
        RewardPool(TaskConfig(), [Misspelled])


def test_between_two_turns_stands_what_the_template_puts_there():
    said = [{"role": "tool", "content": "119"}, {"role": "user", "content": "go on"}]
    text = "\n<|im_start|>tool\n119<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    made = tokenizer()
    stopped_T = chat_reply_tokens(made, said, "<|im_end|>")
    assert made.decode(stopped_T) == text and stopped_T.count(END) == 2 and stopped_T.count(START) == 3
    assert made.decode(chat_reply_tokens(made, said, "")) == f"<|im_end|>{text}"


def test_turns_appended_so_are_what_the_template_makes_of_the_whole_conversation():
    made = tokenizer(CHATML)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = [{"role": "user", "content": "c"}]
    prompt = made.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = made.apply_chat_template([*messages, *said], tokenize=False, add_generation_prompt=True)
    assert f"{prompt}b<|im_end|>{made.decode(chat_reply_tokens(made, said, '<|im_end|>'))}" == whole


def test_a_template_that_leaves_an_assistant_out_or_refuses_a_role_is_refused():
    silent = tokenizer("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    with pytest.raises(UserError, match="leaves out"):
        chat_reply_tokens(silent, [{"role": "user", "content": "x"}], "")
    strict = tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="rejects messages of user, assistant, tool"):
        chat_reply_tokens(strict, [{"role": "tool", "content": "x"}], "")


def test_without_a_template_messages_stand_apart():
    made = tokenizer(None)
    assert made.decode(plain_reply_tokens(made, [{"role": "user", "content": "x"}], "")) == "\n\nx\n\n"


def said(text):
    return [{"role": "user", "content": f"{text} Answer with just the number."}]


def test_hints_say_where_the_answer_lies_and_reward_the_earlier_turn_more(pool):
    one = pool(higher_lower(TaskConfig(answer_column="gold")))
    assert reset(one, 3, gold="#### 1,100") == [EnvironmentReply([])] * 3
    low, high, right = stepped(one, "It is 1,099.", "2000 or 1200", "1100.0")
    assert low == EnvironmentReply(said("The answer is higher."), 0.0, False)
    assert high == EnvironmentReply(said("The answer is lower."), 0.0, False)
    assert right == EnvironmentReply([], 1.0, True)
    right, none = stepped(one, "1100", "no")
    assert right == EnvironmentReply([], 0.5, True) and none == EnvironmentReply(
        said("That is not a number."), 0.0, False
    )
    assert one.play([Call("step", (0, 1), "1100")]) == [EnvironmentReply([], 0.25, True)]
    assert reset(one, 1)[0].cause == "raised ValueError"  # a row without an answer


def test_the_pages_example_is_an_environment_as_it_stands(pool, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    path = tmp_path / "calculator.py"
    path.write_text(page.split("```python\n")[1].split("```")[0])
    one = pool(resolve(f"{path}:Calculator", TaskConfig()))
    assert reset(one, 3, answer="119", prompt="x") == [EnvironmentReply([])] * 3
    called, right, wrong = stepped(one, "so calc(17 * 7)", "119", "118")
    assert called == EnvironmentReply([{"role": "tool", "content": "119"}], 0.0, False)
    assert (right, wrong) == (EnvironmentReply([], 1.0, True), EnvironmentReply([], 0.0, True))
