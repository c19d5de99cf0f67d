"""A kernel forwards, PyTorch's operations backwards."""

import torch

from qerl.kernels.pointwise.recomputed import recomputed


def test_the_value_is_the_kernels_and_the_gradients_are_the_operations(rng):
    x, y, frozen = (torch.randn(3, generator=rng) for _ in range(3))
    for leaf in (x, y):
        leaf.requires_grad_()
    product, total = recomputed(
        lambda x, y, z: (x * y * z + 1, x + y), lambda x, y, z: (x * y * z, x + y), x, y, frozen
    )
    assert torch.equal(product, x * y * frozen + 1) and torch.equal(total, x + y)
    dx, dy = torch.autograd.grad((product * 2).sum() + (total * 3).sum(), (x, y))
    torch.testing.assert_close(dx, 2 * y * frozen + 3)
    torch.testing.assert_close(dy, 2 * x * frozen + 3)


def test_an_output_that_is_not_used_and_an_input_that_is_not_have_no_effect(rng):
    x, y = (torch.randn(3, generator=rng).requires_grad_() for _ in range(2))
    first, _ = recomputed(lambda x, y: (x.square(), y + 1), lambda x, y: (x.square(), y + 1), x, y)
    dx, dy = torch.autograd.grad(first.sum(), (x, y), allow_unused=True)
    torch.testing.assert_close(dx, 2 * x)
    assert dy is None or not dy.any()


def test_without_gradients_the_operations_do_not_run():
    def operations(x):
        raise AssertionError

    with torch.no_grad():
        (y,) = recomputed(lambda x: (x + 1,), operations, torch.zeros(2, requires_grad=True))
    assert torch.equal(y, torch.ones(2))
