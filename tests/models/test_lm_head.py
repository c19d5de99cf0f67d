"""The head in each of its formats: logits of the decoded weight, and one policy for sampler and learner."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.shapes import TINY
from conftest import rms_error
from engine.parts import drawn, engine_of, packed_logprobs, prompts_of
from models.checkpoints import save_tiny
from models.tiny import logits_of
from qerl.config import RunConfig, SampleConfig
from qerl.errors import UserError
from qerl.formats import FP8, NVFP4
from qerl.kernels.head import head_operand
from qerl.kernels.head.logprob import chunked_logprob, reference
from qerl.kernels.tiles.nvfp4_decode import row_factors, unpack
from qerl.learner import Learner
from qerl.models import lm_head as op
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.packed.packed_linear import PackedNVFP4
from qerl.models.packed_writer import write_quantized
from qerl.models.random_weights import random_decoder
from qerl.types import Group

PACKED, V, D = ("fp8", "nvfp4"), 704, 256
SMALL = dataclasses.replace(TINY, vocab_size=128, max_positions=128)
TOKENS = torch.arange(20) * 5


def table(rng, dtype=torch.float32):
    return torch.randn(V, D, generator=rng).mul_(0.1).to(dtype)


def head_of(weight_VD, format):
    head = op.LMHead(weight_VD)
    head.pack(format)
    return head


def with_head(head, *, tied=False, compute=torch.float32):
    architecture = dataclasses.replace(SMALL, tied_head=tied)
    cpu = torch.device("cpu")
    decoder = random_decoder(architecture, format="nvfp4", rank=8, device=cpu, seed=3, compute=compute)
    decoder.lm_head.weight.mul_(8)
    decoder.lm_head.pack(head)
    return decoder


def load(path, head, format="nvfp4", compute=torch.float32, resident=False):
    cpu = torch.device("cpu")
    return build_decoder(
        locate(str(path)).open(), format=format, compute=compute, device=cpu, resident=resident, head=head
    )


@pytest.mark.parametrize("chunk_rows", [128, 256, V])
@pytest.mark.parametrize("format", ["bf16", *PACKED])
def test_logits_are_those_of_the_decoded_weight(format, chunk_rows, rng, monkeypatch):
    monkeypatch.setattr(op, "_CHUNK_WEIGHTS", chunk_rows * D)
    weight_VD, hidden_TD = table(rng), torch.randn(7, D, generator=rng)
    head = head_of(weight_VD, format)
    decoded_VD = weight_VD if head.packed is None else head.packed.decode()
    logits_TV = head.logits(hidden_TD)
    assert logits_TV.dtype == torch.float32
    assert rms_error(logits_TV, hidden_TD.double() @ decoded_VD.double().T) < 1e-6
    assert rms_error(decoded_VD, weight_VD) < {"bf16": 1e-9, "fp8": 0.03, "nvfp4": 0.11}[format]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", PACKED)
def test_the_operand_is_the_packed_weight_exactly(format, compute, rng):
    head = head_of(table(rng, compute), format)
    assert head.operand().dtype == compute and head.operand().shape == (V, D)
    assert torch.equal(head.operand().float() * head.alpha, head.packed.decode())


def test_where_the_decode_kernels_run_nvfp4_is_in_their_tiles(rng, monkeypatch):
    weight_VD, hidden_TD = table(rng, torch.bfloat16), torch.randn(7, D, generator=rng).bfloat16()
    plain = head_of(weight_VD, "nvfp4")
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: True)
    monkeypatch.setattr(op, "_CHUNK_WEIGHTS", 256 * D)
    tiled = head_of(weight_VD, "nvfp4")
    assert isinstance(plain.packed, NVFP4) and isinstance(tiled.packed, PackedNVFP4)
    assert torch.equal(unpack(tiled.packed.group.tiles)[0], plain.packed.codes)
    assert torch.equal(tiled.packed.group.factors_N, row_factors(plain.packed.alpha, V))
    assert torch.equal(tiled.logits(hidden_TD), plain.logits(hidden_TD))
    assert isinstance(head_of(weight_VD.float(), "nvfp4").packed, NVFP4)


@pytest.mark.parametrize("width", [192, 320])
@pytest.mark.parametrize("format", ["fp8", "nvfp4", "tiles"])
def test_rows_are_padded_with_zeros_to_what_the_decode_kernel_reads(format, width, rng, monkeypatch):
    """As gpt-oss's 2,880 weights to 2,944: no number changes."""
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: format == "tiles")
    weight_VD = torch.randn(V, width, generator=rng).mul_(0.1).bfloat16()
    head = head_of(weight_VD, "fp8" if format == "fp8" else "nvfp4")
    exact = FP8.encode_exact(weight_VD) if format == "fp8" else NVFP4.encode(weight_VD)
    padded = op.packed_width(width)
    assert padded == {192: 256, 320: 384}[width] and head.packed.shape == (V, padded)
    assert torch.equal(head.operand(), exact.operand(torch.bfloat16)) and head.alpha == exact.alpha.item()
    assert not head.packed.operand(torch.bfloat16)[:, width:].any()
    hidden_TD = torch.randn(7, width, generator=rng).bfloat16()
    logits_TV = head.logits(hidden_TD)
    assert rms_error(logits_TV, hidden_TD.double() @ exact.decode().double().T) < 1e-5
    settings = {"temperature": 1 / head.alpha, "chunk_tokens": 4}
    got_T, _ = chunked_logprob(hidden_TD, head.sliced_operand(), torch.arange(7), **settings)
    assert rms_error(got_T, logits_TV.log_softmax(-1)[range(7), range(7)]) < 1e-5


@pytest.mark.parametrize("format", ["fp8", "nvfp4", "tiles"])
def test_the_learner_unpacks_a_slice_of_the_head_at_a_time(format, rng, monkeypatch):
    """704 rows in slices of 256, each once for all chunks of tokens, with the values of the whole operand."""
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: format == "tiles")
    monkeypatch.setattr(head_operand, "_MAX_UNPACKED", 256 * D)
    head = head_of(table(rng, torch.bfloat16), "fp8" if format == "fp8" else "nvfp4")
    assert isinstance(head.packed, PackedNVFP4) == (format == "tiles")
    unpack_rows, unpacked = op._operand_rows, []
    monkeypatch.setattr(op, "_operand_rows", lambda *args: unpacked.append(args[1]) or unpack_rows(*args))
    targets_T, weights_T = torch.randint(V, (9,), generator=rng), torch.randn(9, generator=rng)
    hidden_TD = torch.randn(9, D, generator=rng).bfloat16().requires_grad_()
    settings = {"temperature": 0.7 / head.alpha, "chunk_tokens": 4}
    truth = reference(hidden_TD, head.operand(), targets_T, temperature=0.7 / head.alpha)
    results = [
        chunked_logprob(hidden_TD, each, targets_T, **settings)
        for each in (head.operand(), head.sliced_operand())
    ]
    assert unpacked == [slice(0, 256), slice(256, 512), slice(512, 704)]
    grads = [torch.autograd.grad(r[0], hidden_TD, weights_T.to(r[0].dtype))[0] for r in (truth, *results)]
    for want, other, mine in zip(
        (*truth, grads[0]), (*results[0], grads[1]), (*results[1], grads[2]), strict=True
    ):
        assert rms_error(mine, want) <= max(1.1 * rms_error(other, want), 5 * 2**-23)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", PACKED)
def test_a_resident_head_has_the_same_numbers(format, compute, rng):
    hidden_TD = torch.randn(7, D, generator=rng).to(compute)
    packed, resident = (head_of(table(rng.manual_seed(1), compute), format) for _ in range(2))
    resident.make_resident()
    assert resident.operand() is resident.operand() is resident.sliced_operand()
    assert rms_error(resident.logits(hidden_TD), packed.logits(hidden_TD)) < 1e-6


@pytest.mark.parametrize(("format", "bytes_per_weight"), [("fp8", 1 + 4 / 128**2), ("nvfp4", 0.5625)])
def test_an_untied_heads_full_weight_is_freed_and_a_tied_ones_is_the_embeddings(format, bytes_per_weight):
    packed_bytes = math.ceil(SMALL.vocab_size * SMALL.width * bytes_per_weight)
    for tied, freed_bytes in ((True, 0), (False, 4 * SMALL.vocab_size * SMALL.width)):
        before, after = with_head("bf16", tied=tied), with_head(format, tied=tied)
        assert after.lm_head.weight is None
        assert torch.equal(after.embed_tokens.weight, before.embed_tokens.weight)
        assert after.num_bytes - before.num_bytes == pytest.approx(packed_bytes - freed_bytes, abs=4)
        decoded_VD = after.lm_head.packed.decode()
        assert 0 < rms_error(decoded_VD, before.lm_head.weight) < 0.11


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", PACKED)
def test_the_sampler_and_the_learner_have_the_same_policy(format, tied):
    """In fp32 they differ by rounding alone, where another head would make them differ by 0.01 and more."""
    decoder = with_head(format, tied=tied)
    engine = engine_of(decoder, stop_token_ids=frozenset())
    prompts_P = prompts_of(9, 5, 30)
    config = RunConfig(num_prompts=3, num_generations=4, sample=SampleConfig(max_tokens=12, temperature=0.8))
    for sampling in ({}, {"top_k": SMALL.vocab_size}):
        samples = drawn(engine, prompts_P, num_samples=4, temperature=0.8, **sampling)
        groups = [
            Group(
                prompt=prompt,
                samples_G=[
                    dataclasses.replace(s, reward=1.0, advantage=1.0 - g % 2 * 2)
                    for g, s in enumerate(samples[4 * p : 4 * p + 4])
                ],
            )
            for p, prompt in enumerate(prompts_P)
        ]
        metrics = Learner(decoder, config).step(groups)
        assert metrics["mismatch_max"] < 2e-5
        engine.publish(1)
    full = with_head("bf16", tied=tied)
    truth_T = packed_logprobs(full, prompts_P[0], samples[0], 0.8).gather(
        1, torch.tensor(samples[0].tokens_T)[:, None]
    )
    assert (truth_T[:, 0] - torch.tensor(samples[0].logprobs_T)).abs().max() > 1e-3


@pytest.mark.parametrize("format", PACKED)
def test_the_gradient_is_that_of_the_decoded_weight(format, rng):
    head, targets_T = head_of(table(rng), format), torch.arange(7) * 31
    grads = []
    for operand_VD, alpha in ((head.operand(), head.alpha), (head.packed.decode(), 1.0)):
        hidden_TD = torch.randn(7, D, generator=rng.manual_seed(2)).requires_grad_()
        logprob_T, _ = chunked_logprob(
            hidden_TD, operand_VD, targets_T, temperature=0.7 / alpha, chunk_tokens=3
        )
        logprob_T.sum().backward()
        grads.append(hidden_TD.grad)
    assert rms_error(*grads) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("format", "kind"), [("fp8", FP8), ("nvfp4", NVFP4)])
def test_a_checkpoints_head_is_packed_when_it_is_loaded(tmp_path, format, kind, resident, tied):
    save_tiny(tmp_path, hidden_size=128, tie_word_embeddings=tied)
    full = load(tmp_path, "bf16")
    packed = load(tmp_path, format, resident=resident)
    assert isinstance(packed.lm_head.packed, kind) and packed.lm_head.weight is None
    assert (packed.lm_head.operand() is packed.lm_head.operand()) == resident
    encode = FP8.encode_exact if format == "fp8" else NVFP4.encode
    assert torch.equal(packed.lm_head.packed.decode(), encode(full.lm_head.weight).decode())
    assert torch.equal(packed.embed_tokens.weight, full.embed_tokens.weight)
    full.lm_head.pack(format)
    assert rms_error(logits_of(packed, TOKENS), logits_of(full, TOKENS)) < 1e-6


def test_a_checkpoints_packed_head_is_taken_as_it_is_by_its_own_format_alone(tmp_path):
    save_tiny(tmp_path / "float", hidden_size=128)
    write_quantized(str(tmp_path / "float"), tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    weight = NVFP4.encode(tensors.pop("lm_head.weight") * 1.01)
    scale = weight.global_scale / 1.3  # as nobody here would choose it
    tensors |= {"lm_head.weight_packed": weight.codes, "lm_head.weight_scale": weight.scales}
    save_file(tensors | {"lm_head.weight_global_scale": scale}, file)
    decoded = NVFP4(weight.codes, weight.scales, scale).decode()
    kept, full, fp8 = (load(tmp_path / "packed", head).lm_head for head in ("nvfp4", "bf16", "fp8"))
    assert torch.equal(kept.packed.codes, weight.codes) and torch.equal(kept.packed.global_scale, scale)
    assert full.packed is None and torch.equal(full.weight, decoded)
    assert torch.equal(fp8.packed.decode(), FP8.encode_exact(decoded).decode())


@pytest.mark.parametrize(
    ("head", "vocab_size", "width", "says"),
    [
        (
            "nvfp4",
            320,
            72,
            "nvfp4 needs a vocabulary that is a multiple of 64 and a width that is a multiple of",
        ),
        ("nvfp4", 97, 128, "the model has 97 tokens and width 128"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_weights_are_read(
    tmp_path, head, vocab_size, width, says
):
    save_tiny(tmp_path, hidden_size=width, vocab_size=vocab_size)
    (tmp_path / "model.safetensors").rename(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole")
    save_file({name: t * math.nan for name, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        load(tmp_path, head)
    assert str(caught.value).startswith(f"{tmp_path}: model.head_format: {head}") and says in str(
        caught.value
    )
    architecture = dataclasses.replace(SMALL, vocab_size=vocab_size, width=width)
    with pytest.raises(UserError, match=f"model.head_format: {head}"):
        random_decoder(architecture, format="nvfp4", rank=8, device=torch.device("cpu"), seed=0, head=head)
