"""GPTQ towards the float model's outputs."""

import pytest
import torch

import tiny_run
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.quantize.calibration import pack_groups
from qerl.models.quantize.float_stream import FloatStream
from qerl.models.quantize.gptq import GptqSettings, requantize
from qerl.models.quantize.rounding import add_damping, gram, shifted_target

CPU = torch.device("cpu")
TOKENS = [(7 * i + i * i) % 250 for i in range(100)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return locate(str(tiny_run.write_model(tmp_path_factory.mktemp("model")))).open()


def decoder_of(checkpoint):
    return build_decoder(checkpoint, format="bf16", compute=torch.float32, device=CPU, resident=False)


def rows():
    return pack_groups([(TOKENS, [])], max_tokens=len(TOKENS), device=CPU)


def quantized(checkpoint, **settings):
    decoder = decoder_of(checkpoint)
    requantize(decoder, rows(), GptqSettings(**settings), notice=lambda text: None)
    return decoder


def weights_of(decoder):
    return {name: linear.weight.decode() for name, linear in decoder.linears()}


@pytest.mark.parametrize(("N", "K"), [(24, 40), (8, 40)])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_shifted_target_minimizes_the_error_to_the_float_output_in_float64(rng, N, K, share):
    """Least squares over all real matrices, with the damping as rows of its own that draw to W."""
    weight_NK, x_TK = torch.randn(N, K, generator=rng), torch.randn(90, K, generator=rng)
    z_TK = x_TK + 0.2 * torch.randn(90, K, generator=rng)
    h_KK = add_damping(gram(x_TK), 0.1)
    damping = (0.1 * gram(x_TK).diagonal().mean()).sqrt() * torch.eye(K, dtype=torch.float64)
    wanted_TK = (1 - share) * x_TK.double() + share * z_TK.double()
    left = torch.cat([x_TK.double(), damping])
    right = torch.cat([wanted_TK @ weight_NK.double().T, damping @ weight_NK.double().T])
    want_NK = torch.linalg.lstsq(left, right).solution.T
    found_NK = shifted_target(weight_NK, share * (z_TK - x_TK), x_TK, h_KK)
    torch.testing.assert_close(found_NK.double(), want_NK, rtol=1e-5, atol=1e-6)
    assert (want_NK - weight_NK).abs().max() > 0.01


def test_share_0_gives_the_same_codes_with_the_float_stream_and_without(checkpoint):
    """A share of 1e-30 runs the stream and adds nothing."""
    plain, beside = (weights_of(quantized(checkpoint, float_share=share)) for share in (0.0, 1e-30))
    assert all(torch.equal(plain[name], beside[name]) for name in plain)
    half = weights_of(quantized(checkpoint, float_share=0.5))
    assert not all(torch.equal(plain[name], half[name]) for name in plain)


def recorded_inputs(decoder):
    inputs, handles = {}, []
    for name, linear in decoder.linears():
        record = lambda module, arguments, name=name: inputs.setdefault(name, arguments[0].clone())  # noqa: E731
        handles.append(linear.register_forward_pre_hook(record))
    given = rows()
    with torch.no_grad():
        decoder(given.tokens_T, given.positions_T, given.attend)
    for handle in handles:
        handle.remove()
    return inputs


def test_the_stream_has_the_float_models_inputs(checkpoint):
    """Beside a model whose hidden states are other ones."""
    want, decoder, found = recorded_inputs(decoder_of(checkpoint)), decoder_of(checkpoint), {}
    names, stream = {linear: name for name, linear in decoder.linears()}, FloatStream()

    def disturbed(layer, h_TD, *others):
        found.update(stream.run(layer, h_TD, *others))
        return layer(h_TD, *others) * 1.5

    given = rows()
    with torch.no_grad():
        decoder(given.tokens_T, given.positions_T, given.attend, disturbed)
    assert len(found) == 8
    assert all(torch.equal(x_TK, want[names[linear]]) for linear, x_TK in found.items())
