"""Logits with a factor and a soft cap, in both sampling kernels and in the learner's logprobs."""
# pyright: reportIndexIssue=false

import pytest
import torch

from benchmarks import matrix
from conftest import rms_error
from kernels import kernel_uses
from kernels.cuda_on_cpu import has_compiler, on_cpu
from kernels.head.test_head_sample import (
    FORMATS,
    chi_square_in_deviations,
    cuda,
    fits,
    heat,
    make_head,
    portable,
    rows,
    torch_error,
)
from qerl.formats import BF16, FP8
from qerl.kernels.head import head_sample as op
from qerl.kernels.head import logprob
from qerl.kernels.head.logprob import Softcap
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.architectures import ARCHITECTURES
from qerl.models.lm_head import LMHead
from qerl.models.random_weights import SHAPES

__all__ = ["cuda", "portable"]  # fixtures

OPTIONS = [(0.25, None), (1.0, 30.0), (1.0, 2.0), (0.5, 6.0)]  # Granite; Gemma; a narrow cap; both


def test_the_reference_is_the_heads_own_logits(rng):
    hidden, weight = torch.randn(5, 32, generator=rng), torch.randn(48, 32, generator=rng)
    for scale, softcap in OPTIONS:
        logits = LMHead(weight, scale=scale, softcap=softcap).logits(hidden)
        truth = op.reference_logits(hidden, weight, scale, softcap)
        assert rms_error(logits, truth) < 1e-6
        keys, positions = torch.arange(5), torch.arange(5, dtype=torch.int32)
        tokens, logprobs, _ = op.reference(hidden, weight, keys, positions, 0.7, scale, softcap)
        assert torch.allclose(logprobs, (truth / 0.7).log_softmax(1)[range(5), tokens])


def definitions(scale=1.0, softcap=None):
    """What the product is compiled with: for one temperature and for each row's own."""
    card, a = ARCHITECTURES["sm_90a"], SHAPES["qwen2.5-0.5b"]
    variants = matrix.head_variants(a, card, 8, BF16, scale=scale, softcap=softcap)
    return [dict(variant.defines) for variant in variants if variant.file == "head_sample.cu"]


def test_a_plain_head_is_compiled_without_the_options():
    plain = definitions()
    assert sorted(each["BY_ROW"] for each in plain) == [0, 1]
    assert not any({"SCALE", "SOFTCAP"} & set(each) for each in plain)
    assert definitions(scale=0.5) == [each | {"SCALE": 1} for each in plain]
    assert definitions(softcap=9.0) == [each | {"SOFTCAP": 1} for each in plain]
    assert definitions(scale=0.5, softcap=9.0) == [each | {"SCALE": 1, "SOFTCAP": 1} for each in plain]


@pytest.mark.parametrize(("rows", "head"), [(8, BF16), (8, FP8), (64, op.NVFP4Head)])
def test_the_kernels_with_both_options_fit_hopper(rows, head):
    pytest.importorskip("cuda.bindings.nvrtc")
    card, a = ARCHITECTURES["sm_90a"], SHAPES["qwen2.5-7b"]
    variants = matrix.head_variants(a, card, rows, head, scale=0.5, softcap=30.0)
    uses = kernel_uses.measure(variants, card)
    assert len(uses) == 3 and not [f for v, use in uses.items() for f in matrix.faults(v, use, card)]


SOFTCAPS = [Softcap(cap=30.0, scale=1.0), Softcap(cap=2.0, scale=1.0), Softcap(cap=6.0, scale=0.5)]


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_the_learners_kernel_on_a_cpu_has_float64s_logprobs_and_slopes(softcap, tmp_path, monkeypatch, rng):
    if not has_compiler():
        pytest.skip("needs g++")
    monkeypatch.setattr(logprob, "_THREADS", 64)
    (C, D, V), temperature = (3, 32, 1000), 0.7
    hidden, head = torch.randn(C, D, generator=rng), torch.randn(V, D, generator=rng)
    targets = torch.randint(V, (C,), generator=rng)
    products = hidden @ head.T
    exact = products.double().requires_grad_()
    unit = torch.eye(V, dtype=torch.float64)
    truth, entropy = logprob.reference(exact, unit, targets, temperature=temperature, softcap=softcap)
    (gradient,) = torch.autograd.grad(truth.sum(), exact)
    row_kernel.kernel.cache_clear()
    with on_cpu(row_kernel, tmp_path):
        got = logprob.launch(products, targets[:, None], temperature, True, softcap)
    row_kernel.kernel.cache_clear()
    assert torch.allclose(got[0].double(), truth, atol=2e-5) and torch.allclose(
        got[1].double(), entropy, atol=2e-5
    )
    assert got[2] is not None and rms_error(got[2] / temperature, gradient) < 2**-8


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("T", "D", "V", "chunk_tokens"), [(33, 64, 4096, 64), (300, 896, 32_000, 128), (33, 64, 131_072, 64)]
)
def test_capped_logprobs_are_no_less_exact_than_torchs(
    T, D, V, chunk_tokens, temperature, softcap, cuda, monkeypatch, rng
):
    hidden = torch.randn(T, D, generator=rng).bfloat16().cuda().requires_grad_()
    head = (torch.randn(V, D, generator=rng) / D**0.5 * 3).bfloat16().cuda()
    targets, weights = torch.randint(V, (T,), generator=rng).cuda(), torch.randn(T, generator=rng).cuda()

    def run():
        settings = {"temperature": temperature, "chunk_tokens": chunk_tokens, "softcap": softcap}
        found, entropies = logprob.chunked_logprob(hidden, head, targets, **settings)
        return found.detach(), entropies, torch.autograd.grad(found, hidden, weights)[0]

    mine = run()
    monkeypatch.setattr(logprob._Settings, "caps_in_kernel", lambda *_: False)
    torchs = run()
    exact = hidden.detach().double().requires_grad_()  # a gradient in bf16 would count what rounds otherwise
    truth, entropy = logprob.reference(exact, head, targets, temperature=temperature, softcap=softcap)
    gradient = torch.autograd.grad(truth, exact, weights.double())[0]
    for got, other, want in zip(mine, torchs, (truth.detach(), entropy, gradient), strict=True):
        assert rms_error(got, want) <= max(1.1 * rms_error(other, want), 5 * 2**-23)


def compare(kernel, weight, hidden, keys, positions, temperature, scale, softcap, rng):
    """As without options: the float64 token unless two scores differ by rounding."""
    tokens, logprobs = kernel.draw(hidden, keys, positions, heat(temperature))
    truth, truth_logprobs, lead = op.reference(hidden, weight, keys, positions, temperature, scale, softcap)
    logits, exact = kernel.logits(hidden), op.reference_logits(hidden, weight, scale, softcap)
    plain = (hidden.float() @ weight.float().T) * scale  # as far from float64 as torch's tanh brings it
    bent = plain if softcap is None else (plain / softcap).tanh() * softcap
    most = max(rms_error(bent, exact), torch_error(hidden.shape[1], rng))
    assert rms_error(logits, exact) <= max(1.1 * most, 2.0**-22)  # of one row: two roundings of the fp32 cap
    slack = 2 * (logits - exact).abs().max() / (temperature or 1) + 1e-5
    differs = tokens.long() != truth
    assert slack < 2e-4 and not (differs & (lead > slack)).any()
    assert (logprobs - truth_logprobs)[~differs].abs().max() < slack
    assert torch.equal(kernel.score(hidden, tokens.long(), heat(temperature)), logprobs)
    if temperature == 0:
        assert torch.equal(tokens.long(), logits.argmax(1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("scale", "softcap"), OPTIONS)
@pytest.mark.parametrize(
    ("M", "V", "D"), [(1, 1008, 192), (8, 2064, 3584), (65, 640, 1024), (256, 1616, 320)]
)
def test_capped_draws_are_those_of_float64(name, temperature, scale, softcap, M, V, D, cuda, rng):
    if not fits(name, V, D):
        V, D = -(-V // 64) * 64, -(-D // 128) * 128
    head, weight = make_head(name, V, D, rng)
    kernel = op.HeadSample(head, M, cuda, scale=scale, softcap=softcap)
    compare(kernel, weight, *rows(M, D, rng), temperature, scale, softcap, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("scale", "softcap"), OPTIONS)
@pytest.mark.parametrize(("M", "V", "D"), [(1, 1008, 128), (65, 2064, 384), (256, 640, 1024)])
def test_the_portable_kernel_draws_capped_tokens(
    name, temperature, scale, softcap, M, V, D, cuda, portable, rng
):
    head, weight = make_head(name, V, D, rng)
    kernel = portable(head, 300, cuda, scale=scale, softcap=softcap)
    compare(kernel, weight, *rows(M, D, rng), temperature, scale, softcap, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("poison_value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_portable", [False, True])
def test_a_cap_hides_no_row_that_is_not_finite(is_portable, poison_value, cuda, portable, rng):
    head, _ = make_head("bf16", 1040, 192, rng)
    hidden, keys, positions = rows(64, 192, rng)
    kernel = (portable if is_portable else op.HeadSample)(head, 64, cuda, softcap=30.0)
    _, good = kernel.draw(hidden, keys, positions, heat(1.0))
    hidden[3, 17] = poison_value
    _, logprobs = kernel.draw(hidden, keys, positions, heat(1.0))
    others = torch.arange(64, device=cuda) != 3
    assert logprobs[3].isnan() and torch.equal(logprobs[others], good[others])


@pytest.mark.gpu
@pytest.mark.parametrize("is_portable", [False, True])
def test_100000_capped_draws_have_the_softmax_distribution(is_portable, cuda, portable, rng):
    M, V, D = 4000, 48, 128
    head, weight = make_head("bf16", V, D, rng)
    kernel = (portable if is_portable else op.HeadSample)(head, M, cuda, scale=2.0, softcap=3.0)
    hidden = torch.randn(1, D, generator=rng).bfloat16().cuda().expand(M, D).contiguous()
    counts = torch.zeros(V, dtype=torch.int64, device=cuda)
    for position in range(25):
        keys, positions = torch.arange(M).cuda(), torch.full((M,), position, dtype=torch.int32).cuda()
        counts += kernel.draw(hidden, keys, positions, heat(0.7))[0].bincount(minlength=V)
    p = (op.reference_logits(hidden[:1], weight, 2.0, 3.0)[0] / 0.7).softmax(0)
    assert counts.sum() == 100_000 and abs(chi_square_in_deviations(counts, p)) < 5
