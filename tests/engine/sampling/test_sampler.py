import pytest
import torch

from engine.parts import prompts_of
from models.tiny import tiny
from qerl.algo.seeds import uniform
from qerl.engine.sampling.sampler import TorchSampler
from qerl.kernels.attention.decode_state import DecodeState
from qerl.types import Sampling

NONE = torch.tensor([-1], dtype=torch.int32)


def state_of(positions, ends, steps=2):
    state = DecodeState.empty(len(positions) + 1, 4, steps, "cpu")
    B = len(positions)
    state.positions_B[:B] = torch.tensor(positions, dtype=torch.int32)
    state.ends_B[:B] = torch.tensor(ends, dtype=torch.int32)
    state.tokens_B[:B] = 50
    return state


def test_a_draw_takes_the_uniform_of_its_coordinates():
    decoder = tiny()
    draw = TorchSampler(decoder, Sampling(max_tokens=3), NONE)
    coordinates, prompt_tokens, drawn = (5, 2, 1, 4), 9, 6
    hidden_1D = torch.randn(1, decoder.architecture.width)
    keys = torch.tensor([draw.key(coordinates, prompt_tokens)])
    token, _ = draw.sample(hidden_1D, keys, torch.tensor([prompt_tokens - 1 + drawn]))
    p_V = decoder.logits(hidden_1D).softmax(-1)[0].double().cumsum(0)
    expected = torch.searchsorted(p_V, uniform(*coordinates, drawn) * p_V[-1], right=True)
    assert token.item() == expected.item()


def test_rows_move_on_and_end_at_a_stop_token_or_their_last_position():
    state = state_of([3, 3, -1, 7], [10, 10, 10, 8])
    state.advance(torch.tensor([11, 12, 13, 14]), torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([12]))
    assert state.positions_B.tolist() == [4, -1, -1, -1, -1]
    assert state.drawn_tokens_WB[0].tolist() == [11, 12, 0, 14, 0]
    assert state.drawn_logprobs_WB[0].tolist() == [-1.0, -2.0, 0.0, -4.0, 0.0]
    assert state.tokens_B.tolist() == [11, 12, 50, 14, 0] and state.place_1.item() == 1
    state.advance(torch.tensor([21, 22, 23, 24]), torch.tensor([-5.0] * 4), torch.tensor([12]))
    assert state.positions_B.tolist() == [5, -1, -1, -1, -1]
    assert state.drawn_tokens_WB[1].tolist() == [21, 0, 0, 0, 0] and state.place_1.item() == 2


def test_a_row_without_finite_logits_ends():
    state = state_of([3, 4], [10, 10])
    state.advance(torch.tensor([1, 2]), torch.tensor([torch.nan, -1.0]), NONE)
    assert state.positions_B.tolist() == [-1, 5, -1] and state.drawn_logprobs_WB[0, 0].isnan()


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_no_draw_of_a_whole_batch_stays_out_of_a_graph(sampling):
    assert TorchSampler(tiny(), Sampling(max_tokens=1, **sampling), NONE).is_capturable


def test_prompts_have_their_own_randomness():
    draw = TorchSampler(tiny(), Sampling(max_tokens=1), NONE)
    keys = {draw.key((0, 0, p.index, g), 3) for p in prompts_of(3, 3) for g in range(4)}
    assert len(keys) == 8
