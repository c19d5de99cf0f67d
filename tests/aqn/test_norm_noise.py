import pytest
import torch

from models.tiny import logits_of, tiny
from qerl.aqn.norm_noise import noised

TOKENS_T = torch.arange(30) * 11 % 61


def _noise(decoder, **settings):
    settings = {"sigma": 0.01, "unit": "absolute", "seed": 0, "step": 3} | settings
    with noised(decoder.noise_table, **settings) as num_norms:
        assert num_norms == len(decoder.noise_table.norms)
        return torch.stack([norm.noise.clone() for norm in decoder.noise_table.norms])


def test_logits_change_inside_and_are_the_same_bits_after():
    decoder = tiny("Qwen3")
    before = logits_of(decoder, TOKENS_T)
    with noised(decoder.noise_table, sigma=0.05, unit="absolute", seed=0, step=0) as num_norms:
        assert num_norms == 6
        assert (logits_of(decoder, TOKENS_T) - before).abs().max() > 0.01
    assert torch.equal(logits_of(decoder, TOKENS_T), before)


def test_an_exception_leaves_no_noise():
    decoder = tiny()
    with (
        pytest.raises(KeyboardInterrupt),
        noised(decoder.noise_table, sigma=1.0, unit="absolute", seed=0, step=0),
    ):
        raise KeyboardInterrupt
    assert all((norm.noise == 0).all() for norm in decoder.noise_table.norms)


def test_sigma_zero_touches_no_norm():
    decoder = tiny()
    with noised(decoder.noise_table, sigma=0.0, unit="absolute", seed=0, step=0) as num_norms:
        assert num_norms == 0
        assert all((norm.noise == 0).all() for norm in decoder.noise_table.norms)


def test_absolute_noise_has_deviation_sigma():
    noise = _noise(tiny(hidden_size=960, num_hidden_layers=2), sigma=0.02)
    assert noise.std(1).tolist() == pytest.approx([0.02] * 4, rel=0.1)
    assert noise.mean(1).abs().max() < 0.003


def test_relative_noise_is_the_same_draw_in_units_of_each_norm():
    decoder = tiny()
    for index, norm in enumerate(decoder.noise_table.norms):
        norm.weight.mul_(0.1 * (index + 1))
    sizes = torch.stack([norm.weight.square().mean().sqrt() for norm in decoder.noise_table.norms])
    want = _noise(decoder) * sizes[:, None]
    torch.testing.assert_close(_noise(decoder, unit="relative"), want)


def test_every_norm_has_its_own_draw_and_coordinates_name_it():
    decoder = tiny()
    noise = _noise(decoder)
    assert len({tuple(row.tolist()) for row in noise}) == 6
    assert torch.equal(noise, _noise(decoder))
    assert torch.equal(noise[:2], _noise(tiny(num_hidden_layers=1)))
    for settings in ({"seed": 1}, {"step": 4}):
        assert (_noise(decoder, **settings) != noise).all(1).all()


def test_the_norms_are_those_before_qkv_and_before_gate_and_up():
    decoder = tiny("Qwen3")
    names = {id(m): name for name, m in decoder.named_modules()}
    assert [names[id(norm)] for norm in decoder.noise_table.norms] == [
        f"layers.{i}.{name}" for i in range(3) for name in ("input_layernorm", "post_attention_layernorm")
    ]


def test_the_draw_is_pinned():
    """Another draw would make every run that is resumed another run; four digits hold on every CPU."""
    first = _noise(tiny(), sigma=1.0)[:, 0].tolist()
    assert first == pytest.approx([1.304, -0.0482, 1.6995, 0.197, -0.4541, -1.0657], abs=1e-4)
