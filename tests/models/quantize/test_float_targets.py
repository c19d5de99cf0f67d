"""GPTQ towards the float model's outputs, with weighted rows and factors in norms."""

import dataclasses

import pytest
import torch

import tiny_run
from conftest import rms_error
from qerl.formats import NVFP4
from qerl.formats.block_scale import least_squares
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.quantize.calibration import pack_groups
from qerl.models.quantize.float_stream import FloatStream
from qerl.models.quantize.gptq import GptqSettings, requantize
from qerl.models.quantize.norm_folding import fold_into_norm
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


def recorded_inputs(decoder, run_layer):
    inputs, handles = {}, []
    for name, linear in decoder.linears():
        record = lambda module, arguments, name=name: inputs.setdefault(name, arguments[0].clone())  # noqa: E731
        handles.append(linear.register_forward_pre_hook(record))
    given = rows()
    with torch.no_grad():
        decoder(given.tokens_T, given.positions_T, given.attend, run_layer)
    for handle in handles:
        handle.remove()
    return inputs


def test_the_stream_has_the_float_models_inputs_and_the_size_of_its_hidden_states(checkpoint):
    """Beside a model whose hidden states are other ones."""
    hidden = []

    def plain(layer, h_TD, *others):
        hidden.append((h_TD.clone(), (h_TD := layer(h_TD, *others)).clone()))
        return h_TD

    want, decoder, stream, found = (
        recorded_inputs(decoder_of(checkpoint), plain),
        decoder_of(checkpoint),
        None,
        [],
    )
    names, stream = {id(linear): name for name, linear in decoder.linears()}, FloatStream()

    def disturbed(layer, h_TD, *others):
        found.append(stream.run(layer, h_TD, *others))
        return layer(h_TD, *others) * 1.5

    given = rows()
    with torch.no_grad():
        decoder(given.tokens_T, given.positions_T, given.attend, disturbed)
    for (before_TD, after_TD), inputs in zip(hidden, found, strict=True):
        assert len(inputs) == 4
        for linear, (x_TK, weight_T1) in inputs.items():
            name = names[id(linear)]
            assert torch.equal(x_TK, want[name]), name
            of_TD = {"o_proj": before_TD, "down_proj": after_TD}.get(name.rpartition(".")[2])
            assert (weight_T1 is None) == (of_TD is None), name
            if of_TD is not None:
                size_T1 = of_TD.double().square().mean(1, keepdim=True).sqrt()
                torch.testing.assert_close(weight_T1.double() * size_T1, torch.ones_like(size_T1))


def test_rows_are_weighted_in_o_and_down_alone(checkpoint):
    plain, weighted = (weights_of(quantized(checkpoint, weighs_rows=weighs)) for weighs in (False, True))
    first = {name: torch.equal(plain[name], weighted[name]) for name in plain if ".0." in name}
    same = {name.rpartition(".")[2] for name, is_same in first.items() if is_same}
    assert same == {"q_proj", "k_proj", "v_proj"}  # those before the first weighted one


def uneven(rng, K):
    """Factors of channels that differ within each block of 16."""
    return torch.logspace(-1, 1, K)[torch.randperm(K, generator=rng)]


def test_a_folded_norm_is_exact_in_bfloat16_and_its_factors_cancel(rng):
    norm_K, weight_NK = torch.rand(64, generator=rng) + 0.5, torch.randn(48, 64, generator=rng)
    x_TK, before_K = torch.randn(256, 64, generator=rng) * uneven(rng, 64), norm_K.clone()
    s_K = fold_into_norm(norm_K, weight_NK, x_TK, NVFP4, least_squares)
    assert s_K.max() > 1.5 * s_K.min()
    assert torch.equal(norm_K, norm_K.bfloat16().float())
    torch.testing.assert_close(norm_K * s_K, before_K, rtol=3e-7, atol=0)


def test_folding_chooses_the_factors_whose_rounding_errs_least(rng):
    norm_K, weight_NK = torch.ones(64), torch.randn(48, 64, generator=rng)
    x_TK = torch.randn(256, 64, generator=rng) * uneven(rng, 64)

    def error(s_K):
        target_NK = weight_NK * s_K
        packed = least_squares(NVFP4.encode(target_NK), target_NK, gram(x_TK / s_K).diagonal().float())
        return ((packed.decode() / s_K - weight_NK) @ x_TK.T).square().sum()

    s_K = fold_into_norm(norm_K, weight_NK, x_TK, NVFP4, least_squares)
    assert error(s_K) < 0.95 * error(torch.ones(64))


def test_a_norm_and_the_linears_behind_it_compute_what_they_did_before_they_were_folded(checkpoint, rng):
    decoder = decoder_of(checkpoint)
    for layer in decoder.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight *= uneven(rng, 64)
    norms = {name: buffer.clone() for name, buffer in decoder.named_buffers() if name.endswith("norm.weight")}
    before = weights_of(decoder)
    requantize(decoder, rows(), GptqSettings(folds_norms=True), notice=lambda text: None)
    for name, weight_NK in weights_of(decoder).items():
        layer, _, linear = name.rpartition(".")[0].rpartition(".")
        norm = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}[linear]
        at, is_behind_norm = (
            f"{layer}.{norm}.weight",
            name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
        )
        was_K, is_K = (norms[at], decoder.get_buffer(at)) if is_behind_norm else (1.0, 1.0)
        assert not is_behind_norm or (was_K / is_K).max() > 1.5 * (was_K / is_K).min(), name
        assert rms_error(weight_NK * is_K, before[name] * was_K) < 0.2, name


def test_settings_that_add_nothing_have_no_float_stream():
    assert not GptqSettings().has_float_stream
    assert dataclasses.replace(GptqSettings(), weighs_rows=True).has_float_stream
