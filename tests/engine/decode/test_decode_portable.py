"""Decode steps with the kernels for any GPU, on a Hopper GPU beside its own and PyTorch's operations."""

import pytest
import torch

from engine.decode.test_decode_kernels import FACTOR, LENGTHS, NEVER, decoder_of, error_ratio, small_prompts
from engine.parts import drawn, engine_of
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.errors import UserError
from qerl.models.packed.packed_linear import PackedTiles
from qerl.models.sampler_copy import make_sampler_copy
from tiny_run import launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a GPU from Ampere on",
    ),
]


@pytest.fixture(scope="module")
def decoder():
    return decoder_of()


PACKED = [("nf4", 16), ("nf4", None), ("fp8", 16), ("int8", 16)]


@pytest.mark.parametrize("num_samples", [1, 4, 20])
@pytest.mark.parametrize(
    ("format", "rank"), [("nvfp4", None), ("nvfp4", 16), ("nvfp4", 48), ("bf16", 16), *PACKED]
)
def test_logprobs_are_the_packed_forwards(format, rank, num_samples):
    decoder, prompts_P = decoder_of(format, rank=rank), small_prompts(*LENGTHS)
    engine = engine_of(decoder, stop_token_ids=NEVER, kernels="portable", max_num_seqs=160)
    samples = drawn(engine, prompts_P, num_samples=num_samples, max_tokens=40)
    assert error_ratio(decoder, prompts_P, samples, num_samples) < FACTOR


@pytest.mark.parametrize("format", ["fp8", "fp8-flow", "int8"])
def test_a_samplers_copy_decodes_by_kernels(format):
    twin, prompts_P = make_sampler_copy(decoder_of("bf16"), format), small_prompts(*LENGTHS)
    engine = engine_of(twin, stop_token_ids=NEVER)
    assert engine.notices == []
    samples = drawn(engine, prompts_P, num_samples=4, max_tokens=40)
    assert error_ratio(twin, prompts_P, samples, 4) < FACTOR


def test_greedy_tokens_are_those_of_the_other_kernels(decoder):
    """Two tokens whose logits differ by less than rounding may change places, and then all that follow."""
    prompts_P, tokens = small_prompts(*LENGTHS), {}
    for kernels in ("hopper", "portable", "torch"):
        if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
            continue
        engine = engine_of(decoder, stop_token_ids=NEVER, kernels=kernels)
        samples = drawn(engine, prompts_P, num_samples=1, temperature=0.0, max_tokens=40)
        tokens[kernels] = [s.tokens_T for s in samples]
    for other in set(tokens) - {"portable"}:
        same = [a == b for a, b in zip(tokens["portable"], tokens[other], strict=True)]
        assert sum(same) >= 0.8 * len(same), other


@pytest.mark.parametrize(
    "settings",
    [{"decode_steps_per_sync": 1}, {"max_num_seqs": 5}, {"max_num_seqs": 3, "decode_steps_per_sync": 7}],
    ids=str,
)
def test_a_sample_does_not_depend_on_its_batch(decoder, settings):
    prompts_P, stops = small_prompts(*LENGTHS), frozenset(range(40))
    plain = drawn(engine_of(decoder, stop_token_ids=stops, kernels="portable"), prompts_P, max_tokens=50)
    engine = engine_of(decoder, stop_token_ids=stops, kernels="portable", **settings)
    assert drawn(engine, prompts_P, max_tokens=50) == plain


@pytest.mark.parametrize("format", ["nf4", "fp8", "int8"])
def test_greedy_tokens_of_other_formats_are_those_of_torch(format):
    decoder, prompts_P = decoder_of(format), small_prompts(*LENGTHS)
    assert all(isinstance(linear.weight, PackedTiles) for _, linear in decoder.linears())
    tokens = {
        kernels: [
            s.tokens_T
            for s in drawn(
                engine_of(decoder, stop_token_ids=NEVER, kernels=kernels),
                prompts_P,
                num_samples=1,
                temperature=0.0,
                max_tokens=40,
            )
        ]
        for kernels in ("auto", "portable", "torch")
    }
    for other in ("auto", "torch"):
        same = [a == b for a, b in zip(tokens["portable"], tokens[other], strict=True)]
        assert sum(same) >= 0.8 * len(same), other


def test_the_chosen_kernels_run(decoder, monkeypatch):
    calls = []
    run = KernelForward._run
    monkeypatch.setattr(KernelForward, "_run", lambda self, *rest: calls.append(self) or run(self, *rest))
    for kernels in ("portable", "torch"):
        drawn(engine_of(decoder, kernels=kernels), small_prompts(9), max_tokens=4)
        assert bool(calls) == (kernels == "portable")
        calls.clear()


def test_kernels_of_another_gpu_are_refused(decoder):
    if torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("a Hopper GPU runs all of them")
    with pytest.raises(UserError, match="no Hopper GPU"):
        engine_of(decoder, kernels="hopper")


STEPS_OF_32B = """
import dataclasses, torch
from qerl.bench.decode import endless_engine, random_prompts
from qerl.models.random_weights import random_decoder, shape
from qerl.types import GenerateRequest, Sampling
whole, cuda = shape("qwen2.5-32b"), torch.device("cuda")
two = dataclasses.replace(whole, num_layers=2, layer_kinds=whole.layer_kinds[:2])
decoder = random_decoder(two, format="nvfp4", rank=32, device=cuda, seed=0)
engine = endless_engine(decoder, max_num_seqs=24, kv="bf16", kernels="portable")
prompts = random_prompts(24, 64, two.vocab_size)
sampling = Sampling(max_tokens=64, temperature=1.0)
engine.generate(GenerateRequest(prompts, num_samples=1, sampling=sampling, seed=0, step=0))
"""


@pytest.mark.gpu
def test_ctas_that_start_among_those_of_the_kernel_before_do_not_wait_for_ever():
    """Three CTAs an SM behind two of another size: in graphs this stood still (dev/log/portable.md)."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    child = launched("-c", STEPS_OF_32B)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
