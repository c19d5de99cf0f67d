import gguf
import numpy as np
import pytest
import torch

from qerl.models.checkpoint.ggml_blocks import decode_blocks
from qerl.models.checkpoint.gguf_file import TYPES


def random_blocks(name, num_blocks):
    """Blocks of random bytes: every code, and scales that are subnormal, infinite or not a number."""
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    rng = np.random.default_rng(len(name))
    return rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


def decoded(raw, name, device):
    with np.errstate(all="ignore"):  # of types that the package decodes
        got = decode_blocks(torch.from_numpy(raw).to(device), gguf.GGMLQuantizationType[name])
    assert got.dtype == torch.float32 and got.device.type == device.type
    return got.cpu()


def by_the_package(raw, name):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))


def assert_same_bits(got, want):
    """A NaN may have other bits: no model holds one."""
    is_nan = want.isnan()
    assert torch.equal(got.isnan(), is_nan)
    got, want = (x.masked_fill(is_nan, 0).view(torch.int32) for x in (got, want))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", TYPES)
def test_every_type_decodes_to_the_bits_of_the_package(name, device):
    raw = random_blocks(name, 2000)
    assert_same_bits(decoded(raw, name, device), by_the_package(raw, name))


@pytest.mark.parametrize("name", TYPES)
def test_each_byte_of_a_block_takes_each_value(name, device):
    """One byte varies while all others stay, so a code that is read from another byte shows."""
    (block,) = random_blocks(name, 1) & 0x3F  # scales are finite
    raw = np.repeat(block[None], 256 * len(block), 0)
    rows = np.arange(len(raw))
    raw[rows, rows // 256] = rows % 256
    assert_same_bits(decoded(raw, name, device), by_the_package(raw, name))


@pytest.mark.parametrize("name", TYPES)
def test_one_block_alone_decodes_like_many(name, device):
    """Its parts begin at any byte: they are not aligned to the words that are shifted."""
    raw = random_blocks(name, 3)
    assert_same_bits(decoded(raw[1:2].copy(), name, device), decoded(raw, name, device)[1:2])


def test_the_bytes_stay_as_they_are(device):
    for name in TYPES:
        raw = random_blocks(name, 50)
        before = raw.copy()
        decoded(raw, name, device)
        assert np.array_equal(raw, before), name
