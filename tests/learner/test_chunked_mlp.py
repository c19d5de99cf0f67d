"""The MLP of a recomputed layer in chunks of rows: what is learned is the same, and no chunk is larger."""

from dataclasses import replace

import pytest
import torch

from learner.samples import random_groups
from learner.test_activation_checkpointing import state
from learner.tiny import ADAPTER, VOCAB, run_config, tiny_decoder, tiny_learner
from qerl.formats import NVFP4
from qerl.kernels.pointwise import matmul_fp32
from qerl.kernels.pointwise.matmul_fp32 import CHUNK_ROWS
from qerl.learner import Learner
from qerl.learner.chunked_mlp import num_chunks
from qerl.learner.plan.memory import form_of
from qerl.models.decoder import Layer
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.peft.adapter import dropout_of

MODES = pytest.mark.parametrize("recompute", ["layer", "offload"])
_ROWS = 8


@pytest.fixture
def groups(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


@pytest.fixture
def fed(monkeypatch):
    """Make chunks small; return the numbers of rows that layers feed, as they come."""
    monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", _ROWS)
    feed, rows = Layer.feed, []

    def watched(self, h_TD, *rest):
        rows.append(len(h_TD))
        return feed(self, h_TD, *rest)

    monkeypatch.setattr(Layer, "feed", watched)
    return rows


@MODES
@pytest.mark.parametrize("algo", [{}, {"beta": 0.3}])
def test_chunks_change_nothing_but_rounding(recompute, algo, groups, fed):
    """Not a bit changes where a row of a product does not depend on the number of rows."""
    learn = {"max_tokens_per_microbatch": 60, "updates_per_step": 2}
    plain, ours = tiny_learner(algo, learn), tiny_learner(algo, learn | {"gradient_checkpointing": recompute})
    metrics = plain.step(groups)
    assert max(fed) > 2 * _ROWS
    fed.clear()
    assert ours.step(groups) == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert max(fed) == _ROWS
    torch.testing.assert_close(state(ours), state(plain), rtol=1e-4, atol=1e-6)


@MODES
def test_every_row_is_fed_twice_and_a_chunk_at_a_time(recompute, groups, fed):
    learner = tiny_learner(learn={"max_tokens_per_microbatch": 1000, "gradient_checkpointing": recompute})
    num_rows = int(learner.step(groups)["learn_tokens"])
    assert num_rows > 2 * _ROWS and max(fed) == _ROWS
    assert sum(fed) >= 2 * 2 * num_rows  # two layers; rows of prompts come on top


@pytest.mark.parametrize("kind", ["chunked", "few rows", "dropout", "full"])
def test_what_needs_all_rows_at_once_is_not_chunked(kind, groups, fed):
    adapter = replace(ADAPTER, dropout=0.1) if kind == "dropout" else ADAPTER
    decoder = tiny_decoder(adapter=adapter)
    layer = decoder.layers[0]
    assert isinstance(layer, Layer)
    if kind == "full":
        layer.mlp.up_proj.learn_weight()  # type: ignore[union-attr]
    linear_pass = LinearPass(dropout=dropout_of(decoder, 0.1, 3)) if kind == "dropout" else PLAIN
    num_rows = _ROWS if kind == "few rows" else 3 * _ROWS + 1
    assert num_chunks(layer, num_rows, linear_pass) == (4 if kind == "chunked" else 1)


@pytest.mark.parametrize("adapter", [{}, {"dropout": 0.1}, {"kind": "full"}])
def test_the_plan_knows_what_is_chunked(adapter, fed):
    config = replace(run_config(), adapter=replace(ADAPTER, **adapter))
    decoder = tiny_decoder()
    layer = decoder.layers[0]
    assert isinstance(layer, Layer)
    if adapter.get("kind") == "full":
        layer.mlp.up_proj.learn_weight()  # type: ignore[union-attr]
    linear_pass = LinearPass(dropout=dropout_of(decoder, adapter.get("dropout", 0), 3))
    rows = CHUNK_ROWS + 1
    assert form_of(config).is_chunked(tiny_decoder().architecture, rows) is (
        num_chunks(layer, rows, linear_pass) > 1
    )
    assert not form_of(config).is_chunked(tiny_decoder().architecture, CHUNK_ROWS)


def test_operands_are_unpacked_once_for_all_chunks(groups, fed, monkeypatch):
    """As often as without chunks: once forwards, once for the second pass and the input's gradient."""
    counts = []
    for rows in (_ROWS, 10_000):
        monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", rows)
        decoder, calls = tiny_decoder(), []
        for _, linear in decoder.linears():
            linear.load_weight(NVFP4.encode(linear.weight.decode()))  # type: ignore[union-attr]
        operand = NVFP4.operand
        with monkeypatch.context() as patch:
            patch.setattr(
                NVFP4, "operand", lambda self, dtype, c=calls, f=operand: c.append(1) or f(self, dtype)
            )
            learn = {"max_tokens_per_microbatch": 1000, "gradient_checkpointing": "layer"}
            Learner(decoder, run_config(learn=learn)).step(groups)
        counts.append(len(calls))
    assert counts[0] == counts[1] == 14 + 14


def test_sums_over_chunks_are_the_product(monkeypatch, rng):
    monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", 5)
    a_TM, b_TN = (torch.randn(23, n, generator=rng, dtype=torch.float32) for n in (3, 4))
    torch.testing.assert_close(matmul_fp32.summed(a_TM, b_TN, 0.5), 0.5 * a_TM.T @ b_TN)
    assert matmul_fp32.row_chunks(11) == [slice(0, 5), slice(5, 10), slice(10, 11)]
