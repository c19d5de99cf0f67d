"""GPTQ half-way to the float model's outputs on a mixture of experts, against float64.

attention after a mixture   target of (x + z) / 2, where z is what the float model has by its own routing
experts                     their own weights, for the rows that the quantized model routes to them
"""

import dataclasses

import pytest
import torch

from models.family_rows import oracle
from models.family_rows import save as save_oracle
from qerl.formats import e2m1
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.mixture import MixtureMLP
from qerl.models.quantize.calibration import pack_groups
from qerl.models.quantize.gptq import FLOAT, MIN_EXPERT_ROWS, SWEEPS, requantize
from qerl.models.quantize.rounding import round_to_grid

CPU = torch.device("cpu")
TOKENS = [(7 * i + i * i) % 250 for i in range(160)]


def decoder_of(folder):
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format="bf16", compute=torch.float32, device=CPU, resident=False)


def recorded(decoder):
    """({module: its arguments}, {layer with a mixture: ids_TK}) of a pass."""
    inputs, ids, rows = {}, {}, pack_groups([(TOKENS, [])], max_tokens=len(TOKENS), device=CPU)
    kinds = [module for _, module in (*decoder.linears(), *decoder.expert_linears())]
    mixtures = [module for module in decoder.modules() if isinstance(module, MixtureMLP)]
    hooks = [
        module.register_forward_pre_hook(lambda each, arguments: inputs.setdefault(each, arguments))
        for module in (*kinds, *mixtures)
    ]

    def route(layer_index, ids_TK):
        ids[layer_index] = ids_TK.clone()
        return ids_TK

    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, route=route)
    for hook in hooks:
        hook.remove()
    return inputs, ids


@pytest.fixture(scope="module", params=["Qwen3Moe", "Olmoe"])
def quantized(request, tmp_path_factory):
    """The float decoder, the quantized one, and what each records."""
    folder = tmp_path_factory.mktemp("mixture")
    save_oracle(oracle(request.param, vocab_size=320).bfloat16(), folder)
    first, second = decoder_of(folder), decoder_of(folder)
    rows = pack_groups([(TOKENS, [])], max_tokens=len(TOKENS), device=CPU)
    requantize(second, rows, FLOAT, notice=lambda text: None)
    return first, second, recorded(first), recorded(second)


def h_of(x_TK):
    """The products of the inputs with the damping, in float64."""
    h_KK = x_TK.double().T @ x_TK.double()
    return h_KK + FLOAT.damping * h_KK.diagonal().mean() * torch.eye(len(h_KK), dtype=torch.float64)


def assert_rounded(weight, target_NK, h_KK):
    """The weight has the codes that rounding gives for this target and these inputs, but for ties."""
    steps_NK = (weight.scales.float() / weight.global_scale).repeat_interleave(16, dim=1)
    codes = e2m1.encode(round_to_grid(target_NK.float(), steps_NK, h_KK, sweeps=SWEEPS))
    want_NK = dataclasses.replace(weight, codes=codes).decode()
    assert (want_NK == weight.decode()).double().mean() > 0.995


def test_the_two_models_route_some_tokens_differently(quantized):
    _, _, (_, of_float), (_, of_quantized) = quantized
    pairs = [(of_float[layer].sort().values, of_quantized[layer].sort().values) for layer in of_float]
    assert any((a != b).any() for a, b in pairs)


def test_linears_after_a_mixture_are_drawn_to_the_float_model_with_its_own_routing(quantized):
    first, second, (z_of, _), (x_of, _) = quantized
    compared = 0
    for float_layer, layer in zip(first.layers, second.layers, strict=True):
        for float_group, group in zip(float_layer.linear_groups, layer.linear_groups, strict=True):
            if group[0].weight.name != "nvfp4":  # the router
                continue
            z_TK, x_TK = z_of[float_group[0]][0].double(), x_of[group[0]][0].double()
            h_KK = h_of(x_TK)
            for float_linear, linear in zip(float_group, group, strict=True):
                w_NK = float_linear.weight.decode().double()
                half_TN = (x_TK + z_TK) / 2 @ w_NK.T
                damped_KN = (h_KK - x_TK.T @ x_TK) @ w_NK.T
                target_NK = torch.linalg.solve(h_KK, x_TK.T @ half_TN + damped_KN).T
                assert_rounded(linear.weight, target_NK, h_KK)
                compared += 1
    assert compared >= 4 * len(second.layers)  # dense layers have three more


def test_experts_keep_their_weights_as_targets_for_the_rows_of_the_quantized_routing(quantized):
    first, second, _, (x_of, ids_of) = quantized
    compared = 0
    for index, (float_layer, layer) in enumerate(zip(first.layers, second.layers, strict=True)):
        for float_experts, experts in zip(float_layer.experts, layer.experts, strict=True):
            x_SK, _, ends, *_ = x_of[experts]
            for e in range(experts.spec.num_experts):
                x_sK, is_chosen_T = x_SK[ends[e] : ends[e + 1]], (ids_of[index] == e).any(1)
                assert len(x_sK) == is_chosen_T.sum()
                if experts is layer.experts[0]:
                    assert torch.equal(x_sK, x_of[layer.mlp][0][is_chosen_T])
                if len(x_sK) >= MIN_EXPERT_ROWS:
                    target_NK = float_experts.weight[e].decode()
                    assert_rounded(experts.weight[e], target_NK, h_of(x_sK))
                    compared += 1
    assert compared > 4
