"""learn.backward int8: where it is refused, what the plan adds for it, and what it does to a gradient."""

import dataclasses

import pytest
import torch

from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_learner
from qerl.bench.case import try_random_decoder
from qerl.config import ModelConfig
from qerl.cost.operands import int8_bytes, operand_cache_bytes
from qerl.errors import UserError
from qerl.kernels.linear.int8_codes import code_bytes, row_code_bytes
from qerl.learner import Learner
from qerl.learner.plan import memory as plan
from qerl.models.random_weights import shape


def test_it_is_refused_without_a_hopper_gpu():
    with pytest.raises(UserError, match=r"learn\.backward int8 needs a Hopper GPU"):
        tiny_learner(learn={"backward": "int8"})
    tiny_learner(learn={"backward": "bf16"})


@pytest.mark.parametrize("recompute", ("none", "layer"))
def test_a_plan_counts_the_largest_weight_and_gradient_and_all_weights_that_are_held(recompute):
    a, config = shape("qwen2.5-7b"), run_config(learn={"gradient_checkpointing": recompute})
    config = dataclasses.replace(config, model=ModelConfig())
    int8 = dataclasses.replace(config, learn=dataclasses.replace(config.learn, backward="int8"))
    form, rows, wide = plan.form_of(config), 8192, 2 * 18_944
    assert int8_bytes(a, form, config.learn, rows) == 0
    assert int8_bytes(a, form, int8.learn, rows) == wide * 3584 + rows * wide
    held = operand_cache_bytes(a, form, int8.learn) - operand_cache_bytes(a, form, config.learn)
    again = wide if recompute == "layer" else 0
    assert held == 28 * 3584 * (4608 + 3584 + wide + 18_944 + again)  # a byte each: 128 and 256 divide them
    parts = [plan.learning_bytes(plan.memory_parts(a, each, 256)) for each in (config, int8)]
    assert parts[1] > parts[0]


def test_codes_are_padded_to_whole_blocks():
    assert code_bytes(576, 320) == 640 * 512 and row_code_bytes(5, 576) == 640 * 128
    assert code_bytes(2 * 200, 576, along_k=True) == 2 * 256 * 640  # gate and up have halves of tiles


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ("none", "layer"))
def test_on_a_gpu_the_gradient_keeps_its_direction(recompute, device, monkeypatch):
    """Of the whole adapter: rounding is seen, and costs less than a thousandth of the cosine."""
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    groups = random_groups(4, 8, vocab=VOCAB, rng=torch.Generator().manual_seed(0))
    found = []
    for backward in ("bf16", "int8"):
        a = dataclasses.replace(shape("qwen2.5-0.5b"), num_layers=3)
        decoder, error = try_random_decoder(a, "qerl-nvfp4", 16, device)
        assert not error
        learn = {"backward": backward, "gradient_checkpointing": recompute}
        learner = Learner(decoder, run_config(learn=learn))
        one = torch.ones((), device=device)
        monkeypatch.setattr(learner, "_apply", lambda rate, one=one: one)  # keeps the gradients
        learner.step(groups)
        found.append(torch.cat([master.grad.flatten().double() for master in learner._masters.values()]))
        rotated = [linear for _, linear in decoder.linears() if linear.rotations]
        assert bool(rotated) == (backward == "int8")
    bf16, int8 = found
    assert not torch.equal(bf16, int8)
    assert torch.nn.functional.cosine_similarity(bf16, int8, dim=0) > 0.999
