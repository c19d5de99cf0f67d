"""Two processes with gloo are one process: what is drawn, what is learned, how it stops, how it fails."""

import json
import math
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_session import wait_for_steps

import tiny_run
from learner.samples import random_groups
from learner.tiny import VOCAB, run_config
from qerl.errors import UserError
from qerl.learner.distributed import ALONE, Ranks, join_ranks
from qerl.learner.minibatch import split
from qerl.tracking import is_timing
from qerl.tracking.json_lines import read_lines
from training.ranks import StartedRanks

QERL = "from qerl.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"
FAILING = f"""\
import os
from qerl.errors import RunError
from qerl.learner import Learner

step = Learner.step
def failing(self, groups):
    if os.environ["RANK"] == "1" and self.version >= 2:
        raise RunError("the cat sat on the cable")
    return step(self, groups)
Learner.step = failing
{QERL}"""
SLOW = """
import time
def even(prompts, completions, completion_ids, **columns):
    time.sleep(0.1)
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""
# An update's two groups are two batches of one rank, or one of each of two: their gradients' sum is the same
# bits, and so is all else if no row's bits depend on how many others are computed with it.
EXACT = (
    *("--engine.exact", "--engine.max-num-seqs", "16", "--learn.updates-per-step", "2"),
    *("--learn.max-tokens-per-microbatch", "40", "--evaluate.num-prompts", "3"),
)
UNEVEN = ("--num-prompts", "5", "--learn.updates-per-step", "2", "--num-steps", "3", "--noise.scope", "group")
TRAFFIC = {"added_bytes", "gathered_bytes"}


GAME = """
class Game:
    async def reset(self, row, seed):
        self.seed, self.turns = seed, 0
        return "begin"

    async def step(self, completion):
        self.turns += 1
        return str((self.seed + self.turns) % 10), float(len(completion) % 2), self.turns == 2
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    (folder / "slow.py").write_text(SLOW)
    (folder / "qerl").write_text(QERL)
    (folder / "failing").write_text(FAILING)
    return folder


def command(files, out, *more, script="qerl"):
    given = (*tiny_run.options(files, out), "--model.device", "cpu", *more)
    return (str(files / script), "train", "demo_long", *given)


def start(files, out, *more, num_ranks=2, script="qerl"):
    arguments = command(files, out, *more, script=script)
    return tiny_run.started(*arguments) if num_ranks == 1 else StartedRanks(num_ranks, *arguments)


def torchrun(files, out, *more, meeting):
    launcher = ("-m", "torch.distributed.run", *meeting, "--nproc-per-node", "1")
    return tiny_run.started(*launcher, *command(files, out, *more))


def finish(files, out, *more, **how):
    process = start(files, out, *more, **how)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout


def workers(process):
    """The process ids of the ranks, in their order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def metrics(out):
    lines = list(read_lines(out / "metrics.jsonl"))
    return [{k: v for k, v in line.items() if not is_timing(k) and k not in TRAFFIC} for line in lines]


def adapter(out, step=6):
    return load_file(out / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors")


def assert_same_run(a, b):
    """To the bit, but for the last bits of sums over tokens that are metrics alone."""
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    assert (a / "evaluations.json").read_text() == (b / "evaluations.json").read_text()
    for ours, theirs in zip(metrics(a), metrics(b), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
    ours, theirs = adapter(a), adapter(b)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    finish(files, out, *EXACT, num_ranks=1)
    return out


@pytest.fixture(scope="module")
def both(files, tmp_path_factory):
    """Its ranks score their own groups while they sample."""
    out = tmp_path_factory.mktemp("runs") / "both"
    return out, finish(files, out, *EXACT, "--task.reward-overlap", "always")


def test_two_ranks_make_the_run_of_one(alone, both):
    assert_same_run(both[0], alone)


def test_uneven_shares_learn_the_same(files, tmp_path):
    """5 groups for 2 ranks, in updates of 2 and 3: the same samples, to fp32's rounding the same adapter."""
    for num_ranks in (1, 2):
        finish(files, tmp_path / str(num_ranks), *UNEVEN, num_ranks=num_ranks)
    ours, theirs = tmp_path / "2", tmp_path / "1"
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    learned = adapter(theirs, step=3)
    for name, tensor in adapter(ours, step=3).items():
        torch.testing.assert_close(tensor, learned[name], rtol=1e-4, atol=1e-5)
    for step, same in zip(metrics(ours), metrics(theirs), strict=True):
        assert step["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-5)
        assert step["learn_tokens"] == same["learn_tokens"]
        assert step["noise_draws"] == same["noise_draws"] == (5 if step["sigma"] else 0)


def test_two_ranks_talk_with_the_environments_that_one_would(files, tmp_path):
    (files / "game.py").write_text(GAME)
    more = ["--task.rewards", f"{files / 'game.py'}:Game", "--sample.max-tokens", "40", "--num-steps", "2"]
    more += ["--task.environment.turn-tokens", "5", "--noise.schedule", "none"]
    for num_ranks in (1, 2):
        finish(files, tmp_path / str(num_ranks), *more, num_ranks=num_ranks)
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in "12"]
    samples = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert all("begin" in s["prompt"] and len(s["turns"]) > 2 for s in samples[0])
    first = [[s for s in each if s["step"] == 0] for each in samples]
    assert [s["prompt"] for s in samples[0]] == [s["prompt"] for s in samples[1]]
    assert [s["turns"] for s in first[0]] == [s["turns"] for s in first[1]]
    assert [s["reward"] for s in first[0]] == [s["reward"] for s in first[1]]


def test_the_first_rank_alone_speaks(both):
    out, stdout = both
    assert stdout.count("step 6/6") == 1 and stdout.count("held-out accuracy after training") == 1
    assert stdout.splitlines()[-1] == f"qerl serve {out}" and stdout.count("qerl serve") == 1


def test_what_is_added_up_is_the_adapters_gradients(both):
    num_bytes = sum(tensor.nbytes for tensor in adapter(both[0]).values())
    for line in (both[0] / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["added_bytes"] == 2 * num_bytes  # 2 updates a step
        assert 0 < json.loads(line)["gathered_bytes"] < 20_000


def test_a_signal_to_all_of_two_hosts_saves_the_step_once_and_one_rank_goes_on_with_it(
    files, alone, tmp_path
):
    """Two launchers of torchrun, of one process each, meet at an address, as on two hosts; one rank speaks. A
    scheduler signals the ranks and their launchers, and the launchers signal the ranks again."""
    out = tmp_path / "run"
    slowly = ("--task.rewards", f"{files / 'slow.py'}:even")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address)
    launchers = [torchrun(files, out, *EXACT, *slowly, meeting=meeting) for _ in range(2)]
    wait_for_steps(launchers[0], out, 1)
    for pid in [pid for each in launchers for pid in (*workers(each), each.pid)]:
        os.kill(pid, signal.SIGTERM)
    stdouts, stderrs = zip(*(launcher.communicate(timeout=60) for launcher in launchers), strict=True)
    assert all(launcher.returncode for launcher in launchers)
    assert "".join(stdouts).count("SIGTERM: finishing and saving this step") == 1, stderrs
    assert sorted(bool(stdout) for stdout in stdouts) == [False, True]
    num_steps = len(metrics(out))
    assert 1 <= num_steps < 6 and adapter(out, num_steps)
    finish(files, out, *EXACT, *slowly, num_ranks=1)
    assert_same_run(out, alone)


def test_two_ranks_go_on_with_what_one_began(files, alone, tmp_path):
    out = shutil.copytree(alone, tmp_path / "run")
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-000006")
    before = json.loads((out / "evaluations.json").read_text())["before"]
    (out / "evaluations.json").write_text(json.dumps({"before": before}))
    assert "resuming after step 4/6" in finish(files, out, *EXACT)
    assert_same_run(out, alone)


def test_a_partial_run_of_two_ranks_goes_on_where_it_was(files, tmp_path):
    """Killed after the third step, one checkpoint behind it."""
    given = ("--rollout.partial", "--rollout.extra-prompts", "3", "--engine.max-num-seqs", "6")
    finish(files, tmp_path / "whole", *given)
    with tiny_run.held(files, tmp_path / "broken", 3):
        process = start(files, tmp_path / "broken", *given)
        wait_for_steps(process, tmp_path / "broken", 3)
        for rank in process.processes:
            rank.kill()
        process.communicate()
    assert len(metrics(tmp_path / "broken")) == 3
    finish(files, tmp_path / "broken", *given)
    assert_same_run(tmp_path / "broken", tmp_path / "whole")
    steps = metrics(tmp_path / "whole")
    assert sum(step["carried_samples"] for step in steps) > 0 == steps[-1]["carried_samples"]


def test_a_signal_to_one_rank_stops_both(files, tmp_path):
    out = tmp_path / "run"
    process = start(files, out, "--num-steps", "2000")
    wait_for_steps(process, out, 1)
    process.processes[1].send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert [rank.returncode for rank in process.processes] == [143, 143], stderr
    num_steps = len(metrics(out))
    assert 1 <= num_steps < 2000 and adapter(out, num_steps)


def test_a_rank_that_fails_ends_the_run_and_says_why(files, tmp_path):
    process = start(files, tmp_path / "run", script="failing")
    _, stderr = process.communicate(timeout=60)
    said = [line for line in stderr.splitlines() if line.startswith("qerl: ")]
    why = "the cat sat on the cable"
    assert process.returncode != 0 and sorted(said) == [f"qerl: rank 1 failed: {why}", f"qerl: {why}"]


def test_a_rank_that_is_killed_ends_the_run(files, tmp_path):
    process = start(files, tmp_path / "run", "--num-steps", "2000")
    wait_for_steps(process, tmp_path / "run", 1)
    process.processes[1].kill()
    _, stderr = process.communicate(timeout=60)
    assert [rank.returncode for rank in process.processes] == [1, -signal.SIGKILL]
    assert "qerl: another rank is lost" in stderr


def test_a_mistake_is_told_by_one_rank(files, tmp_path):
    process = start(files, tmp_path / "run", "--adapter.target-modules", "nose")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0 and stderr.count("adapter.target_modules: the model has no linear") == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_make_the_run_of_one(files, tmp_path):
    """Over NCCL: the same samples in exact mode, and to fp32's rounding the same adapter."""
    for num_ranks in (1, 2):
        out = tmp_path / str(num_ranks)
        finish(files, out, *EXACT, "--model.device", "cuda", num_ranks=num_ranks)
    ours, theirs = tmp_path / "2", tmp_path / "1"
    assert (ours / "samples.jsonl").read_text() == (theirs / "samples.jsonl").read_text()
    learned = adapter(theirs)
    for name, tensor in adapter(ours).items():
        torch.testing.assert_close(tensor, learned[name], rtol=1e-4, atol=1e-5)


def test_half_a_launcher_is_refused_by_name():
    with (
        pytest.raises(UserError, match="not RANK: start it with torchrun"),
        join_ranks("cpu", {"WORLD_SIZE": "2"}),
    ):
        pass


@pytest.mark.parametrize(("num_items", "count"), [(0, 2), (1, 3), (5, 2), (6, 3)])
def test_shares_are_even_and_are_put_together_again(num_items, count):
    items = [f"item {i}" for i in range(num_items)]
    shares = [Ranks(index, count).share(items) for index in range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert ALONE.share(items) == Ranks(0, count).interleave(shares) == items


def test_what_is_learned_from_is_dealt_out_by_its_rows(rng):
    """Every group once, whole, and no rank with a group's rows more than another."""
    groups = random_groups(9, 3, vocab=VOCAB, rng=rng)
    config = run_config(num_prompts=9)
    whole = split(groups, config, device=torch.device("cpu"))[0]
    parts = [split(groups, config, device=torch.device("cpu"), ranks=Ranks(i, 4))[0] for i in range(4)]
    indices = [group.prompt.index for part in parts for group in part.with_gradient.groups]
    assert sorted(indices) == list(range(9))
    rows = [sum(len(b.tokens_T) for b in part.with_gradient.batches(10_000)) for part in parts]
    longest = max(len(g.prompt.tokens_T) + sum(len(s.tokens_T) for s in g.samples_G) for g in groups)
    assert max(rows) - min(rows) <= longest
    weights = [b.weights_C for part in (whole, *parts) for b in part.with_gradient.batches(10_000)]
    assert math.isclose(weights[0].sum(), sum(w.sum() for w in weights[1:]), rel_tol=1e-6)
