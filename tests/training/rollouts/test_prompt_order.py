"""The order of sampling: by the history of each prompt, without a change of what is learned."""

import dataclasses

import pytest

import tiny_run
from qerl.config import AlgoConfig, RolloutConfig
from qerl.errors import UserError
from qerl.training.rollouts.prompt_order import PromptLengths, longest_first
from qerl.training.rollouts.rollout import GroupRollouts
from qerl.types import Group, Prompt, Sample
from training.rollouts.test_partial import CONFIG, Log, Rewards
from training.test_session import goes_on

LONGEST_FIRST = RolloutConfig(prompt_order="longest_first")


def prompt(index):
    return Prompt(index=index, text="", tokens_T=[0], messages=None, columns={})


def group(index, *lengths):
    samples = [
        Sample(tokens_T=[2] * n, logprobs_T=[0.0] * n, text="", finish="stop", version=0) for n in lengths
    ]
    return Group(prompt=prompt(index), samples_G=samples)


def test_the_longest_come_first_and_an_unknown_one_counts_as_the_mean():
    lengths = PromptLengths()
    lengths.add([group(0, 4, 6), group(1, 30, 50), group(2, 1, 1)])
    prompts = [prompt(index) for index in (2, 7, 0, 1, 8)]
    assert longest_first(prompts, lengths) == [3, 1, 4, 2, 0]
    again = PromptLengths()
    again.load(lengths.state())
    assert again.state() == lengths.state() and longest_first(prompts, again) == [3, 1, 4, 2, 0]
    lengths.add([group(2, 90)])
    assert longest_first(prompts, lengths)[0] == 0


class Engine:
    """Answers prompt i with samples of 10 - i tokens, and keeps the order in which it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, request, *, on_burst=None):
        self.asked.append([p.index for p in request.prompts_P])
        return [group(p.index, *[10 - p.index] * request.num_samples) for p in request.prompts_P]


def test_groups_come_back_in_the_tasks_order():
    config, engine = dataclasses.replace(CONFIG, rollout=LONGEST_FIRST), Engine()
    rollouts = GroupRollouts(
        config, engine, Rewards(), lambda step, num, round: [prompt(i) for i in (2, 0, 1)]
    )
    for _ in range(2):
        assert [g.prompt.index for g in rollouts.sample(0, Log())] == [2, 0, 1]
    assert engine.asked == [[2, 0, 1], [0, 1, 2]]


def test_branches_are_refused():
    with pytest.raises(UserError, match="longest_first does not work"):
        dataclasses.replace(CONFIG, rollout=LONGEST_FIRST, algo=AlgoConfig(branching="deep"))


def test_killed_and_started_again_the_order_is_the_unbroken_runs(tmp_path_factory, tmp_path):
    files = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    given = ("--rollout.prompt-order", "longest_first", "--engine.max-num-seqs", "6")
    goes_on(files, tmp_path, *given, recipe="demo_long")
