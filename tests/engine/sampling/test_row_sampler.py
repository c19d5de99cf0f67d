"""Who draws which row of a batch of requests; a head's definition in float64 is in place of its kernels."""

import pytest
import torch

from engine.parts import prompts_of
from qerl.engine.sampling.row_sampler import FusedRowSampler, RowSampler
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.head import head_sample as op
from qerl.types import Sampling

V, D, NONE = 96, 32, torch.tensor([-1], dtype=torch.int32)
CASES = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1.0, "is_even": True},
    {"temperature": 0.0, "top_k": 5},
    {"temperature": 0.8, "num_top": 3},
    {"temperature": 0.0, "num_top": 2, "is_even": True},
    {"temperature": 1.0, "min_p": 0.2},
)
UNFUSED = {1, 4, 7, 8}


class ReferenceHead:
    """HeadSample by its definition."""

    def __init__(self, weight_VD):
        self._weight_VD = weight_VD

    def logits(self, hidden_MD):
        return op.reference_logits(hidden_MD, self._weight_VD).float()

    def draw(self, hidden_MD, keys_M, positions_M, temperatures):
        some = temperatures[: len(hidden_MD)]
        tokens_M, logprobs_M, _ = op.reference(hidden_MD, self._weight_VD, keys_M, positions_M, some)
        return tokens_M.int(), logprobs_M.float()

    def step(self, hidden_MD, state, stop_tokens, temperatures):
        M = len(hidden_MD)
        drawn = self.draw(hidden_MD, state.keys_B[:M], state.positions_B[:M], temperatures)
        state.advance(*drawn, stop_tokens)


class EvenTokens:
    is_complete = False

    def accept(self, token):
        assert token % 2 == 0

    def allowed_V(self):
        return torch.arange(V) % 2 == 0


def sample_of(index, *, num_top=0, is_even=False, **how):
    (prompt,) = prompts_of(5, first_index=index)
    group = LiveGroup(index=index, prompt=prompt, coordinates=(0, 0, index), prompt_tokens=5, max_tokens=9)
    group.sampling, group.num_top_logprobs = Sampling(max_tokens=9, **how), num_top
    return LiveSample(group=group, sample_index=0, constraint=EvenTokens() if is_even else None)


@pytest.fixture
def head(rng):
    return ReferenceHead(torch.randn(V, D, generator=rng) / 2)


@pytest.fixture
def hidden(rng):
    return torch.randn(len(CASES), D, generator=rng)


def fused(head):
    return FusedRowSampler(head, head, NONE, max_rows=16)


def keys_of(sampler, samples):
    return torch.tensor([sampler.key((0, 0, s.group.index, 0), 5) for s in samples])


def drawn(sampler, hidden, samples):
    sampler.bind(samples)
    positions = torch.full((len(samples),), 4, dtype=torch.int32)
    tokens, logprobs = sampler.sample(hidden, keys_of(sampler, samples), positions)
    return list(zip(tokens.tolist(), logprobs.tolist(), [s.top_logprobs for s in samples], strict=True))


def samples_of(indices):
    return [sample_of(i, **CASES[i]) for i in indices]


def test_a_row_is_drawn_alike_alone_and_beside_all_others(head, hidden):
    everything = range(len(CASES))
    together = drawn(sampler := fused(head), hidden, samples_of(everything))
    assert [drawn(sampler, hidden[[i]], samples_of([i]))[0] for i in everything] == together
    order = [8, 3, 1, 0, 6, 2, 7, 5, 4]
    assert drawn(sampler, hidden[order], samples_of(order)) == [together[i] for i in order]


def test_the_rest_is_drawn_as_without_the_fused_head(head, hidden):
    everything = range(len(CASES))
    together = drawn(fused(head), hidden, samples_of(everything))
    by_logits = drawn(RowSampler(head, NONE, 16), hidden, samples_of(everything))
    assert {i for i in everything if together[i] == by_logits[i]} >= UNFUSED
    assert together[2][0] == by_logits[2][0] and together[5][0] == by_logits[5][0]  # greedy
    assert [len(top) for _, _, top in together] == [0] * 6 + [3, 2, 0]
    tops = torch.tensor([together[6][2], by_logits[6][2]], dtype=torch.float64)
    assert torch.allclose(tops[0], tops[1], atol=1e-5)
    assert together[4][0] % 2 == together[7][0] % 2 == 0


def test_only_rows_that_need_the_host_keep_a_step_out_of_a_graph(head):
    sampler = fused(head)
    for i, case in enumerate(CASES):
        sampler.bind([sample_of(0), sample_of(i, **case)])
        assert sampler.num_unfused_rows == (i in UNFUSED)
        assert sampler.is_capturable == (i not in UNFUSED and "num_top" not in case)


@pytest.mark.parametrize("indices", [(0, 2, 3), (0, 1, 2, 4)])
def test_a_step_draws_what_sample_does(head, hidden, indices):
    samples, hidden = samples_of(indices), hidden[list(indices)]
    expected = drawn(sampler := fused(head), hidden, samples)
    state = DecodeState.empty(len(samples) + 2, 4, 2, "cpu")
    B = len(samples)
    state.positions_B[:B], state.ends_B[:B], state.keys_B[:B] = 4, 9, keys_of(sampler, samples)
    sampler.step(torch.cat((hidden, hidden[:2])), state)
    assert state.drawn_tokens_WB[0].tolist() == [token for token, *_ in expected] + [0, 0]
    assert state.positions_B.tolist() == [5] * B + [-1, -1] and state.place_1.item() == 1
