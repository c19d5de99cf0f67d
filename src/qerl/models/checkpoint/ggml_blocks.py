"""Decode ggml's blocks with torch, on any device, to the bits of `gguf.dequantize`.

    block    d, m       codes (bytes in the block's order)                   weight
    Q4_0     d          4 bits: low halves of 16 bytes, then high halves     d (q - 8)
    Q4_1     d, m       the same                                             d q + m
    Q5_0     d          the same, bit 4 in a 32-bit mask                     d (q - 16)
    Q5_1     d, m       the same                                             d q + m
    Q8_0     d          8 bits, signed                                       d q
    MXFP4    power of 2 4 bits as Q4_0's, of E2M1                            e2m1(q) 2^(e - 127)
    Q2_K     d, m       2 bits, 16 scales and minima of 4 bits               (d s) q - m t
    Q3_K     d          2 bits and a mask, 16 scales of 6 bits               (d (s - 32)) (q - 4 or 0)
    Q4_K     d, m       4 bits, 8 scales and minima of 6 bits                (d s) q - m t
    Q5_K     d, m       4 bits and a mask, the same scales                   (d s) q - m t
    Q6_K     d          4 + 2 bits, 16 scales of 8 bits                      (d s) (q - 32)
    IQ4_NL   d          4 bits as Q4_0's, of a table                         d table[q]
    IQ4_XS   d          the same, 8 scales of 6 bits                         (d (s - 32)) table[q]

Products and sums are rounded one by one, in this order, so a device's bits are those of numpy. Fields of a
byte are a plane each: all low halves of 32 bytes precede all high halves. The other types (IQ1 to IQ3, TQ)
are decoded by the package, on the CPU.
"""

from collections.abc import Callable

import gguf
import torch
from torch import Tensor

from qerl.formats import e2m1

_K_WEIGHTS = 256  # of a block of the K types
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EVERY_BYTE = 0x0101_0101_0101_0101
_BIT_OF_EACH_BYTE = 0x8040_2010_0804_0201 - (1 << 64)  # bit i of byte i, as int64
_BITS_OF_2_TO_MINUS_128 = 0x0020_0000


def decode_blocks(raw_BY: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Return float32 [B, weights of a block] of uint8 [B, bytes of a block], on its device."""
    if (decode := _DECODERS.get(kind.name)) is not None:
        return decode(raw_BY)
    decoded = gguf.dequantize(raw_BY.cpu().numpy(), kind)
    return torch.from_numpy(decoded).to(raw_BY.device)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw_BY: raw_BY.view(dtype).float()


def _half(raw_BY: Tensor, at: int) -> Tensor:
    """Return the fp16 number at a byte of each block, float32 [B, 1]."""
    return raw_BY[:, at : at + 2].view(torch.float16).float()


def _fields(bytes_BGY: Tensor, bits: int) -> Tensor:
    """Return uint8 [B, G, fields of a byte, Y], lowest fields first; 8 divides Y.

    Eight bytes are shifted at a time, as one number: a CPU takes a third of the time for it."""
    words = bytes_BGY.clone(memory_format=torch.contiguous_format).view(torch.int64)
    mask = _EVERY_BYTE * ((1 << bits) - 1)
    return torch.stack([(words >> shift) & mask for shift in range(0, 8, bits)], 2).view(torch.uint8)


def _nibbles(raw_BY: Tensor, begin: int) -> Tensor:
    """Return the 32 codes of the 16 bytes from `begin`, uint8 [B, 32]."""
    return _fields(raw_BY[:, None, begin : begin + 16], 4).flatten(1)


def _five_bits(raw_BY: Tensor, begin: int) -> Tensor:
    """Return 32 codes: 4 bytes from `begin` have their highest bits, 16 after them the others."""
    high = (raw_BY[:, begin : begin + 4].long() * _EVERY_BYTE) & _BIT_OF_EACH_BYTE
    is_set = high.view(torch.uint8) != 0
    return _nibbles(raw_BY, begin + 4) | (is_set.view(torch.uint8) << 4)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Return codes - zero in float32; changes `codes`."""
    return codes.sub_(zero).view(torch.int8).float()


def _q4_0(raw_BY: Tensor) -> Tensor:
    return _signed(_nibbles(raw_BY, 2), 8).mul_(_half(raw_BY, 0))


def _q4_1(raw_BY: Tensor) -> Tensor:
    return _nibbles(raw_BY, 4).float().mul_(_half(raw_BY, 0)).add_(_half(raw_BY, 2))


def _q5_0(raw_BY: Tensor) -> Tensor:
    return _signed(_five_bits(raw_BY, 2), 16).mul_(_half(raw_BY, 0))


def _q5_1(raw_BY: Tensor) -> Tensor:
    return _five_bits(raw_BY, 4).float().mul_(_half(raw_BY, 0)).add_(_half(raw_BY, 2))


def _q8_0(raw_BY: Tensor) -> Tensor:
    return raw_BY[:, 2:].view(torch.int8).float().mul_(_half(raw_BY, 0))


def _mxfp4(raw_BY: Tensor) -> Tensor:
    """The scale is half of 2^(e - 127), of doubled codes; it is subnormal below e = 2."""
    exponent = raw_BY[:, :1].int()
    subnormal = torch.bitwise_left_shift(_BITS_OF_2_TO_MINUS_128, exponent.clamp(max=1))
    bits = torch.where(exponent < 2, subnormal, (exponent - 1) << 23)
    doubled = torch.tensor([2 * value + 0.0 for value in e2m1.VALUES], device=raw_BY.device)  # no -0.0
    return _look_up(doubled, _nibbles(raw_BY, 1)).mul_(bits.view(torch.float32))


def _q2_k(raw_BY: Tensor) -> Tensor:
    scales = raw_BY[:, :16]
    step = _half(raw_BY, 80) * (scales & 15).float()
    minimum = _half(raw_BY, 82) * (scales >> 4).float()
    codes = _fields(raw_BY[:, 16:80].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    return codes.float().mul_(step[:, :, None]).sub_(minimum[:, :, None]).flatten(1)


def _q3_k(raw_BY: Tensor) -> Tensor:
    mask, low, packed = raw_BY[:, None, :32], raw_BY[:, 32:96].unflatten(1, (2, 32)), raw_BY[:, 96:108]
    scales = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    scales |= torch.cat([(packed[:, 8:] >> shift) & 3 for shift in range(0, 8, 2)], 1) << 4
    step = _half(raw_BY, 108) * (scales.float() - 32)
    codes = _fields(low, 2).view(-1, _K_WEIGHTS) | (_fields(mask, 1).view(-1, _K_WEIGHTS) << 2)
    return _signed(codes.view(-1, 16, 16), 4).mul_(step[:, :, None]).flatten(1)


def _steps_and_minima(raw_BY: Tensor) -> tuple[Tensor, Tensor]:
    """Return d s and m t of the 8 parts of a block of Q4_K or Q5_K, float32 [B, 8, 1].

    Bytes 4 to 7 hold 4 scales, 8 to 11 4 minima, 12 to 15 the low halves of 4 of both; their high bits are
    the two highest of the first eight bytes."""
    first, second, low = raw_BY[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 0x3F, (low & 0x0F) | ((first >> 2) & 0x30)), 1)
    minima = torch.cat((second & 0x3F, (low >> 4) | ((second >> 2) & 0x30)), 1)
    step, minimum = _half(raw_BY, 0) * scales.float(), _half(raw_BY, 2) * minima.float()
    return step[:, :, None], minimum[:, :, None]


def _q4_k(raw_BY: Tensor) -> Tensor:
    step, minimum = _steps_and_minima(raw_BY)
    codes = _fields(raw_BY[:, 16:144].unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    return codes.float().mul_(step).sub_(minimum).flatten(1)


def _q5_k(raw_BY: Tensor) -> Tensor:
    step, minimum = _steps_and_minima(raw_BY)
    codes = _fields(raw_BY[:, 48:176].unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    codes |= _fields(raw_BY[:, None, 16:48], 1).view(-1, 8, 32) << 4
    return codes.float().mul_(step).sub_(minimum).flatten(1)


def _q6_k(raw_BY: Tensor) -> Tensor:
    step = _half(raw_BY, 208) * raw_BY[:, 192:208].view(torch.int8).float()
    codes = _fields(raw_BY[:, :128].unflatten(1, (2, 64)), 4).view(-1, _K_WEIGHTS)
    codes |= _fields(raw_BY[:, 128:192].unflatten(1, (2, 32)), 2).view(-1, _K_WEIGHTS) << 4
    return _signed(codes.view(-1, 16, 16), 32).mul_(step[:, :, None]).flatten(1)


def _iq4_nl(raw_BY: Tensor) -> Tensor:
    return _look_up(_iq4_table(raw_BY), _nibbles(raw_BY, 2)).mul_(_half(raw_BY, 0))


def _iq4_xs(raw_BY: Tensor) -> Tensor:
    high = (raw_BY[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=raw_BY.device)) & 3
    low = (raw_BY[:, 4:8, None] >> torch.arange(0, 8, 4, dtype=torch.uint8, device=raw_BY.device)) & 15
    scales = low.flatten(1) | (high.flatten(1) << 4)
    step = _half(raw_BY, 0) * (scales.float() - 32)
    codes = _fields(raw_BY[:, 8:136].unflatten(1, (8, 16)), 4).view(-1, 8, 32)
    return _look_up(_iq4_table(raw_BY), codes).mul_(step[:, :, None]).flatten(1)


def _iq4_table(raw_BY: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=raw_BY.device)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
