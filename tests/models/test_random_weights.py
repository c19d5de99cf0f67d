"""Random decoders have the shape, the formats and the scale of real ones."""

import dataclasses
import math

import pytest
import torch

from bench.shapes import TINY
from models.tiny import logits_of
from qerl.errors import UserError
from qerl.formats import NVFP4
from qerl.models.random_weights import SHAPES, random_decoder, random_mxfp4, random_nvfp4, shape


def made(format="nvfp4", rank=8, seed=0, architecture=TINY):
    cpu = torch.device("cpu")
    return random_decoder(architecture, format=format, rank=rank, device=cpu, seed=seed)


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("rank", [None, 8])
def test_a_forward_gives_logits_of_a_sane_size(format, rank):
    logits_TV = logits_of(made(format, rank), torch.tensor([3, 1, 4, 1, 5]))
    assert logits_TV.shape == (5, 97)
    assert 0.02 < logits_TV.std() < 2


def test_the_adapter_changes_what_comes_out():
    tokens_T = torch.tensor([3, 1, 4])
    with_adapter, decoder = made(), made()
    for _, linear in decoder.linears():
        linear.adapter_enabled = False
    assert not torch.equal(logits_of(with_adapter, tokens_T), logits_of(decoder, tokens_T))


def test_a_seed_names_the_weights():
    def codes(seed):
        return next(made(seed=seed).linears())[1].weight.codes

    assert torch.equal(codes(1), codes(1)) and not torch.equal(codes(1), codes(2))


@pytest.mark.parametrize("make", (random_nvfp4, random_mxfp4))
@pytest.mark.parametrize("k", (768, 1024, 2048, 2880, 4096))
def test_packed_weights_have_the_standard_deviation_of_a_fresh_layer(k, make):
    weight = make(512, k, torch.Generator().manual_seed(0))
    assert weight.scales.float().isfinite().all()
    assert weight.decode().std().item() * k**0.5 == pytest.approx(1, abs=0.01)


def test_queries_make_up_for_what_yarn_multiplies():
    yarn = dataclasses.replace(TINY.rope, kind="yarn", factor=32.0)
    plain, turned = (
        made("bf16", architecture=dataclasses.replace(TINY, rope=rope)).layers[0].self_attn
        for rope in (TINY.rope, yarn)
    )
    m = 0.1 * math.log(32) + 1
    q, q_turned = plain.q_proj.weight.weight.double(), turned.q_proj.weight.weight.double()
    assert torch.allclose(q_turned * m**2, q, rtol=2.0**-8, atol=0)
    assert torch.equal(plain.k_proj.weight.weight, turned.k_proj.weight.weight)


def test_an_untied_head_is_another_table_and_a_tied_one_the_same():
    tied, untied = made(architecture=dataclasses.replace(TINY, tied_head=True)), made()
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_head_holds_what_the_full_one_would(tied):
    architecture = dataclasses.replace(TINY, vocab_size=128, tied_head=tied)
    full, packed = (
        random_decoder(architecture, format="nvfp4", rank=8, device=torch.device("cpu"), seed=0, head=head)
        for head in ("bf16", "nvfp4")
    )
    assert torch.equal(packed.lm_head.packed.decode(), NVFP4.encode(full.lm_head.weight).decode())
    assert torch.equal(packed.embed_tokens.weight, full.embed_tokens.weight)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.135),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.54),
        ("qwen2.5-3b", 3.09),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-14b", 14.8),
        ("qwen2.5-32b", 32.8),
        ("qwen2.5-72b", 72.7),
        ("smollm2-360m", 0.362),
        ("smollm2-1.7b", 1.71),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.8),
        ("qwen3-32b", 32.8),
        ("llama-3.1-8b", 8.03),
        ("llama-3.2-1b", 1.24),
        ("llama-3.2-3b", 3.21),
        ("llama-3.3-70b", 70.6),
        ("mistral-7b-v0.3", 7.25),
        ("mistral-small-24b", 23.6),
    ],
)
def test_a_shape_has_as_many_weights_as_its_model_card_says(name, billions):
    a = shape(name)
    heads = (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_size
    tables = (1 if a.tied_head else 2) * a.vocab_size * a.width
    total = a.num_layers * a.width * (heads + 3 * a.ff_width) + tables
    assert total / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_small_qwens_have_the_smaller_vocabulary_and_one_table():
    qwens = {name: a for name, a in SHAPES.items() if name.startswith("qwen2.5")}
    small = {name for name, a in qwens.items() if a.tied_head and a.vocab_size == 151_936}
    assert small == {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"}
    assert {a.vocab_size for a in qwens.values() if not a.tied_head} == {152_064}


def test_every_linear_is_made_of_whole_tiles_of_64():
    for a in SHAPES.values():
        widths = (a.width, a.ff_width, a.num_heads * a.head_size, a.num_kv_heads * a.head_size)
        assert all(width % 64 == 0 for width in widths)


def test_an_unknown_shape_or_format_is_refused_by_name():
    with pytest.raises(UserError, match=r"unknown shape qwen2.5-8b; did you mean qwen2.5-7b"):
        shape("qwen2.5-8b")
    with pytest.raises(UserError, match="not in int4"):
        made(format="int4")
