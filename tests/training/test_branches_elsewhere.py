"""Branches (DEEP-GRPO) on two ranks and in Ray's workers are those of one process. A worker that dies while
it branches loses nothing, and a run goes on with the tries of its pivots."""

import pytest
from test_ray_engine import OWN, SLOW, TWO, assert_alike, lose_second_sampler

import tiny_run
from engine.parts import packed_logprobs, request_of
from qerl.config import ModelConfig, NoiseConfig, RunConfig
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from qerl.training.engines.replayed_batch import Parent, SingleTurns
from qerl.training.policy import load_sampler
from qerl.types import Prompt
from training.ranks import StartedRanks
from training.ray_cluster import OF_A_RUN

pytest.importorskip("fastapi")
pytest.importorskip("openai")
KILL = """
import os
import random
import signal
from pathlib import Path

FOLDER = Path(__file__).parent


def end_sampler():
    \"\"\"End the sampler that this process works for, once, if the folder says so.\"\"\"
    try:
        (FOLDER / "kill").unlink()
    except FileNotFoundError:
        return
    keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)
"""
GAME = f"""{KILL}

class Game:
    deterministic = True
    num = 0

    async def reset(self, row, seed):
        self.random, self.turns = random.Random(seed), 0
        Game.num += 1
        return "the number is " + str(self.random.randrange(10))

    async def step(self, completion):
        self.turns += 1
        if self.turns == 2 and Game.num > 16:  # each of two samplers plays eight samples of two prompts first
            end_sampler()
        reward = float(len(completion) % 2) if self.turns == 3 else 0.0
        return [{{"role": "tool", "content": str(self.random.randrange(10))}}], reward, self.turns == 3
"""
AGENT = """
async def agent(client, row, seed):
    messages, said = [{"role": "user", "content": row["prompt"][-1]["content"]}], 0
    for turn in range(3):
        got = await client.chat.completions.create(model="any", messages=messages)
        said += len(got.choices[0].message.content)
        messages += [got.choices[0].message.to_dict(), {"role": "user", "content": f"again {seed % 9}"}]
    return float(said % 2)


agent.deterministic = True
"""
PROMPT_T = [5, 6, 7, 8]
DEEP = ("--algo.branching", "deep", "--algo.deep.num-branches", "2", "--algo.deep.segment-tokens", "1")
EXACT = ("--engine.exact", "--engine.max-num-seqs", "16", "--evaluate.num-prompts", "0")
SHORT = ("--num-steps", "2", "--num-generations", "8", "--checkpoint.every", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"), max_positions=256)
    (folder / "game.py").write_text(GAME)
    (folder / "my.py").write_text(AGENT)
    (folder / "slow.py").write_text(SLOW)
    return folder


def given(files, kind):
    """What is sampled."""
    if kind == "single turns":
        reward = ("--task.rewards", f"{files / 'even.py'}:even_end")
        return [*DEEP, *EXACT, *SHORT, *reward, "--noise.scope", "sample"]
    if kind == "environment":
        more = ["--task.rewards", f"{files / 'game.py'}:Game", "--task.environment.turn-tokens", "6"]
        return [*DEEP, *EXACT, *SHORT, *more, "--sample.max-tokens", "60"]
    return [*DEEP, *EXACT, *SHORT, "--agent", f"{files / 'my.py'}:agent", "--noise.schedule", "none"]


def arguments(files, out, *more):
    options = tiny_run.options(files, out)
    if "--agent" in more:
        at = options.index("--task.rewards")
        del options[at : at + 2]
    return ["train", "demo_long", *options, "--model.device", "cpu", *more]


def start(files, out, *more, num_ranks=1):
    command = (*tiny_run.QERL, *arguments(files, out, *more))
    if num_ranks == 1:
        return tiny_run.started(*command, environment=OF_A_RUN)
    return StartedRanks(num_ranks, *command)


def finish(files, out, *more, **how):
    process = start(files, out, *more, **how)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return out


def metrics(out):
    traffic = {"added_bytes", "gathered_bytes", "crc32"}
    steps = read_lines(out / "metrics.jsonl")
    return [{k: v for k, v in m.items() if not is_timing(k) and k not in {*OWN, *traffic}} for m in steps]


def samples(out):
    """What was sampled and what it was worth; numbers of learning may differ in their last digits."""
    names = ("step", "prompt_index", "sample_index", "prefix_tokens", "prompt", "turns", "text", "reward")
    lines = list(read_lines(out / "samples.jsonl"))
    assert any(line.get("prefix_tokens") for line in lines)
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.fixture(scope="module", params=["single turns", "environment", "agent"])
def alone(request, files, tmp_path_factory):
    """(kind, the run of one process)"""
    out = tmp_path_factory.mktemp("runs") / "alone"
    return request.param, finish(files, out, *given(files, request.param))


def assert_same_branches(run, alone):
    assert samples(run) == samples(alone)
    steps = metrics(run)
    assert steps[0]["pivots"] > 10 and "pivot_slope" in steps[1]  # fitted to the tries of the first step
    assert_alike(steps, metrics(alone))


def test_two_ranks_branch_what_one_process_branches_and_go_on_with_it(files, alone, tmp_path):
    """Stopped after its first step, a run of two ranks goes on with the tries of its pivots."""
    kind, unbroken = alone
    out, more = tmp_path / "ranks", given(files, kind)
    if kind == "environment":
        finish(files, out, *more, "--num-steps", "1", num_ranks=2)
    finish(files, out, *more, num_ranks=2)
    assert_same_branches(out, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["environment"], indirect=True, scope="module")
def test_a_ray_worker_that_dies_while_it_branches_loses_nothing(files, alone, ray_address, tmp_path):
    """The branches of the first step are sampled by other workers than their beginnings; the run is killed
    after it, and goes on. Single turns have other random numbers: the tests below."""
    kind, unbroken = alone
    out, more = tmp_path / "ray", (*given(files, kind), "--ray", ray_address, *TWO)
    (files / "kill").touch()
    tiny_run.kill_in_step(1, *arguments(files, out, *more), environment=OF_A_RUN)
    assert not (files / "kill").exists()
    finish(files, out, *more)
    assert "died; a new one samples its" in (out / "events.jsonl").read_text()
    assert_same_branches(out, unbroken)


@pytest.mark.slow
def test_single_turns_are_branched_by_workers_with_the_newest_policy(files, ray_address, tmp_path):
    """One version ahead; of a run that lost a worker: its branches are those of the run that did not."""
    more = (*DEEP, "--ray", ray_address, "--ray.max-staleness", "1", "--num-steps", "3")
    more = (*more, "--evaluate.num-prompts", "0")
    whole = finish(files, tmp_path / "whole", *more, "--ray.num-samplers", "1")
    lines = list(read_lines(whole / "samples.jsonl"))
    assert {(s["step"], s["version"]) for s in lines if "prefix_tokens" in s} == {(0, 0), (1, 1), (2, 2)}
    assert {(s["step"], s["version"]) for s in lines if "prefix_tokens" not in s} == {(0, 0), (1, 0), (2, 1)}
    out = tmp_path / "broken"
    process = start(files, out, *more, *TWO, "--task.rewards", f"{files / 'slow.py'}:even")
    lose_second_sampler(process, files, out)
    assert sum(m["replaced_samplers"] for m in read_lines(out / "metrics.jsonl")) == 1
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_a_worker_branches_a_single_turn_whose_keys_and_values_it_does_not_have(files):
    """The branch has the sample's tokens and logprobs before the pivot, and after it those that the model
    gives to what follows them, up to the length that the whole may have."""
    model = ModelConfig(path=str(files), device="cpu", dtype="fp32")
    config = RunConfig(model=model, noise=NoiseConfig(schedule="none"))
    decoder, engine = load_sampler(config, load_tokenizer(model.path))
    row = Prompt(index=4, text="", tokens_T=PROMPT_T, messages=None, columns={})
    request = request_of([row], max_tokens=9, seed=1)
    workers = SingleTurns(engine), SingleTurns(load_sampler(config, load_tokenizer(model.path))[1])
    ((group,), ((history, *_),)) = workers[0].sample(request)
    before = max(group.samples_G, key=lambda sample: len(sample.tokens_T))
    parent = Parent(row=row, prompt=group.prompt, sample=before, history=history, prefix_tokens=3)
    (branches_G,), (again_G,) = (worker.branch([parent], 4, request) for worker in workers)
    assert [s.tokens_T for s in branches_G] == [s.tokens_T for s in again_G]
    assert len({tuple(s.tokens_T) for s in branches_G}) == 4
    for sample in branches_G:
        assert sample.tokens_T[:3] == before.tokens_T[:3] and 3 < len(sample.tokens_T) <= 9
        assert sample.logprobs_T[:3] == before.logprobs_T[:3] and sample.sample_index == before.sample_index
        truth_TV = packed_logprobs(decoder, row, sample)
        truth_T = truth_TV[range(len(sample.tokens_T)), sample.tokens_T]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-4)
        assert sample.text == engine.tokenizer.decode(sample.tokens_T, skip_special_tokens=True)
    assert max(len(s.tokens_T) for s in branches_G) == 9
    assert workers[0].stats.num_tokens == sum(len(s.tokens_T) - 3 for s in branches_G)
