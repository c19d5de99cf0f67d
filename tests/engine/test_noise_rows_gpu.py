"""Noise per sample in the decode kernels: the norm reads each row's noise, in CUDA graphs too."""

from dataclasses import replace

import pytest
import torch

from engine.decode.test_decode_kernels import NEVER, decoder_of, small_prompts
from engine.decode.test_decode_kernels import pytestmark as pytestmark
from engine.parts import drawn, engine_of
from learner.tiny import run_config
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.kernels.attention.decode_state import DecodeState
from qerl.learner import Learner
from qerl.types import Group

NOISE = {"unit": "absolute", "seed": 0, "step": 1}


@pytest.mark.parametrize("rank", [None, 16])
def test_a_replayed_graph_is_the_eager_step_bit_for_bit(rank):
    decoder = decoder_of(rank=rank)
    decoder.noise_table.open("sample", 4)
    engine = engine_of(decoder, stop_token_ids=NEVER)
    with noised(decoder.noise_table, sigma=0.1, **NOISE):
        drawn(engine, small_prompts(20), num_samples=2, max_tokens=4)
        runner = next(iter(engine._runners._runners.values()))
        forward, state = runner._forward, DecodeState.empty(8, runner._state.tables_BX.shape[1], 1, "cuda")
        state.positions_B.zero_()
        state.tables_BX[:, 0] = torch.arange(8)
        decoder.noise_table.rows([(0, range(4))])

        def hidden(rows):
            state.noise_rows_B.copy_(torch.tensor(rows, dtype=torch.int32))
            state.tokens_B.fill_(7)
            return forward(state, 8).clone()

        with torch.no_grad(), engine._cache.present():
            hidden([0] * 8)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = forward(state, 8)
            for rows in ([0, 1, 2, 3, 4, 3, 2, 0], [4, 4, 1, 0, 2, 2, 3, 1]):
                eager = hidden(rows)
                graph.replay()
                assert torch.equal(recorded, eager)
                for a in range(8):
                    for b in range(a):
                        assert torch.equal(eager[a], eager[b]) == (rows[a] == rows[b])


@pytest.mark.parametrize("per", ["group", "sample"])
def test_the_learners_kernels_read_each_sample_under_the_noise_it_was_drawn_with(per):
    """As far from the sampler as without noise, where both have it; and five times as far where one has."""
    decoder, prompts_P = decoder_of(), small_prompts(9, 31, 16, 130)
    decoder.noise_table.open(per, 4)
    config = run_config(adapter=AdapterConfig(rank=16))
    found = {}
    for name, sampler, learner in (("none", 0, 0), ("both", 0.1, 0.1), ("sampler", 0.1, 0)):
        with noised(decoder.noise_table, sigma=sampler, **NOISE):
            engine = engine_of(decoder, stop_token_ids=NEVER)
            samples = drawn(engine, prompts_P, num_samples=4, max_tokens=30)
        samples = [replace(s, reward=float(i % 4), advantage=i % 4 - 1.5) for i, s in enumerate(samples)]
        groups = [Group(prompt=p, samples_G=samples[4 * i : 4 * i + 4]) for i, p in enumerate(prompts_P)]
        with noised(decoder.noise_table, sigma=learner, **NOISE):
            found[name] = Learner(decoder, config).step(groups)["mismatch_abs"]
    assert found["both"] < 1.5 * found["none"] and found["sampler"] > 5 * found["none"], found
