"""Each family with the decode kernels, for Hopper and for any GPU, beside PyTorch's operations."""

import pytest
import torch

from engine.decode.test_decode_kernels import FACTOR, LENGTHS, NEVER, decoder_of, error_ratio, small_prompts
from engine.decode.test_kernel_choice import HEADS, MIXTURES, OBSTACLES, architecture_of
from engine.parts import drawn, engine_of
from models.family_rows import ROWS
from parity.test_exact_hopper import gap, groups_of
from qerl.aqn.norm_noise import noised
from qerl.engine.decode.kernel_forward import KernelForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
FAMILIES = [family for family in ROWS if family not in (*OBSTACLES, *MIXTURES)]
UNTIED = {"Gemma3": {"tie_word_embeddings": False}}
"""With tied random embeddings times sqrt(width) and no cap, the last token repeats with probability 1."""


@pytest.fixture(scope="module", params=[*FAMILIES, "Gemma2 of 256", "Gemma3 of 256"])
def decoder(request):
    family, _, is_wide = request.param.partition(" of ")
    heads = {"head_dim": 256} if is_wide else HEADS.get(family, {})
    changes = heads | UNTIED.get(family, {})
    decoder = decoder_of(architecture=architecture_of(family, vocab_size=1024, **changes))
    assert KernelForward.obstacle(decoder, 16) is None
    generator = torch.Generator("cuda").manual_seed(4)
    for name, buffer in decoder.named_buffers():  # norms that differ
        if name.endswith("norm.weight") and buffer.is_floating_point():
            buffer.add_(torch.randn(buffer.shape, generator=generator, device="cuda") * 0.2)
    return decoder


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_logprobs_are_the_packed_forwards(decoder, kernels):
    prompts_P = small_prompts(*LENGTHS)
    engine = engine_of(decoder, stop_token_ids=NEVER, kernels=kernels)
    assert engine.notices == []
    samples = drawn(engine, prompts_P, num_samples=4, max_tokens=40)
    assert torch.tensor([s.logprobs_T for s in samples]).exp().mean() < 0.5  # not degenerate
    assert error_ratio(decoder, prompts_P, samples, 4) < FACTOR
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        noisy = drawn(engine, prompts_P, num_samples=1, max_tokens=20)
        assert error_ratio(decoder, prompts_P, noisy) < FACTOR


def test_greedy_tokens_are_those_of_the_other_kernels(decoder):
    """Two tokens whose logits differ by less than rounding may change places, and then all that follow."""
    prompts_P, tokens = small_prompts(*LENGTHS), {}
    for kernels in ("hopper", "portable", "torch"):
        engine = engine_of(decoder, stop_token_ids=NEVER, kernels=kernels)
        samples = drawn(engine, prompts_P, num_samples=1, temperature=0.0, max_tokens=12)
        tokens[kernels] = [s.tokens_T for s in samples]
    for other in ("hopper", "torch"):
        same = [a == b for a, b in zip(tokens["portable"], tokens[other], strict=True)]
        assert sum(same) >= 0.7 * len(same), other


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_in_exact_mode_scores_are_what_was_recorded_to_the_bit(decoder, kernels):
    engine = engine_of(decoder, exact=True, max_num_seqs=32, stop_token_ids=NEVER, kernels=kernels)
    assert gap(engine, groups_of(engine, 2)) == 0
