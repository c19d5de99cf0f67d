"""Two threads add rows in the same order each time."""

import pytest
import torch

from qerl.kernels.head import logprob
from qerl.kernels.pointwise.add_rows import add_rows


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_rows_that_several_are_added_to_get_them_in_the_order_given(rng):
    rows_C = torch.randint(40, (900,), generator=rng)
    x_CX = torch.randn(900, 128, generator=rng)  # of 32,768 elements on PyTorch uses its threads
    in_order = torch.zeros(40, 128)
    for row, x_X in zip(rows_C.tolist(), x_CX, strict=True):
        in_order[row] += x_X
    for _ in range(20):
        sum_TX = torch.zeros(40, 128)
        add_rows(sum_TX, rows_C, x_CX)
        assert torch.equal(sum_TX, in_order)


def test_a_gradient_of_rows_with_many_targets_is_the_same_each_time(rng):
    hidden_TD, head_VD = torch.randn(30, 600, generator=rng), torch.randn(90, 600, generator=rng)
    rows_C = torch.arange(30).repeat_interleave(16)
    targets_C = torch.randint(90, (480,), generator=rng)
    hidden_TD.requires_grad_()
    settings = {"temperature": 1.0, "chunk_tokens": 240, "rows_C": rows_C}
    gradients = []
    for _ in range(20):
        logprob_C, _ = logprob.chunked_logprob(hidden_TD, head_VD, targets_C, **settings)
        gradients += torch.autograd.grad(logprob_C.sum(), [hidden_TD])
    assert all(torch.equal(each, gradients[0]) for each in gradients)
