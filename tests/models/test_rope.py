import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conftest import rms_error
from qerl.kernels.attention.rotary import rotate
from qerl.models.families import from_hf_config
from qerl.models.rope import cosine_sine, inverse_frequencies, magnitude

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
SETTINGS = (
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 0.7},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"factor": 0.5},
    YARN | {"original_max_position_embeddings": 32},  # the fast limit lies before the first dimension
    YARN | {"beta_slow": 1e-8},  # the slow one behind the last
    YARN | {"original_max_position_embeddings": 6},  # both limits at the first dimension
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("head_size", (64, 128))
def test_frequencies_and_magnitude_are_those_of_transformers(settings, head_size):
    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_theta": 50_000.0, **settings},
    )
    frequencies, size = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"))
    rope = from_hf_config(config.to_dict()).rope
    torch.testing.assert_close(inverse_frequencies(rope, head_size), frequencies, rtol=1e-6, atol=0)
    assert magnitude(rope) == pytest.approx(size, rel=1e-12)


FREQUENCIES = 100.0 ** (-torch.arange(8) / 8)


def _random(rng, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


def test_products_depend_on_the_distance_alone(rng):
    q, k = (_random(rng, 1, 1, 16).expand(50, 2, 16).float() for _ in range(2))
    angles = cosine_sine(torch.arange(50), FREQUENCIES, 1.0)
    products = torch.einsum("tnh,snh->nts", rotate(q, *angles), rotate(k, *angles))[0]
    for distance in (0, 3, 20):
        same = products.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-4, rtol=0)


def test_the_halves_turn_by_position_times_frequency(rng):
    x = _random(rng, 3, 1, 16)
    positions_T = torch.tensor([0, 5, 1000])
    got = rotate(x.float(), *cosine_sine(positions_T, FREQUENCIES, 1.5))
    pairs = torch.complex(x[..., :8], x[..., 8:])
    want = (
        pairs
        * torch.polar(torch.full((3, 8), 1.5).double(), positions_T[:, None] * FREQUENCIES.double())[:, None]
    )
    assert rms_error(got, torch.cat((want.real, want.imag), -1)) < 1e-5


def test_bf16_is_rounded_once(rng):
    x = _random(rng, 9, 3, 16, dtype=torch.bfloat16)
    angles = cosine_sine(torch.arange(9), FREQUENCIES, 1.0)
    assert torch.equal(rotate(x, *angles), rotate(x.float(), *angles).bfloat16())


def test_the_gradient_is_autograds(rng):
    x, dy = _random(rng, 9, 3, 16), _random(rng, 9, 3, 16)
    angles = [a.double() for a in cosine_sine(torch.arange(9), FREQUENCIES, 0.8)]
    assert torch.autograd.gradcheck(rotate, (x.requires_grad_(), *angles))
    x32 = x.detach().float().requires_grad_()
    rotate(x32, *(a.float() for a in angles)).backward(dy.float())
    (want,) = torch.autograd.grad(rotate(x, *angles), x, dy)
    assert rms_error(x32.grad, want) < 1e-6
