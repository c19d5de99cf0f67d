"""The four-bit float: its values, its ties, its ends."""

import pytest
import torch

from qerl.formats import e2m1

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def rounded(numbers):
    """Encode and decode the numbers, through both nibbles of a byte."""
    pairs = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(2)[None]
    low, high = e2m1.decode(e2m1.encode(pairs), torch.float32)[0].view(-1, 2).unbind(1)
    assert torch.equal(low, high)
    return low.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_byte_decodes_to_its_two_values_low_nibble_first(dtype):
    signed = VALUES + [-v for v in VALUES]
    expected = [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]
    codes = torch.arange(256, dtype=torch.uint8)
    got = e2m1.decode(codes[:, None], dtype)
    assert got.dtype == dtype
    assert torch.equal(got.float(), torch.tensor(expected))


def test_every_value_encodes_to_its_own_byte():
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = codes[
        ((codes & 15) != 8).flatten() & ((codes >> 4) != 8).flatten()
    ]  # a negative zero loses its sign
    assert len(codes) == 225
    assert torch.equal(e2m1.encode(e2m1.decode(codes, torch.float32)), codes)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_tie_goes_to_the_even_code(sign):
    assert rounded([sign * tie for tie in TIES]) == [sign * value for value in TIES.values()]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_float_next_to_a_tie_goes_to_the_nearer_value(sign):
    ties = torch.tensor(list(TIES))
    below, above = torch.nextafter(ties, torch.zeros(7)), torch.nextafter(ties, torch.full((7,), 9.0))
    assert rounded((sign * below).tolist()) == [sign * value for value in VALUES[:-1]]
    assert rounded((sign * above).tolist()) == [sign * value for value in VALUES[1:]]


def test_rounding_is_to_the_nearest(rng):
    numbers = torch.rand(4096, generator=rng) * 14 - 7
    values = torch.tensor(VALUES + [-v for v in VALUES])
    nearest = (numbers[:, None] - values).abs().min(dim=1).values
    assert torch.equal((numbers - torch.tensor(rounded(numbers.tolist()))).abs(), nearest)


def test_beyond_six_saturates():
    assert rounded([6.1, 7.0, 1e38, float("inf"), -6.1, -1e38]) == [6, 6, 6, 6, -6, -6]


def test_a_negative_number_that_rounds_to_zero_keeps_its_sign():
    assert e2m1.encode(torch.tensor([[-0.1, 0.1], [-0.0, -1e-45]])).flatten().tolist() == [0x08, 0x80]


def test_nearest_sizes_are_those_of_the_codes():
    sizes = torch.cat([torch.linspace(0, 7, 8961), torch.tensor(list(TIES)), torch.tensor([1e-40, 3e38])])
    codes = e2m1.encode(torch.stack([sizes, sizes], 1))
    assert torch.equal(e2m1.nearest(sizes), e2m1.decode(codes, torch.float32)[:, 0])
