"""Merging an adapter into 4 bits towards the outputs of the run, whose adapter is apart."""

import copy
import dataclasses

import pytest
import torch

import tiny_run
from conftest import rms_error
from qerl.config import AdapterConfig
from qerl.formats import e2m1
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import adapter_tensors, add_adapter, merged_weight, publish
from qerl.models.quantize.calibration import pack_groups
from qerl.models.quantize.gptq import DAMPING, SWEEPS, GptqSettings, requantize
from qerl.models.quantize.rounding import round_to_grid

CPU = torch.device("cpu")
TOKENS = [(7 * i + i * i) % 250 for i in range(200)]
B_STD = 0.01
"""The adapter moves weights by far less than half a step."""


def rows():
    return pack_groups([(TOKENS, [])], max_tokens=len(TOKENS), device=CPU)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    decoder = build_decoder(
        locate(str(tiny_run.write_model(tmp_path_factory.mktemp("model")))).open(),
        format="nvfp4",
        compute=torch.float32,
        device=CPU,
        resident=False,
    )
    add_adapter(decoder, AdapterConfig(rank=4, alpha=8.0), seed=0)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            if "lora_B" in name:
                master.add_(torch.randn(master.shape, generator=rng) * B_STD)
    publish(decoder)
    return decoder


def merged(policy, **settings):
    decoder = copy.deepcopy(policy)
    requantize(decoder, rows(), GptqSettings(**settings), notice=lambda text: None)
    return decoder


@torch.no_grad()
def recorded(decoder):
    """What each linear reads, by its name, in float64."""
    inputs, handles = {}, []
    for name, linear in decoder.linears():
        record = lambda module, arguments, name=name: inputs.setdefault(name, arguments[0].clone())  # noqa: E731
        handles.append(linear.register_forward_pre_hook(record))
    given = rows()
    decoder(given.tokens_T, given.positions_T, given.attend)
    for handle in handles:
        handle.remove()
    return {name: x_TK.double() for name, x_TK in inputs.items()}


def test_each_linear_aims_at_the_output_of_the_run_in_float64(policy):
    """The weight with its adapter on the frozen grid, but for ties; the first inputs are the run's own."""
    found = merged(policy)
    z_by_name, x_by_name = recorded(policy), recorded(found)
    moved = 0
    for (name, linear), (_, trained) in zip(found.linears(), policy.linears(), strict=True):
        w_NK, x_TK, z_TK = merged_weight(trained), x_by_name[name], z_by_name[name]
        damping_KK = DAMPING * x_TK.square().sum(0).mean() * torch.eye(x_TK.shape[1], dtype=torch.float64)
        h_KK = x_TK.T @ x_TK + damping_KK
        wanted_TN = z_TK @ w_NK.T
        target_NK = torch.linalg.solve(h_KK, x_TK.T @ wanted_TN + damping_KK @ w_NK.T).T
        frozen = trained.weight
        steps_NK = (frozen.scales.float() / frozen.global_scale).repeat_interleave(16, dim=1)
        codes = e2m1.encode(round_to_grid(target_NK.float(), steps_NK, h_KK, sweeps=SWEEPS))
        want_NK = dataclasses.replace(frozen, codes=codes).decode()
        assert (want_NK == linear.weight.decode()).double().mean() > 0.995, name
        moved += (target_NK - w_NK).norm() > 0.01 * (w_NK - frozen.decode()).norm()
    assert moved > len(z_by_name) / 2


@torch.no_grad()
def test_the_share_keeps_more_of_a_weak_adapter(policy):
    given = rows()

    def outputs(decoder):
        return decoder(given.tokens_T, given.positions_T, given.attend)

    truth = outputs(policy)
    aimed, none = (rms_error(outputs(merged(policy, **share)), truth) for share in ({}, {"float_share": 0.0}))
    assert aimed < 0.7 * none
