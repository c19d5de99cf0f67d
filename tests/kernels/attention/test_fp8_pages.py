"""Keys and values that a prefill writes in E4M3: the kernel's bytes are those of PyTorch's operations."""

import pytest
import torch

from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.kernels.attention import fp8_pages as op
from qerl.kernels.runtime import row_kernel

CASES = [(1, 1, 64, 16), (7, 3, 128, 16), (33, 2, 256, 32)]  # T, K, H, tokens of a page


def written(case, device, has_kernel, monkeypatch, last=0.0):
    """Return codes, scales and stored heads of keys and values that lie in columns of one tensor."""
    rng, (T, K, H, page_tokens) = torch.Generator().manual_seed(1), case
    qkv = torch.randn(T, 5 * K * H, generator=rng) * torch.logspace(-6, 6, T)[:, None]
    qkv[0, -K * H :] = 0  # a head of zeros
    qkv[-1, -1] += last
    k_TKH, v_TKH = (x.unflatten(1, (K, H)) for x in qkv.bfloat16().to(device).split(K * H, 1)[3:])
    num_pages = T // page_tokens + 2
    slots_T = torch.randperm(num_pages * page_tokens, generator=rng)[:T].to(device)
    shape = num_pages, page_tokens, K, H
    pages = tuple(
        torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn) for _ in "kv"
    )
    scales = tuple(torch.zeros(num_pages, K, page_tokens, device=device) for _ in "kv")
    monkeypatch.setattr(op, "_has_kernel", lambda x: has_kernel)
    stored = op.write((k_TKH, v_TKH), slots_T, pages, scales)
    return [x.cpu() for x in (*(p.view(torch.uint8) for p in pages), *scales, *stored)]


def check(case, device, monkeypatch):
    ours, wanted = (written(case, device, has_kernel, monkeypatch) for has_kernel in (True, False))
    for name, x, y in zip(
        ("k", "v", "k_scales", "v_scales", "stored k", "stored v"), ours, wanted, strict=True
    ):
        assert x.dtype == y.dtype and torch.equal(x, y), name
    assert (ours[3] == 1).any() and ours[0].any() and ours[1].any() == (case[0] > 1)
    stored_TKH = written(case, device, True, monkeypatch, last=float("nan"))[-1]
    assert stored_TKH.isnan().sum() == 1 and stored_TKH[-1, -1, -1].isnan()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_bytes_are_pytorchs(case, tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs g++")
    row_kernel.kernel.cache_clear()
    with on_cpu(row_kernel, tmp_path):
        check(case, torch.device("cpu"), monkeypatch)
    row_kernel.kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (2048, 4, 128, 16)], ids=str)
def test_on_a_gpu_too(case, device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    check(case, device, monkeypatch)
