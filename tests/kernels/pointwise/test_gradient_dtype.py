import pytest
import torch

from qerl.kernels.linear import fused_linear
from qerl.kernels.pointwise import gradient_dtype, rms_norm


class _Keeping(torch.autograd.Function):
    """Return x; keeps the negated rounding with its gradient, so that one can tell who read it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        dx = dy.clone()
        gradient_dtype.attach_rounded(dx, -dx.bfloat16())
        return dx


class _Reading(torch.autograd.Function):
    """Return x; its gradient is dy, as bfloat16 has it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return gradient_dtype.in_dtype(dy, torch.bfloat16).float()


def _gradient(between) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    _Keeping.apply(between(_Reading.apply(x))).sum().backward()
    assert x.grad is not None
    return x.grad


def test_what_was_kept_with_a_gradient_is_read_in_place_of_a_cast():
    assert torch.equal(_gradient(lambda y: y), -torch.ones(3, 8))


def test_so_it_is_in_a_layer_that_is_computed_again():
    """A backward pass within a backward pass gets the gradient as it is."""
    gradient, x = torch.ones(3, 8), torch.randn(3, 8, requires_grad=True)
    gradient_dtype.attach_rounded(gradient, -gradient.bfloat16())
    (found,) = torch.autograd.grad(_Reading.apply(x), x, gradient)
    assert torch.equal(found, -torch.ones(3, 8))


def test_a_gradient_that_was_added_to_is_cast():
    assert torch.equal(_gradient(lambda y: y + y), torch.full((3, 8), 2.0))


def test_a_gradient_that_was_changed_or_is_wanted_in_another_dtype_is_cast():
    for change, dtype, is_kept in (
        (lambda g: g, torch.bfloat16, True),
        (lambda g: g.mul_(3), torch.bfloat16, False),
        (lambda g: g, torch.float16, False),
    ):
        gradient = torch.ones(2, 8)
        kept = torch.zeros(2, 8, dtype=torch.bfloat16)
        gradient_dtype.attach_rounded(gradient, kept)
        change(gradient)
        read = gradient_dtype.in_dtype(gradient, dtype)
        assert (read is kept) == is_kept and (is_kept or torch.equal(read, gradient.to(dtype)))
        assert gradient_dtype.in_dtype(gradient, torch.bfloat16) is not kept, "it is read once"


@pytest.mark.gpu
def test_the_product_before_a_norm_reads_what_the_norm_wrote(device, rng, monkeypatch):
    """The bits are those of a cast, and there is none."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    h, x = (torch.randn(9, width, generator=rng).to(device) for width in (256, 128))
    weight_NK = torch.randn(256, 128, generator=rng).to(device, torch.bfloat16)
    part = fused_linear.LinearPart(256, 1.0, None, None)
    read = []

    def in_dtype(gradient, dtype):
        was_kept = gradient_dtype._ROUNDED in gradient.__dict__
        found = gradient_dtype.in_dtype(gradient, dtype)
        read.append((was_kept, torch.equal(found, gradient.to(dtype))))
        return found

    def gradients() -> list[torch.Tensor]:
        leaf, own = x.bfloat16().requires_grad_(), h.clone().requires_grad_()
        added = fused_linear.linear_onto(own * 1, leaf, lambda dtype, room: weight_NK, part)
        normed, copy = rms_norm.fork(added, torch.ones(256, device=device), None, 1e-6, dtype=torch.bfloat16)
        ((normed.float() * h).sum() + copy.square().sum()).backward()
        assert leaf.grad is not None and own.grad is not None
        return [leaf.grad, own.grad]

    monkeypatch.setattr(fused_linear, "in_dtype", in_dtype)
    with_kept = gradients()
    monkeypatch.setattr(gradient_dtype, "attach_rounded", lambda gradient, rounded: None)
    assert all(map(torch.equal, with_kept, gradients()))
    assert read == [(True, True), (False, True)]


@pytest.mark.parametrize("asks", (True, False))
def test_the_norm_writes_it_only_for_a_product_that_asks(asks, rng, monkeypatch):
    """The norm's kernels stand for themselves here: the backward one stores 1 and, rounded, 2."""
    filled = []

    def launch(name, x_TD, rows_T, parameters):
        if name == "rms_norm":
            *_, y_TD, copy_TD, inverse_T = parameters[:7]
            y_TD.zero_(), copy_TD.copy_(x_TD), inverse_T.zero_()
            return
        dx_TD, rounded_TD = parameters[7:9]
        dx_TD.fill_(1)
        filled.append(rounded_TD is not None)
        if rounded_TD is not None:
            rounded_TD.fill_(2)

    monkeypatch.setattr(rms_norm, "_has_kernel", lambda x_TD, dtype: True)
    monkeypatch.setattr(rms_norm, "_launch", launch)
    h, x = torch.zeros(3, 64, requires_grad=True), torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
    operand = torch.eye(64, dtype=torch.bfloat16)
    part = fused_linear.LinearPart(64, 1.0, None, None)
    added = fused_linear.linear_onto(h * 1, x, lambda dtype, room: operand, part)
    added = added if asks else added * 1
    normed, copy = rms_norm.fork(added, torch.ones(64), None, 1e-6, dtype=torch.bfloat16)
    (normed.float().sum() + copy.sum()).backward()
    assert filled == [asks]
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0 if asks else 1.0))
