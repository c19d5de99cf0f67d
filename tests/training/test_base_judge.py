"""task.judge.url base: the model without adapter and noise rates the samples, and does not learn."""

import pytest
import torch

import tiny_run
from agents.agent_episodes import load_tiny
from qerl.aqn.norm_noise import noised
from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    JudgeConfig,
    NoiseConfig,
    RayConfig,
    RunConfig,
    TaskConfig,
)
from qerl.errors import UserError
from qerl.models.peft.adapter import adapter_off, adapter_tensors, publish
from qerl.tasks.judges.own_judge import OwnJudge
from qerl.tasks.scoring import Failure
from qerl.tracking.json_lines import read_lines
from qerl.training.base_judge import BaseJudge
from qerl.types import GenerateRequest, Prompt, Sampling

ASKED = ["Rate this.", "And this one, too."]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"), max_positions=128)


def judge_of(model, **settings):
    task = TaskConfig(judge=JudgeConfig(url="base", max_tokens=24, **settings), rewards=("judge",))
    config = RunConfig(task=task, noise=NoiseConfig(schedule="none"))
    return BaseJudge(model.engine._decoder, model.engine, config.task.judge, config.engine)


def sampled(engine, tokenizer):
    """Return what the run's engine says to the same messages, greedily."""
    prompts = [
        Prompt(index=i, text="", tokens_T=list(tokenizer(text)["input_ids"]), messages=None, columns={})
        for i, text in enumerate(ASKED)
    ]
    sampling = Sampling(max_tokens=24, temperature=0.0)
    request = GenerateRequest(prompts, num_samples=1, sampling=sampling, seed=0, step=0)
    groups = engine.generate(request)
    return [group.samples_G[0].text for group in groups]


def change_adapter(decoder, seed):
    rng = torch.Generator().manual_seed(seed)
    for master in adapter_tensors(decoder).values():
        master.data.copy_(torch.randn(master.shape, generator=rng) * 0.3)
    publish(decoder)


def test_replies_do_not_change_when_the_adapter_or_the_noise_does(model):
    decoder, judge = model.engine._decoder, judge_of(model)
    first, own = judge(ASKED), sampled(model.engine, model.engine.tokenizer)
    change_adapter(decoder, 1)
    model.engine.publish(1)
    with noised(decoder.noise_table, sigma=0.5, unit="absolute", seed=3, step=0):
        noises = [norm.noise.clone() for norm in decoder.noise_table.norms]
        assert judge(ASKED) == first and sampled(model.engine, model.engine.tokenizer) != own
        assert all(map(torch.equal, noises, [norm.noise for norm in decoder.noise_table.norms]))
        assert any(noise.any() for noise in noises)
    assert judge_of(model)(ASKED) == first  # made with another adapter
    with adapter_off(decoder):
        assert sampled(model.engine, model.engine.tokenizer) == own  # B was zero


def test_a_rubric_that_does_not_fit_costs_its_sample(model):
    long, fine = judge_of(model)(["x" * 500, ASKED[0]])
    assert isinstance(long, Failure) and "the limit is 104" in long.message and isinstance(fine, str)


class Replies:
    """Says what it is asked to; notes what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, messages):
        self.asked.append(messages)
        return [Failure("too long", "judge: too long") if "long" in each else each for each in messages]


def scored(judge, *texts):
    calls = [{"prompts": ["?"], "completions": [text], "completion_ids": [[1]]} for text in texts]
    (rewards_G,) = judge.score_groups([calls])
    return rewards_G


def own_judge(tmp_path, **settings):
    settings = {"rubric": "{completion}", "cache": str(tmp_path)} | settings
    judge, replies = OwnJudge(TaskConfig(judge=JudgeConfig(url="base", **settings))), Replies()
    judge.answer_by(replies, "tiny nvfp4")
    return judge, replies


def test_scores_are_parsed_kept_and_a_bad_reply_costs_its_sample(tmp_path):
    judge, replies = own_judge(tmp_path)
    good, bad, long, same = scored(judge, "Score: 7", "none", "long", "Score: 7")
    assert (good, same) == (0.7, 0.7) and replies.asked == [["Score: 7", "none", "long"]]
    assert "no score in the reply 'none'" in bad.message and long.cause == "too long"
    again, more = own_judge(tmp_path)
    assert scored(again, "Score: 7", "Score: 2") == [0.7, 0.2] and more.asked == [["Score: 2"]]


def test_requests_are_limited(tmp_path):
    judge, _ = own_judge(tmp_path, max_requests=1)
    first, second = scored(judge, "Score: 1", "Score: 2")
    assert first == 0.1 and "task.judge.max_requests is reached: 1 requests" in second.message


def test_only_training_has_the_model(tmp_path):
    judge = OwnJudge(TaskConfig(judge=JudgeConfig(url="base", cache=str(tmp_path))))
    with pytest.raises(UserError, match="rates samples while a model is trained"):
        scored(judge, "x")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"adapter": AdapterConfig(kind="full")}, "adapter.kind full: the base model changes"),
        ({"ray": RayConfig(address="local")}, "does not work with --ray: give the URL of an endpoint"),
        ({"algo": AlgoConfig(branching="deep")}, "algo.branching deep: its KV cache stays open"),
        ({"task": TaskConfig(judge=JudgeConfig(url="base", model="x"), rewards=("judge",))}, "unset"),
    ],
    ids=["full", "ray", "branching", "model"],
)
def test_what_cannot_be_is_refused_in_one_line(more, line):
    given = {"task": TaskConfig(judge=JudgeConfig(url="base"), rewards=("judge",))} | more
    with pytest.raises(UserError, match=line):
        OwnJudge(RunConfig(**given).task)


def test_a_run_learns_from_its_base_models_scores(tmp_path):
    files, out = tiny_run.write_files(tmp_path, max_positions=256), tmp_path / "run"
    (files / "chat_template.jinja").unlink()  # without one the tiny model repeats the rubric's last digit
    given = tiny_run.options(files, out)
    at = given.index("--task.rewards")
    del given[at : at + 2]
    judge = {"url": "base", "max-tokens": "40", "pattern": r"([0-9])", "rubric": "{completion} {answer}"}
    judge["cache"] = str(tmp_path / "cache")
    settings = [text for name, value in judge.items() for text in (f"--task.judge.{name}", value)]
    short = ("--num-steps", "2", "--evaluate.num-prompts", "0")
    process = tiny_run.started(
        *tiny_run.QERL, "train", "demo_long", *given, "--reward", "judge", *settings, *short
    )
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    steps = list(read_lines(out / "metrics.jsonl"))
    samples = list(read_lines(out / "samples.jsonl"))
    rewards = [sample["reward"] for sample in samples]
    assert len(steps) == 2 and len(rewards) == 32 and None not in rewards
    assert set(rewards) <= {i / 10 for i in range(10)} and len(set(rewards)) > 1
