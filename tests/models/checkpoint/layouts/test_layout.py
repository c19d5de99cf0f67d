"""What every layout checks: scales and codes that are not finite are refused, in any dtype."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qerl.models.checkpoint.layouts.layout import LayoutError, check_finite

EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2


class Widths(TorchDispatchMode):
    """Writes down the bytes per element of the tensors, but for single numbers, that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen |= {made.itemsize} if isinstance(made, torch.Tensor) and made.numel() > 1 else set()
        return made


def is_refused(scales):
    try:
        assert check_finite("s", scales) is scales
    except LayoutError as error:
        assert str(error) == "s holds NaN or infinity"
        return True
    return False


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_of_all_bytes_those_without_a_finite_value_are_refused(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes.float().isfinite()
    assert [is_refused(code) for code in codes.split(1)] == (~finite).tolist()
    assert is_refused(codes.view(16, 16)) and not is_refused(codes[finite]) and not is_refused(codes[:0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_refused_wherever_it_is(dtype, value):
    scales = torch.linspace(-1, 1, 15, dtype=dtype).view(3, 5)
    assert not is_refused(scales) and not is_refused(scales[:0])
    for place in range(15):
        damaged = scales.clone()
        damaged.view(-1)[place] = value
        assert is_refused(damaged)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_bytes_are_not_widened_to_be_checked(dtype):
    """A checkpoint of FP8 has billions."""
    with Widths() as widths:
        check_finite("s", torch.zeros(64, 48, dtype=torch.uint8).view(dtype))
    assert widths.seen == {1}
