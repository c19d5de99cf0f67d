"""Attention by FlashAttention 4: what it is asked for, on a CPU; its results, where it is installed."""

import functools
import itertools
import sys
import types

import pytest
import torch

from conftest import rms_error
from kernels.attention import test_flash_attention as flash_2
from qerl.kernels.attention import flash_attention_4 as op
from qerl.kernels.attention.attention import packed_attention
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import TreeLayout, over_runs, reference, tree_attention

CASES = (*flash_2.CASES, (8, 4, 256, ((200, (130, 1)),)), (28, 4, 128, ((129, ()), (1, (2,)))))
OPTIONS = {"plain": (None, None), "cap": (30.0, None), "capped window": (20.0, 9)}


def imitated(q, k, v, **asked):
    """What the package's documentation says of its arguments, by plain operations."""
    left, right = asked["window_size"]
    assert asked["deterministic"] is True and asked["causal"] == (left is None)
    sizes = [asked[f"cu_seqlens_{name}"].tolist() for name in "qk"]
    for name, ends in zip("qk", sizes, strict=True):
        assert asked[f"max_seqlen_{name}"] == max(b - a for a, b in itertools.pairwise(ends))
    outputs = []
    for (q0, k0), (q1, k1) in itertools.pairwise(zip(*sizes, strict=True)):
        keys, values = (flash_2.per_head(x, q)[k0:k1] for x in (k, v))
        s_NTS = torch.einsum("tnh,snh->nts", q[q0:q1], keys) * asked["softmax_scale"]
        if asked["softcap"]:
            s_NTS = asked["softcap"] * (s_NTS / asked["softcap"]).tanh()
        places = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0 - (q1 - q0))
        hidden = places > (0 if right is None else right)
        if left is not None:
            hidden |= places < -left
        s_NTS = s_NTS.masked_fill(hidden, float("-inf"))
        if asked["learnable_sink"] is not None:
            sinks = asked["learnable_sink"].to(s_NTS.dtype)[:, None, None].expand(-1, len(s_NTS[0]), 1)
            s_NTS = torch.cat([s_NTS, sinks], -1)
        outputs.append(torch.einsum("nts,snh->tnh", s_NTS.softmax(-1)[..., : k1 - k0], values))
    return torch.cat(outputs), None


def options_of(kind, has_sinks, num_heads, device="cpu"):
    if kind in flash_2.KINDS:
        return flash_2.options_of(kind, has_sinks, num_heads, device)
    softcap, window = OPTIONS[kind]
    sinks_N = torch.linspace(-1, 3, num_heads, device=device) if has_sinks else None
    return AttentionOptions(softcap=softcap, window=window, sinks_N=sinks_N)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", [*flash_2.KINDS, *OPTIONS])
def test_it_is_asked_for_the_definition(kind, has_sinks, monkeypatch, rng):
    monkeypatch.setattr(op, "_function", lambda: imitated)
    trees, operands, do = flash_2.operands_of(CASES[1], torch.float64, rng)
    options, layout = options_of(kind, has_sinks, CASES[1][0]), TreeLayout.of(trees)

    flash = functools.partial(op.flash_attention_4, options=options)
    got = flash_2.value_and_gradients(lambda q, k, v: over_runs(q, k, v, layout, flash), operands, do)
    truth = flash_2.value_and_gradients(lambda q, k, v: reference(q, k, v, trees, options), operands, do)
    for ours, theirs in zip(got, truth, strict=True):
        assert rms_error(ours, theirs) < 1e-6  # the sinks are fp32


@pytest.mark.parametrize(
    ("major", "head_size", "is_installed", "is_asked", "expected"),
    [
        (9, 256, True, False, True),
        (10, 128, True, True, True),
        (10, 128, True, False, False),
        (10, 256, True, True, False),
        (8, 128, True, True, False),
        (9, 100, True, True, False),
        (9, 128, False, True, False),
    ],
)
def test_it_is_chosen_where_it_is_installed_and_has_run(
    major, head_size, is_installed, is_asked, expected, monkeypatch
):
    monkeypatch.setenv("QERL_UNTRIED", str(int(is_asked)))
    monkeypatch.setattr(op, "_is_installed", lambda: is_installed)
    monkeypatch.setattr(op, "_function", lambda: imitated)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    queries = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (5, 4, head_size), "device": "cuda"}
    assert op.is_for_flash_4(types.SimpleNamespace(**queries), 2) is expected  # type: ignore[arg-type]
    sinks = options_of("plain", True, 4)
    assert op.is_for_flash_4(types.SimpleNamespace(**queries), 2, sinks) is expected  # type: ignore[arg-type]
    assert not op.is_for_flash_4(types.SimpleNamespace(**queries), 4, sinks)  # type: ignore[arg-type]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the folder flash_attn/cute of a package that is installed; its functions are not known yet."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = op._is_installed, op._function
    for cached in caches:
        cached.cache_clear()
    yield folder
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_its_switches_are_set_before_it_is_imported(package, monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "kept"))
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    for name in names:
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    (package / "__init__.py").write_text("from .interface import seen\n")
    (package / "interface.py").write_text(
        f"import os\nseen = [os.environ.get(name) for name in {names}]\ndef flash_attn_varlen_func(): ...\n"
    )
    assert op._is_installed() and op._function() is not None
    seen = sys.modules["flash_attn.cute.interface"].seen
    assert seen == ["1", str(tmp_path / "kept" / "flash-attention-4")]


def test_without_its_own_packages_it_is_not_used(package, caplog):
    (package / "interface.py").write_text("import a_package_that_is_missing\n")
    assert op._is_installed() and op._function() is None
    assert "a_package_that_is_missing" in caplog.text


def test_another_package_of_its_name_is_not_it(package):
    assert not op._is_installed()


def test_a_cpu_and_fp32_are_not_for_it(monkeypatch):
    monkeypatch.setattr(op, "_is_installed", lambda: True)
    assert not op.is_for_flash_4(torch.zeros(5, 4, 64, dtype=torch.bfloat16), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", [*flash_2.KINDS, *OPTIONS])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_bf16_loses_no_more_than_plain_operations(case, kind, has_sinks, device, rng):
    if not op.is_for_flash_4(torch.empty(1, 4, case[2], dtype=torch.bfloat16, device=device), 2):
        pytest.skip("needs flash-attn-4 and a GPU that it knows")
    trees, operands, do = flash_2.operands_of(case, torch.bfloat16, rng, device)
    options, layout = options_of(kind, has_sinks, case[0], device), TreeLayout.of(trees, device)
    plain = functools.partial(packed_attention, layout=layout.windowed(options.window), options=options)
    truth = flash_2.value_and_gradients(plain, [x.float() for x in operands], do)
    eager = flash_2.value_and_gradients(plain, operands, do)
    ours, again = (
        flash_2.value_and_gradients(lambda q, k, v: tree_attention(q, k, v, layout, options), operands, do)
        for _ in range(2)
    )
    for got, same, theirs, true in zip(ours, again, eager, truth, strict=True):
        assert torch.equal(got, same)
        assert rms_error(got, true) <= 1.5 * rms_error(theirs, true) + 2**-9
