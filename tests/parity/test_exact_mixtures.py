"""Exact mode of mixtures of experts on the PyTorch path, and a sample's independence of its batch."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.parts import VOCABULARY, engine_of, request_of
from learner.tiny import run_config
from parity.test_exact import SAMPLING, gap, groups_of, recorded, taught
from qerl.aqn.norm_noise import noised
from qerl.config import AlgoConfig, SampleConfig
from qerl.engine.decode.forward import TorchForward
from qerl.learner import Learner
from qerl.models.random_weights import SHAPES, random_decoder

SIZES = {
    "num_layers": 2,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 32,
    "ff_width": 64,
    "vocab_size": len(VOCABULARY),
}
LENGTHS, CPU = (9, 31, 1, 16), torch.device("cpu")


def policy(like="qwen3-30b-a3b", format="nvfp4", compute=torch.float32, expert_rank=2, device=CPU):
    """Return a small decoder of this kind of mixture, with adapters on attention and on the experts."""
    whole = SHAPES[like]
    mixture = replace(whole.mixture, num_experts=12, num_chosen=3, width=64)
    shape = replace(whole, **SIZES, layer_kinds=whole.layer_kinds[:2], mixture=mixture)
    decoder = random_decoder(
        shape, format=format, rank=4, device=device, seed=3, compute=compute, expert_rank=expert_rank
    )
    with torch.no_grad():
        decoder.embed_tokens.weight.mul_(50)
        decoder.lm_head.weight.mul_(8)
    return decoder


@pytest.mark.parametrize(
    ("like", "format", "compute", "settings"),
    [
        ("qwen3-30b-a3b", "nvfp4", torch.float32, {"block_size": 4, "max_num_seqs": 6}),
        ("gpt-oss-20b", "mxfp4", torch.bfloat16, {"max_num_seqs": 33}),
        ("gpt-oss-20b", "bf16", torch.float32, {"kv_cache_dtype": "fp8", "max_num_seqs": 20}),
        ("qwen3-30b-a3b", "bf16", torch.bfloat16, {"decode_steps_per_sync": 5, "max_num_seqs": 7}),
    ],
    ids=str,
)
def test_scores_of_a_mixture_are_what_was_recorded_to_the_bit(like, format, compute, settings):
    engine = engine_of(policy(like, format, compute), exact=True, **settings)
    groups = groups_of(engine, LENGTHS)
    assert gap(engine, groups) == 0
    with noised(engine._decoder.noise_table, sigma=0.05, unit="absolute", seed=0, step=1):
        assert gap(engine, groups_of(engine, LENGTHS)) == 0 < gap(engine, groups)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_neighbours_in_the_batch_change_no_bit_of_a_mixtures_sample(compute):
    engine = engine_of(policy(compute=compute), exact=True, max_num_seqs=20)
    together = groups_of(engine, LENGTHS)
    for group in together[::2]:
        (alone,) = engine.generate(request_of([group.prompt], num_samples=5, sampling=SAMPLING))
        assert alone == group  # tokens, logprobs and routes
        assert gap(engine, [group]) == 0


def test_products_of_one_shape_are_needed(monkeypatch):
    own = TorchForward.__init__

    def init(self, *rest, expert_rows, **options):
        own(self, *rest, **options)

    monkeypatch.setattr(TorchForward, "__init__", init)
    engine = engine_of(policy(), exact=True, max_num_seqs=20)
    assert 0 < gap(engine, groups_of(engine, LENGTHS)) < 1


@pytest.mark.parametrize("is_replayed", [True, False])
def test_the_learners_logprobs_of_a_mixture_are_the_engines_to_the_bit(is_replayed):
    decoder = policy("gpt-oss-20b", "mxfp4", torch.bfloat16)
    engine = engine_of(decoder, exact=True, max_num_seqs=16)
    sample = SampleConfig(max_tokens=16, temperature=0.7)
    config = replace(run_config(), sample=sample, algo=AlgoConfig(router_replay=is_replayed))
    learner = Learner(decoder, config, score=partial(engine.score, sampling=SAMPLING))
    for _ in range(2):
        metrics = learner.step(taught(groups_of(engine, LENGTHS)))
        assert metrics["mismatch_max"] == metrics["mismatch_kl"] == 0 < metrics["own_mismatch_max"]
        assert metrics["importance_weight_mean"] == 1 and metrics["grad_norm"] > 0
        engine.publish(learner.version)


def test_without_exact_mode_a_mixtures_tokens_and_routes_do_not_depend_on_the_batch():
    """Only the last bits of logprobs do: products of other numbers of rows."""
    engine = engine_of(policy(), max_num_seqs=20)
    together = groups_of(engine, LENGTHS)
    for group in together:
        (alone,) = engine.generate(request_of([group.prompt], num_samples=5, sampling=SAMPLING))
        for ours, theirs in zip(alone.samples_G, group.samples_G, strict=True):
            assert (ours.tokens_T, ours.routes) == (theirs.tokens_T, theirs.routes)
        assert (recorded([alone]) - recorded([group])).abs().max() < 256 * torch.finfo(torch.float32).eps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("like", "format"), [("qwen3-30b-a3b", "nvfp4"), ("gpt-oss-20b", "mxfp4")])
def test_on_a_gpu_scores_of_a_mixture_are_what_was_recorded_to_the_bit(like, format):
    decoder = policy(like, format, torch.bfloat16, expert_rank=4, device=torch.device("cuda"))
    engine = engine_of(decoder, exact=True, max_num_seqs=20, kernels="torch")
    assert engine.kernels == "torch"
    groups = groups_of(engine, LENGTHS)
    assert gap(engine, groups) == 0
    (alone,) = engine.generate(request_of([groups[1].prompt], num_samples=5, sampling=SAMPLING))
    assert alone == groups[1]
