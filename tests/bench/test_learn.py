"""The learner's benchmark on a tiny decoder."""

import dataclasses
import functools
import json

import pytest
import torch

from bench.rows import CPU, rows_of
from bench.shapes import TINY
from bench.test_record import ORIGIN
from qerl.bench import learn
from qerl.bench.options import BenchLearnOptions
from qerl.cost.weights import num_active_params
from qerl.errors import UserError
from qerl.kernels.attention import flash_attention_4
from qerl.models import mixture
from qerl.models.random_weights import SHAPES, random_decoder

OPTIONS = BenchLearnOptions(
    tokens=64,
    sequence_tokens=16,
    recomputes=("none", "layer"),
    micro_batches=(1, 4),
    lora_rank=16,
    runs=1,
)
MIXTURE = dataclasses.replace(
    SHAPES["qwen3-30b-a3b"],
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=97,
    layer_kinds=SHAPES["qwen3-30b-a3b"].layer_kinds[:2],
    mixture=dataclasses.replace(SHAPES["qwen3-30b-a3b"].mixture, num_experts=8, num_chosen=4, width=64),
)


def case(**changes):
    given = {"shape": "qwen2.5-7b", "provider": "qerl-nvfp4", "lora_rank": 16, "recompute": "none"}
    return learn.LearnCase(**(given | {"tokens": 64, "sequence_tokens": 16, "micro_tokens": 32} | changes))


def test_each_case_is_a_row_that_is_printed(tmp_path, capsys):
    rows = rows_of(tmp_path, lambda rows: learn.measure_cases(OPTIONS, TINY, CPU, rows))
    shown = [(r["provider"], r["recompute"], r["micro_tokens"]) for r in rows]
    assert shown == [
        (provider, recompute, micro_tokens)
        for provider in ("qerl-nvfp4", "qerl-bf16")
        for recompute in ("none", "layer")
        for micro_tokens in (64, 16)
    ]
    assert all(r["tok_per_s"] > 0 and r["step_s"] > 0 and "error" not in r for r in rows)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_what_is_lacking_is_a_row_that_says_so(tmp_path, monkeypatch):
    def lacks_memory(case, decoder, runs):
        if case.recompute == "none":
            raise RuntimeError("CUDA out of memory. Tried\nto")
        return {"tok_per_s": 1.0}

    monkeypatch.setattr(learn, "measure_case", lacks_memory)
    rows = rows_of(tmp_path, lambda rows: learn.measure_cases(OPTIONS, TINY, CPU, rows))
    assert [r.get("error") for r in rows[:3]] == ["RuntimeError: CUDA out of memory. Tried"] * 2 + [None]


def test_utilisation_counts_a_forward_pass_that_is_repeated():
    """7.07e9 weights: 4 x 7.07e9 x 14,000 / 790e12 = 0.501."""
    a = SHAPES["qwen2.5-7b"]
    assert num_active_params(a) == 28 * 233_046_016 + 152_064 * 3584
    plain = learn.make_row(case(), a, {"tok_per_s": 14_000.0}, ORIGIN)
    again = learn.make_row(case(recompute="layer"), a, {"tok_per_s": 14_000.0}, ORIGIN)
    assert plain["mfu"] == pytest.approx(0.501, abs=1e-3) and again["mfu"] == pytest.approx(0.752, abs=1e-3)
    assert learn.make_row(case(), a, {"error": "x"}, ORIGIN)["mfu"] is None


def test_a_sequence_has_as_many_rows_as_it_says():
    decoder = random_decoder(TINY, format="bf16", rank=16, device=CPU, seed=0)
    groups = learn.random_groups(3, 16, decoder)
    assert [len(g.prompt.tokens_T) + len(g.samples_G[0].tokens_T) - 1 for g in groups] == [16] * 3
    assert len({tuple(g.samples_G[0].tokens_T) for g in groups}) == 3


def test_samples_of_a_rollout_have_its_lengths_and_share_their_prompts(tmp_path, monkeypatch):
    short = dataclasses.replace(learn.LENGTHS, median_tokens=6, max_tokens=20)
    monkeypatch.setattr(learn, "LENGTHS", short)
    options = dataclasses.replace(OPTIONS, num_samples=16, micro_tokens=(400, 800), recomputes=("none",))
    held = []
    monkeypatch.setattr(learn, "would_hold_operands", lambda *given: held.append(given[2]) or True)
    rows = rows_of(tmp_path, lambda rows: learn.measure_cases(options, TINY, CPU, rows))
    groups = learn.rollout_groups(16, TINY.vocab_size)
    lengths = [len(sample.tokens_T) for group in groups for sample in group.samples_G]
    assert lengths == short.of(16) and max(lengths) > 2 * min(lengths)
    assert [len(group.prompt.tokens_T) for group in groups] == [256, 256]
    packed = 2 * 256 + sum(lengths) - 16
    shown = [(r["num_samples"], r["tokens"], r["micro_tokens"], r["used_micro_tokens"]) for r in rows]
    assert shown == 2 * [(16, packed, 400, 400), (16, packed, 800, 800)]
    assert held == 4 * [256] and all(row["holds_operands"] and row["tok_per_s"] > 0 for row in rows)


def test_samples_of_a_mixture_have_no_routes_to_replay(monkeypatch):
    monkeypatch.setattr(learn, "cuda_device", lambda: CPU)
    with pytest.raises(UserError, match="num_samples needs a model without experts, and qwen3-30b-a3b has"):
        learn.bench(BenchLearnOptions(shape="qwen3-30b-a3b", num_samples=8))


def test_an_update_of_a_mixture_replays_routes_and_says_so(monkeypatch):
    decoder = random_decoder(MIXTURE, format="mxfp4", rank=16, device=CPU, seed=0)
    (group, *_) = learn.random_groups(2, 16, decoder)
    ids_TLK = torch.frombuffer(bytearray(group.samples_G[0].routes), dtype=torch.uint8).view(16, 2, 4).int()
    assert (ids_TLK.diff(dim=-1) > 0).all() and set(ids_TLK.flatten().tolist()) == set(range(8))
    monkeypatch.setattr(mixture, "sort_rows", lambda *_: pytest.fail("routes are not replayed"))
    sizes = {"tokens": 32, "sequence_tokens": 16, "micro_tokens": 32, "recompute": "layer"}
    figures = learn.measure_case(case(**sizes), decoder, 1)
    assert figures["replayed_routes"]


def test_sequences_and_splits_must_come_out_even():
    with pytest.raises(UserError, match="multiple of micro_batches x sequence_tokens, got 8192 for 8 x 2048"):
        BenchLearnOptions(micro_batches=(1, 8))
    BenchLearnOptions(micro_batches=(1, 8), sequence_tokens=1024)


def test_a_row_names_the_flash_attention_that_was_imported(monkeypatch):
    assert flash_attention_4.version_used() == 2
    asked = functools.cache(lambda: len)
    monkeypatch.setattr(flash_attention_4, "_function", asked)
    assert flash_attention_4.version_used() == 2  # there, but nothing has asked for it
    asked()
    row = learn.measure_case(case(), random_decoder(TINY, format="bf16", rank=16, device=CPU, seed=0), 1)
    assert row["flash_attention"] == 4
