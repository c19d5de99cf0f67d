"""Alphas of experts that are applied after their products: the same outputs and gradients."""

import dataclasses

import pytest
import torch

from qerl.kernels import expert_product, grouped_linear
from qerl.kernels.routing import sort_layers, sort_rows
from qerl.models import random_weights
from qerl.models.decoder import Decoder
from qerl.models.random_weights import random_decoder

SHAPE = random_weights.SHAPES["qwen3-30b-a3b"]
SMALL = dataclasses.replace(
    SHAPE,
    num_layers=1,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=97,
    layer_kinds=SHAPE.layer_kinds[:1],
    mixture=dataclasses.replace(SHAPE.mixture, num_experts=6, num_chosen=2, width=64),
)


@pytest.fixture
def decoder(monkeypatch) -> Decoder:
    """Experts whose alphas differ, multiplied as on a GPU."""
    for module in (expert_product, grouped_linear):
        monkeypatch.setattr(module, "can_multiply", lambda *_: True)
    decoder = random_decoder(SMALL, format="nvfp4", rank=16, device=torch.device("cpu"), seed=0)
    for _, experts in decoder.expert_linears():
        scales = experts.weight.parts["global_scale"]
        scales *= torch.linspace(0.5, 2, len(scales))[:, None]
    return decoder


def outputs(mlp, x_TD):
    x_TD = x_TD.clone().requires_grad_()
    y_TD = mlp(x_TD, x_TD, 0, None, None, {})
    (dx_TD,) = torch.autograd.grad((y_TD * torch.arange(64) / 64).sum(), x_TD)
    return y_TD.detach().double(), dx_TD.double()


def test_alphas_move_behind_the_products_and_nothing_else_changes(decoder, monkeypatch):
    mlp, x_TD = decoder.layers[0].mlp, torch.randn(40, 64).bfloat16()
    calls, scale_and_add = [], expert_product.scale_and_add

    def counted(*each, **others):
        calls.append(others["alpha_E"] is not None)
        scale_and_add(*each, **others)

    monkeypatch.setattr(expert_product, "scale_and_add", counted)
    moved = outputs(mlp, x_TD)
    assert calls and not any(calls)
    monkeypatch.setattr(type(mlp.experts.down_proj), "spare_alpha", lambda *_: None)
    calls.clear()
    scaled = outputs(mlp, x_TD)
    assert all(calls)
    for ours, theirs in zip(moved, scaled, strict=True):
        assert (ours - theirs).norm() < 8e-3 * theirs.norm()  # each rounds its products to bfloat16


def test_a_product_with_biases_or_adapters_applies_its_own_alphas(decoder):
    gate_up, down = decoder.layers[0].mlp.stacks
    x_TD = torch.randn(4, 64).bfloat16()
    assert gate_up.spare_alpha(x_TD) is not None
    gate_up.add_adapter(torch.zeros(6, 4, 64), torch.zeros(6, 128, 4), 1.0)
    down.bias = torch.zeros(6, 64, dtype=torch.bfloat16)
    assert gate_up.spare_alpha(x_TD) is None and down.spare_alpha(x_TD) is None


def test_layers_are_sorted_as_each_alone():
    ids_LTK = torch.rand(3, 11, 6).topk(2).indices.sort(-1).values
    for ids_TK, rows in zip(ids_LTK, sort_layers(ids_LTK.flatten(1), 6), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rows, sort_rows(ids_TK, 6), strict=True))
