"""The parity benchmark on a tiny decoder."""

import dataclasses

import pytest
import torch

from bench.rows import CPU, rows_of
from bench.shapes import TINY
from benchmarks import parity
from qerl.errors import UserError
from qerl.models.architecture import LayerKind, Mixture
from qerl.models.random_weights import SHAPES, random_decoder

SHAPE = dataclasses.replace(TINY, vocab_size=128)
OPTIONS = parity.ParityOptions(
    shape="tiny",
    batch=3,
    prompt_tokens=5,
    max_tokens=24,
    lora_rank=16,
    heads=("bf16", "nvfp4"),
    entropies=(2.0,),
)


def test_each_case_is_a_row(tmp_path):
    rows = rows_of(tmp_path, lambda rows: parity.measure_cases(OPTIONS, SHAPE, CPU, rows))
    assert len(rows) == 8 and not any("error" in r for r in rows)
    assert all(r["sampled_tokens"] == 72 and r["rollout_tok_per_s"] > 0 and r["read_s"] > 0 for r in rows)
    plain, exact = ([r for r in rows if r["exact_mode"] == mode] for mode in (False, True))
    assert all(0 < r["abs_diff"] <= r["max_diff"] and r["kl"] > 0 and not r["exact"] for r in plain)
    assert all(r["abs_diff"] == r["max_diff"] == r["kl"] == 0 and r["exact"] is True for r in exact)
    assert len(plain) == len(exact)
    assert all(r["entropy"] == pytest.approx(r["target_entropy"], abs=0.6) for r in rows)


def test_a_cache_in_fp8_is_further_off(tmp_path):
    options = dataclasses.replace(
        OPTIONS,
        kvs=("bf16", "fp8"),
        heads=("bf16",),
        entropies=(2.0,),
        providers=("qerl-bf16",),
        exacts=(False,),
    )
    plain, packed = rows_of(tmp_path, lambda rows: parity.measure_cases(options, SHAPE, CPU, rows))
    assert (plain["kv"], packed["kv"]) == ("bf16", "fp8")
    assert plain["abs_diff"] < packed["abs_diff"]


def test_in_fp32_the_difference_is_rounding():
    decoder = random_decoder(SHAPE, format="nvfp4", rank=16, device=CPU, seed=0, compute=torch.float32)
    case = parity.ParityCase(
        shape="tiny",
        provider="qerl-nvfp4",
        lora_rank=16,
        kv="bf16",
        head="bf16",
        target_entropy=2.0,
        exact_mode=False,
        batch=3,
        prompt_tokens=5,
        max_tokens=20,
    )
    assert parity.measure_case(case, decoder)["max_diff"] < 2e-5


def test_a_mixture_has_a_row_with_replay_and_one_without(tmp_path):
    shape = dataclasses.replace(
        SHAPE,
        layer_kinds=(LayerKind(mlp="experts"),) * 2,
        mixture=Mixture(num_experts=16, num_chosen=4, width=64, softmax_over="chosen", stored="separate"),
    )
    cases = {"heads": ("bf16",), "providers": ("qerl-mxfp4",), "exacts": (False,)}
    options = dataclasses.replace(OPTIONS, kvs=("bf16", "fp8"), **cases)
    rows = rows_of(tmp_path, lambda rows: parity.measure_cases(options, shape, CPU, rows))
    assert [(row["kv"], row["router_replay"]) for row in rows] == [
        ("bf16", True),
        ("bf16", False),
        ("fp8", True),
        ("fp8", False),
    ]
    same, _, replayed, free = rows
    assert all(row["kernels"] == "torch" and row["sampled_tokens"] == 72 for row in rows)
    # of both passes in bf16 some sums round otherwise; what a cache in fp8 changes is far more
    assert 0 < same["abs_diff"] < 5e-3 < replayed["abs_diff"] and same["route_changes"] == 0
    # a cache in fp8 makes sampler and learner differ, routes included
    assert 0 < free["route_changes"] <= free["route_change_rows"] < 1
    assert replayed["abs_diff"] < free["abs_diff"] and replayed["kl"] < free["kl"]


def test_a_shape_is_cut_to_its_first_layers():
    whole = SHAPES["gpt-oss-20b"]
    short = parity.first_layers(whole, 4)
    assert short.num_layers == 4 and short.kinds == whole.kinds[:4]
    assert parity.first_layers(whole, None) is whole
    with pytest.raises(UserError, match="from 1 to the shape's 24, got 25"):
        parity.first_layers(whole, 25)


@pytest.mark.parametrize(("entropy", "vocab_size"), [(2.0, 152_064), (11.2, 152_064), (3.0, 128)])
def test_logits_are_spread_for_the_entropy(entropy, vocab_size):
    spread = parity.logit_std(entropy, vocab_size)
    logits_TV = spread * torch.randn(
        2**21 // vocab_size, vocab_size, generator=torch.Generator().manual_seed(1)
    )
    found = torch.distributions.Categorical(logits=logits_TV).entropy().mean().item()
    assert found == pytest.approx(entropy, abs=0.35)


def test_more_entropy_than_there_can_be_is_flat():
    assert parity.logit_std(20.0, 128) == 0.0
