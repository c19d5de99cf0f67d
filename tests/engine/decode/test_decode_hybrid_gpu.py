"""A small hybrid on a GPU: Gated DeltaNet and gated attention by the kernels, in graphs and bursts."""

from dataclasses import replace

import pytest
import torch

from engine.decode.test_decode_delta_step import BY_HEAD, SMALL
from engine.decode.test_decode_kernels import FACTOR, LENGTHS, NEVER, decoder_of, error_ratio, small_prompts
from engine.parts import drawn, engine_of
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.models.device import best_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a GPU from Ampere on",
    ),
]
GATED = {"head_size": 256, "rotary_size": 64, "attention_gate": True, "width": 256, "ff_width": 512}
ARCHITECTURES = {
    "by part": replace(SMALL, vocab_size=1024, **GATED),
    "by head": replace(BY_HEAD, vocab_size=1024, **GATED),
}


def kernels():
    """hopper on a Hopper GPU, and portable everywhere."""
    best = best_kernels(torch.device("cuda")) if torch.cuda.is_available() else "portable"
    return sorted({best, "portable"})


@pytest.mark.parametrize("which", kernels())
@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_are_the_packed_forwards(name, rank, format, which):
    decoder, prompts_P = (
        decoder_of(format, rank=rank, architecture=ARCHITECTURES[name]),
        small_prompts(*LENGTHS),
    )
    assert KernelForward.obstacle(decoder, 16, which) is None
    engine = engine_of(decoder, stop_token_ids=NEVER, kernels=which)
    samples = drawn(engine, prompts_P, num_samples=4, max_tokens=40)
    assert engine.kernels == which and error_ratio(decoder, prompts_P, samples, 4) < FACTOR


def test_a_sample_does_not_depend_on_its_batch():
    """Up to 32 rows the products have one order of sums; the state's step has one at any number."""
    decoder, prompts_P = decoder_of(architecture=ARCHITECTURES["by part"]), small_prompts(*LENGTHS)
    settings = {"num_samples": 1, "temperature": 0.0, "max_tokens": 30}
    whole = drawn(engine_of(decoder, stop_token_ids=NEVER), prompts_P, **settings)
    few = drawn(engine_of(decoder, stop_token_ids=NEVER, max_num_seqs=3), prompts_P, **settings)
    assert [s.tokens_T for s in whole] == [s.tokens_T for s in few]
