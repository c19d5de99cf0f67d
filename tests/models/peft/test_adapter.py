import math

import pytest
import torch

from models.tiny import logits_of, tiny
from qerl.algo.seeds import mix
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.formats import NVFP4
from qerl.models.peft.adapter import adapter_off, adapter_tensors, add_adapter, load_adapter, publish

TOKENS_T = torch.arange(30) * 11 % 61
CONFIG = AdapterConfig(rank=4, alpha=8.0)


def _adapted(config=CONFIG, *, seed=0, compute=torch.float32):
    decoder = tiny("Qwen2", compute=compute)
    add_adapter(decoder, config, seed)
    return decoder


@torch.no_grad()
def _move(decoder, *, seed=1):
    rng = torch.Generator().manual_seed(seed)
    for master in adapter_tensors(decoder).values():
        master.add_(torch.randn(master.shape, generator=rng) * 0.1)


def test_names_and_shapes_are_those_of_peft():
    decoder = _adapted(AdapterConfig(rank=4, target_modules=("q_proj", "down_proj")))
    shapes = {name: tuple(t.shape) for name, t in adapter_tensors(decoder).items()}
    prefix = "base_model.model.model.layers"
    assert shapes == {
        f"{prefix}.{layer}.{module}.lora_{part}.weight": shape
        for layer in range(3)
        for module, part, shape in (
            ("self_attn.q_proj", "A", (4, 48)),
            ("self_attn.q_proj", "B", (96, 4)),
            ("mlp.down_proj", "A", (4, 80)),
            ("mlp.down_proj", "B", (48, 4)),
        )
    }


def test_all_seven_linears_of_each_layer_learn_by_default():
    assert len(adapter_tensors(_adapted())) == 3 * 7 * 2


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_a_new_adapter_changes_no_bit(compute):
    without, decoder = tiny("Qwen2", compute=compute), _adapted(compute=compute)
    want = logits_of(without, TOKENS_T)
    assert torch.equal(logits_of(decoder, TOKENS_T), want)
    with adapter_off(decoder):
        assert torch.equal(logits_of(decoder, TOKENS_T), want)


def test_masters_are_fp32_whatever_is_computed_in():
    assert {t.dtype for t in adapter_tensors(_adapted(compute=torch.bfloat16)).values()} == {torch.float32}


def test_a_is_uniform_within_pefts_bound_and_b_is_zero():
    a, b = [], []
    for name, t in adapter_tensors(_adapted(AdapterConfig(rank=64))).items():
        (a if "lora_A" in name else b).append(t.detach())
    assert all((t == 0).all() for t in b)
    for t in a:
        bound = 1 / math.sqrt(t.shape[1])
        assert 0.95 * bound < t.max() <= bound and -bound <= t.min() < -0.95 * bound
        assert t.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_a_is_uniform_below_the_root_of_its_width():
    """To the bit what torch computes."""
    for index, (_, linear) in enumerate(_adapted(seed=3).linears()):
        a_RK, bound = linear.lora_A, 1 / math.sqrt(linear.in_width)
        drawn = torch.rand(a_RK.shape, generator=torch.Generator().manual_seed(mix(3, index)))
        assert torch.equal(a_RK, drawn.mul(2 * bound).sub(bound)) and a_RK.min() < 0 < a_RK.max()


def test_a_depends_on_the_seed_and_the_linear_alone():
    one, same, other = (_adapted(seed=seed) for seed in (0, 0, 1))
    fewer = _adapted(AdapterConfig(rank=4, target_modules=("up_proj",)), seed=0)
    tensors = [adapter_tensors(d) for d in (one, same, other, fewer)]
    names = [name for name in tensors[0] if "lora_A" in name]
    assert all(torch.equal(tensors[0][n], tensors[1][n]) for n in names)
    assert not any(torch.equal(tensors[0][n], tensors[2][n]) for n in names)
    assert all(torch.equal(t, tensors[0][n]) for n, t in tensors[3].items())
    assert len({tuple(tensors[0][n].flatten()[:4].tolist()) for n in names}) == len(names)


def test_the_scale_is_alpha_over_rank():
    decoder = _adapted(AdapterConfig(rank=4, alpha=6.0))
    assert {linear.scaling for _, linear in decoder.linears()} == {1.5}


def test_the_policy_moves_when_published_and_not_before():
    decoder = _adapted()
    before = logits_of(decoder, TOKENS_T)
    _move(decoder)
    assert torch.equal(logits_of(decoder, TOKENS_T), before)
    publish(decoder)
    assert (logits_of(decoder, TOKENS_T) - before).abs().max() > 0.1


def test_off_is_the_frozen_model_and_ends_with_the_block():
    decoder = _adapted()
    frozen = logits_of(decoder, TOKENS_T)
    _move(decoder)
    publish(decoder)
    moved = logits_of(decoder, TOKENS_T)
    with pytest.raises(KeyboardInterrupt), adapter_off(decoder):
        assert torch.equal(logits_of(decoder, TOKENS_T), frozen)
        raise KeyboardInterrupt
    assert torch.equal(logits_of(decoder, TOKENS_T), moved)


def test_what_was_saved_loads_into_the_same_policy():
    decoder, other = _adapted(), _adapted(seed=5)
    _move(decoder)
    publish(decoder)
    load_adapter(other, {name: t.detach().clone() for name, t in adapter_tensors(decoder).items()})
    assert torch.equal(logits_of(other, TOKENS_T), logits_of(decoder, TOKENS_T))
    assert all(t.requires_grad for t in adapter_tensors(other).values())


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing():
    decoder = _adapted()
    before = {name: t.detach().clone() for name, t in adapter_tensors(decoder).items()}
    first, last = next(iter(before)), list(before)[-1]
    lacking = {name: t + 1 for name, t in before.items() if name != first}
    with pytest.raises(UserError, match=rf"lacks tensor {first} \(1 names differ\)"):
        load_adapter(decoder, lacking)
    with pytest.raises(UserError, match="has an unknown tensor aaa"):
        load_adapter(decoder, {**before, "aaa": torch.zeros(1)})
    with pytest.raises(UserError, match=rf"{last} must have the shape \(48, 4\), got \(48, 5\)"):
        load_adapter(decoder, {**{n: t + 1 for n, t in before.items()}, last: torch.zeros(48, 5)})
    assert all(torch.equal(t, before[name]) for name, t in adapter_tensors(decoder).items())


def test_a_target_that_binds_nothing_is_refused():
    with pytest.raises(UserError, match="the model has no linear 'qkv_proj'"):
        _adapted(AdapterConfig(target_modules=("q_proj", "qkv_proj")))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_weights_that_learn_change_no_bit_until_they_are_published(compute):
    decoder = tiny(compute=compute)
    tokens_T = torch.arange(9)
    before = logits_of(decoder, tokens_T)
    add_adapter(decoder, AdapterConfig(kind="full"), seed=1)
    masters = adapter_tensors(decoder)
    assert "model.layers.0.self_attn.q_proj.weight" in masters and len(masters) == 7 * 3
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert torch.equal(logits_of(decoder, tokens_T), before)
    with torch.no_grad():
        masters["model.layers.1.mlp.up_proj.weight"].mul_(1.5)
    assert torch.equal(logits_of(decoder, tokens_T), before)
    publish(decoder)
    assert not torch.equal(logits_of(decoder, tokens_T), before)


def test_a_quantized_weight_cannot_be_trained_itself():
    decoder = tiny()
    linear = dict(decoder.linears())["layers.0.mlp.up_proj"]
    linear.load_weight(NVFP4.encode(linear.weight.decode()))
    with pytest.raises(UserError, match=r"set --model\.format bf16"):
        add_adapter(decoder, AdapterConfig(kind="full"), seed=1)
