"""A GPU that is really full: the limit is torch's own."""

import dataclasses

import pytest
import torch

from learner.test_oom_retry import is_equal
from qerl.bench.learn import random_groups
from qerl.config import AdapterConfig, LearnConfig, RunConfig
from qerl.learner import Learner
from qerl.models.random_weights import SHAPES, random_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = dataclasses.replace(
    SHAPES["qwen2.5-0.5b"],
    num_layers=4,
    width=256,
    num_heads=4,
    num_kv_heads=2,
    ff_width=1024,
    vocab_size=1024,
)
SEQUENCES, TOKENS = 32, 512


def learner_of(**learn):
    """The same weights at each call."""
    decoder = random_decoder(SMALL, format="nvfp4", rank=16, device=torch.device("cuda"), seed=3)
    config = RunConfig(
        num_prompts=SEQUENCES,
        num_generations=2,
        adapter=AdapterConfig(rank=16),
        learn=LearnConfig(
            max_tokens_per_microbatch=SEQUENCES * TOKENS, learning_rate=1e-3, warmup_ratio=0.0, **learn
        ),
    )
    lines = []
    return Learner(decoder, config, notice=lines.append), lines


def moments(learner):
    """The first: a tenth of the gradient, after one update."""
    return torch.cat([m.flatten() for n, m in learner.optimizer_state().items() if n.endswith("exp_avg")])


def test_a_step_that_does_not_fit_is_halved_and_learns_the_same():
    plenty, lines = learner_of()
    groups = random_groups(SEQUENCES, TOKENS, plenty.decoder)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plenty.step(groups)
    taken = torch.cuda.max_memory_allocated() - before
    short, lines = learner_of()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.7 * taken) / total)
    try:
        size = short.step(groups)["micro_tokens"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert size in (SEQUENCES * TOKENS // 2, SEQUENCES * TOKENS // 4)
    assert len(lines) == (2 if size < SEQUENCES * TOKENS // 2 else 1)
    assert f"out of memory in learning: learn.max_tokens_per_microbatch is now {size}" in lines[-1]
    small, _ = learner_of()
    small._oom_retry.micro_tokens = size
    small.step(groups)
    assert is_equal(short.adapter_state(), small.adapter_state())
    assert is_equal(short.optimizer_state(), small.optimizer_state())
    difference = moments(short) - moments(plenty)
    assert (difference.norm() / moments(plenty).norm()).item() < 1e-2  # sums of bf16 products split elsewhere


def test_8_bit_moments_on_the_gpu_move_the_weights_as_adamw_does():
    pytest.importorskip("bitsandbytes")
    exact, _ = learner_of()
    rough, _ = learner_of(optimizer="adamw_8bit")
    groups = random_groups(SEQUENCES, TOKENS, exact.decoder)
    start = torch.cat([m.flatten().clone() for m in exact.adapter_state().values()])
    for _ in range(3):
        exact.step(groups)
        rough.step(groups)
    state = rough.optimizer_state()
    large = [n for n, m in rough.adapter_state().items() if m.numel() >= 4096]
    assert large and all(state[f"{n}.state{i}"].dtype == torch.uint8 for n in large for i in (1, 2))
    assert all(tensor.device.type == "cuda" for n, tensor in state.items() if not n.endswith(".step"))
    num_bytes = [
        sum(t.nbytes for n, t in learner.optimizer_state().items() if ".qmap" not in n)
        for learner in (exact, rough)
    ]
    assert num_bytes[1] < 0.4 * num_bytes[0]
    moved = [torch.cat([m.flatten() for m in x.adapter_state().values()]) - start for x in (exact, rough)]
    assert torch.cosine_similarity(*moved, dim=0) > 0.97
    assert (moved[1].norm() / moved[0].norm()).item() == pytest.approx(1, abs=0.05)
