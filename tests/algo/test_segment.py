import torch

from qerl.algo.segment import Segments

SPANS = Segments.of([3, 1, 2])
X_T = torch.tensor([1.0, -2.0, 4.0, 5.0, 6.0, 8.0], dtype=torch.float64)


def test_each_sample_has_its_own_sum_mean_and_least():
    assert SPANS.total(X_T).tolist() == [3.0, 5.0, 14.0]
    assert SPANS.mean(X_T).tolist() == [1.0, 5.0, 7.0]
    assert SPANS.minimum(X_T).tolist() == [-2.0, 5.0, 6.0]


def test_a_samples_value_goes_to_each_of_its_tokens():
    assert SPANS.per_token(torch.tensor([7, 8, 9])).tolist() == [7, 7, 7, 8, 9, 9]


def test_gradients_are_those_of_the_sums():
    x_T = X_T.clone().requires_grad_()
    (SPANS.per_token(SPANS.mean(x_T)) * torch.arange(6.0)).sum().backward()
    assert x_T.grad is not None and x_T.grad.tolist() == [1.0, 1.0, 1.0, 3.0, 4.5, 4.5]


def test_no_samples_have_no_sums():
    empty = Segments.of([])
    assert empty.total(X_T[:0]).tolist() == empty.per_token(X_T[:0]).tolist() == []
