from dataclasses import replace

import pytest
import torch

from engine.parts import drawn, engine_of, prompts_of
from learner.samples import random_groups
from learner.tiny import VOCAB, run_config, tiny_decoder
from models.tiny import logits_of, tiny
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.formats import FORMATS
from qerl.learner import Learner
from qerl.models.packed.packed_linear import PackedTiles
from qerl.models.peft.adapter import adapter_off, adapter_tensors, add_adapter, publish
from qerl.models.random_weights import SHAPES, random_decoder
from qerl.models.sampler_copy import make_sampler_copy

TOKENS_T = torch.arange(30) * 11 % 61
WIDE = replace(
    SHAPES["qwen2.5-0.5b"], num_layers=2, width=256, num_heads=4, num_kv_heads=2, ff_width=256, vocab_size=64
)


def policies(format="int8"):
    decoder = tiny("Qwen3")
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    return decoder, make_sampler_copy(decoder, format)


@pytest.mark.parametrize("format", ["fp8", "fp8-flow", "int8"])
def test_the_copys_linears_are_the_learners_quantized_and_the_learners_stay(format):
    decoder, twin = policies(format)
    before = logits_of(tiny("Qwen3"), TOKENS_T)
    assert torch.equal(logits_of(decoder, TOKENS_T), before)
    assert 1e-4 < (logits_of(twin, TOKENS_T) - before).abs().max() < 3
    for (name, own), (other, theirs) in zip(decoder.linears(), twin.linears(), strict=True):
        assert name == other and theirs.weight.name == format and own.weight.name == "bf16"
        assert torch.equal(theirs.weight.decode(), FORMATS[format].encode(own.weight.decode()).decode())


@pytest.mark.parametrize(("format", "is_tiled"), [("fp8", True), ("fp8-flow", False), ("int8", True)])
def test_where_kernels_read_tiles_the_copys_weights_are_in_tiles(format, is_tiled, monkeypatch):
    settings = {"rank": 4, "device": torch.device("cpu"), "seed": 0}
    decoder = random_decoder(WIDE, format="bf16", **settings)
    plain = logits_of(make_sampler_copy(decoder, format), TOKENS_T)
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: True)
    twin = make_sampler_copy(decoder, format)
    kinds = [isinstance(linear.weight, PackedTiles) for _, linear in twin.linears()]
    assert kinds == [is_tiled] * len(kinds) and torch.equal(logits_of(twin, TOKENS_T), plain)
    assert all(linear.weight.name == "bf16" for _, linear in decoder.linears())


def test_all_but_the_weights_is_one():
    decoder, twin = policies()
    assert {t.data_ptr() for t in twin.buffers()} == {t.data_ptr() for t in decoder.buffers()}
    assert list(map(id, adapter_tensors(twin).values())) == list(map(id, adapter_tensors(decoder).values()))
    alone = logits_of(twin, TOKENS_T)
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    publish(decoder)
    learned = logits_of(twin, TOKENS_T)
    assert (learned - alone).abs().max() > 0.1
    with adapter_off(decoder):  # the learner's reference policy, of which the sampler knows nothing
        assert torch.equal(logits_of(twin, TOKENS_T), learned)


def test_noise_of_the_learners_norms_is_the_samplers():
    decoder, twin = policies()
    quiet = logits_of(twin, TOKENS_T)
    decoder.noise_table.open("sample", 3)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=0):
        samples = drawn(engine_of(twin), prompts_of(9, 4))
        assert decoder.noise_table.num_drawn == 3
    assert [s.tokens_T for s in samples] != [s.tokens_T for s in drawn(engine_of(twin), prompts_of(9, 4))]
    assert torch.equal(logits_of(twin, TOKENS_T), quiet)


def test_a_mismatch_shows_by_token_by_quarter_and_by_sample():
    """d = 0.01 and, in the last quarter, 0.05: by hand, at samples of four tokens."""
    groups = random_groups(2, 2, vocab=VOCAB, rng=torch.Generator().manual_seed(0))
    for group in groups:
        for i, s in enumerate(group.samples_G):
            group.samples_G[i] = replace(s, tokens_T=[1, 2, 3, 4], logprobs_T=[0.0] * 4, advantage=0.0)
    learner = Learner(tiny_decoder(), run_config())
    found = [reading.logprob_C for share in _shares(groups, learner) for reading in learner._read(share)]
    values = iter(torch.cat(found).tolist())
    for group in groups:
        for s in group.samples_G:
            s.logprobs_T[:] = [next(values) - d for d in (0.01, 0.01, 0.01, 0.05)]
    metrics = learner.step(groups)
    assert metrics["mismatch_early"] == pytest.approx(0.01, abs=1e-5)
    assert metrics["mismatch_late"] == pytest.approx(0.05, abs=1e-5)
    assert metrics["mismatch_sample"] == pytest.approx(0.08, abs=1e-5)
    assert metrics["mismatch_abs"] == pytest.approx(0.02, abs=1e-5)


def _shares(groups, learner):
    from qerl.learner.minibatch import split

    return [share.without_gradient for share in split(groups, learner.config, device=learner.decoder.device)]
