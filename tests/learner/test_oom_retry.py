"""Too little memory: `scarce` lets passes of the decoder fail as a full GPU does."""

import math
from dataclasses import replace

import pytest
import torch

from learner.samples import prompt, random_groups, sample
from learner.saver import save as save_checkpoint
from learner.tiny import VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.errors import UserError
from qerl.learner import Learner, checkpoint
from qerl.types import Group


@pytest.fixture
def groups(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


def scarce(learner, *, most_tokens, when="forward"):
    """From here on no pass over more tokens succeeds."""

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def hook(_, arguments, hidden_TD):
        if len(arguments[0]) > most_tokens and hidden_TD.requires_grad | (when != "learning"):
            if when == "backward" and hidden_TD.requires_grad:
                hidden_TD.register_hook(fail)
            else:
                fail()

    learner.decoder.register_forward_hook(hook)
    return learner


def is_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(groups):
    return sum(len(g.prompt.tokens_T) + sum(len(s.tokens_T) - 1 for s in g.samples_G) for g in groups)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_halved_step_is_the_step_of_half_the_size_bit_for_bit(when, groups):
    total, lines = rows(groups), []
    short = Learner(tiny_decoder(), run_config(), notice=lines.append)
    metrics = scarce(short, most_tokens=total - 1, when=when).step(groups)
    half = tiny_learner(learn={"max_tokens_per_microbatch": total // 2})
    assert metrics == half.step(groups) and metrics["micro_tokens"] == total // 2
    assert is_equal(short.adapter_state(), half.adapter_state())
    assert is_equal(short.optimizer_state(), half.optimizer_state())
    assert (
        len(lines) == 1
        and f"learn.max_tokens_per_microbatch is now {total // 2}" in lines[0]
        and "8192" in lines[0]
    )


def test_a_later_micro_batch_that_fails_takes_back_the_earlier_ones(groups):
    """The first batch's gradient is in the masters by then."""
    largest = max(rows([group]) for group in groups)
    order = sorted(groups, key=lambda group: rows([group]))
    short = tiny_learner(learn={"max_tokens_per_microbatch": largest})
    scarce(short, most_tokens=largest - 1).step(order)
    half = tiny_learner(learn={"max_tokens_per_microbatch": largest // 2})
    half.step(order)
    assert is_equal(short.optimizer_state(), half.optimizer_state())


@pytest.mark.parametrize("when", ["forward", "learning"])
def test_old_logprobs_of_before_the_first_update_outlive_a_smaller_packing(when, groups):
    """With several passes they cannot be read again: the weights have moved."""
    algo, learn = {"beta": 0.2}, {"num_iterations": 3, "updates_per_step": 2}
    total = rows(groups)
    short, plenty = (tiny_learner(algo, learn) for _ in range(2))
    got = scarce(short, most_tokens=total // 4, when=when).step(groups)
    want = plenty.step(groups)
    assert got["clip_fraction"] > 0
    for name in want.keys() - {"micro_tokens", "learn_tokens"}:
        assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6)


def test_groups_that_are_only_read_are_halved_too(groups):
    quiet = [replace(g, samples_G=[replace(s, advantage=0.0) for s in g.samples_G]) for g in groups]
    want = tiny_learner().step(quiet)
    got = scarce(tiny_learner(), most_tokens=rows(quiet) // 2).step(quiet)
    assert got["entropy"] == pytest.approx(want["entropy"], rel=1e-6) and got["micro_tokens"] < 8192


def test_the_smaller_size_stays_and_is_resumed(groups, tmp_path):
    short = scarce(tiny_learner(), most_tokens=rows(groups) // 2)
    size = short.step(groups)["micro_tokens"]
    assert short.step(groups)["micro_tokens"] == size < 8192
    save_checkpoint(tmp_path, short, next_step=2, keep=1)
    resumed = tiny_learner()
    checkpoint.load_latest(tmp_path, resumed)
    assert resumed.micro_tokens == size
    short.step(groups)
    resumed.step(groups)
    assert is_equal(short.adapter_state(), resumed.adapter_state())


def test_one_sample_that_does_not_fit_is_the_users_to_mend():
    """Its packing cannot be halved; before that it was, until each sample stood alone."""
    group = Group(prompt=prompt(0, [1, 2, 3]), samples_G=[sample([4] * n) for n in (9, 2, 3)])
    short, lines = tiny_learner(), []
    short = Learner(tiny_decoder(), run_config(), notice=lines.append)
    before = {name: tensor.clone() for name, tensor in short.adapter_state().items()}
    with pytest.raises(
        UserError, match=r"one sample of 11 tokens.*learn\.gradient_checkpointing.*sample\.max_tokens"
    ):
        scarce(short, most_tokens=10).step([group])
    assert 0 < len(lines) <= math.log2(8192)
    assert is_equal(short.adapter_state(), before)


def test_another_error_is_not_taken_for_a_lack_of_memory(groups):
    learner = tiny_learner()

    def fail(*_):
        raise RuntimeError("something else")

    learner.decoder.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        learner.step(groups)


def test_a_resumed_size_is_no_larger_than_what_is_planned_now():
    learner = tiny_learner()
    planned = learner.micro_tokens
    for stored, size in ((2 * planned, planned), (planned // 2, planned // 2)):
        adapter, optimizer, version, _ = learner.state()
        learner.load(adapter, optimizer, version, micro_tokens=stored)
        assert learner.micro_tokens == size
