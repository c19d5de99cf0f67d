"""The LM head: logits of hidden states, from one weight that sampler and learner share.

    logits_TV = alpha * (hidden_TD @ operand_VD^T)        fp32; with a soft cap, cap * tanh(logits / cap)

    bf16    the weight in the compute dtype               the embedding's own, if they are tied
    fp8     codes, a scale for 128 x 128 of them          formats/fp8.py, scales of four significant bits
    nvfp4   tiles where the decode kernels run (packed_linear.py), else plain; alpha is 1 / g

The decode kernel (kernels/head/head_sample.py) reads the packed weight, every other pass its operand, which
is exact in bfloat16, so all passes have the same policy (tests/models/test_lm_head.py). A packed head is a
separate copy: the embedding stays in the compute dtype. An untied head's full weight is freed once it is
packed. Its rows are padded with zeros to a multiple of 128 weights, as the decode kernel reads: gpt-oss's
2,880 to 2,944.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl.errors import UserError
from qerl.formats import FP8, NVFP4, PackedWeight
from qerl.formats.nvfp4 import BLOCK_WEIGHTS as NVFP4_BLOCK
from qerl.kernels.head.head_operand import HeadOperand, PackedOperand
from qerl.kernels.head.head_sample import WIDTH_MULTIPLE
from qerl.kernels.head.logprob import cap_
from qerl.kernels.pointwise.matmul_fp32 import product
from qerl.kernels.tiles import tile_unpack
from qerl.kernels.tiles.nvfp4_decode import TILE_ROWS
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.checkpoint.layouts.rows import cut_rows
from qerl.models.device import keeps_tiles
from qerl.models.packed.packed_linear import PackedNVFP4, tile_group

# Number of weights unpacked at a time for logits: 134 MB in bfloat16, where 152064 x 3584 of them are 1.1 GB.
_CHUNK_WEIGHTS = 1 << 26
_BLOCK_ROWS = 128  # a chunk is whole blocks of FP8 and whole tiles
_MULTIPLES = {"bf16": (1, 1), "fp8": (1, 1), "nvfp4": (64, NVFP4_BLOCK)}
_ENCODE = {"fp8": FP8.encode_exact, "nvfp4": NVFP4.encode}


def check_head(format: str, vocab_size: int, width: int) -> None:
    """Raise UserError if a head of this shape does not fit the format's blocks."""
    rows, columns = _MULTIPLES[format]
    if vocab_size % rows or width % columns:
        raise UserError(
            f"model.head_format: {format} needs a vocabulary that is a multiple of {rows} and a width that is"
            f" a multiple of {columns}; the model has {vocab_size} tokens and width {width}"
        )


def packed_width(width: int) -> int:
    """Return the weights in a row of a packed head, zeros at its end included."""
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


class LMHead(nn.Module):
    def __init__(self, weight_VD: Tensor, *, scale: float = 1.0, softcap: float | None = None):
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.compute, self.shape = weight_VD.dtype, (weight_VD.shape[0], weight_VD.shape[1])
        self.weight: Tensor | None
        self.register_buffer("weight", weight_VD)
        self.full: nn.Parameter | None
        self.register_parameter("full", None)
        self.base: Tensor | None = None
        self.packed: PackedWeight | None = None
        """Weight in FP8 or NVFP4, which replaces `weight`."""
        self.alpha = scale
        """Factor that the operand leaves out; `scale` is in it."""
        self._operand: Tensor | None = None

    def pack(self, format: str, packed: PackedWeight | None = None) -> None:
        """Convert the weight to this format, or replace it by one that a checkpoint has in it; bf16 leaves
        the weight unchanged."""
        if format != "bf16":
            assert self.weight is not None, "is packed already"
            packed = _ENCODE[format](self.weight) if packed is None else packed.to(self.weight.device)
            self.load_packed(packed)

    def load_packed(self, packed: PackedWeight) -> None:
        """Replace the full weight by one in FP8 or NVFP4."""
        assert packed.shape == self.shape
        packed = _padded(packed)
        if isinstance(packed, NVFP4) and keeps_tiles(self.compute, packed.alpha.device):
            packed = PackedNVFP4(tile_group([packed], UnpackRows.ALL), 0)
        self.packed, self.alpha = packed, self.scale * packed.alpha.item()
        self.weight = self._operand = None

    def make_resident(self) -> None:
        """Unpack the operand once and keep it beside the packed weight; the numbers are the same."""
        if self.packed is not None:
            self._operand = self.operand()

    def operand(self) -> Tensor:
        """Return the matrix to multiply by, [V, D] in the compute dtype, without the factor alpha."""
        if self.packed is None:
            assert self.weight is not None
            return self.weight
        if self._operand is not None:
            return self._operand
        return self.packed.operand(self.compute)[:, : self.shape[1]]

    def sliced_operand(self) -> HeadOperand:
        """Return the operand; of a packed weight that is not resident, one to unpack some rows at a time."""
        if self.packed is None or self._operand is not None:
            return self.operand()
        return PackedOperand(self.shape, self.compute, self._rows)

    def _rows(self, rows: slice) -> Tensor:
        """Unpack some rows of the operand; the first is a multiple of _BLOCK_ROWS."""
        assert self.packed is not None
        return _operand_rows(self.packed, rows, self.compute)[:, : self.shape[1]]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits, fp32 [T, V], without a gradient."""
        logits_TV = self._uncapped(hidden_TD)
        return logits_TV if self.softcap is None else cap_(logits_TV, self.softcap)

    def _uncapped(self, hidden_TD: Tensor) -> Tensor:
        if self.packed is None or self._operand is not None:
            logits_TV = product(hidden_TD, self.operand().T)
            return logits_TV if self.alpha == 1 else logits_TV.mul_(self.alpha)
        v, d = self.shape
        logits_TV = torch.empty(len(hidden_TD), v, device=hidden_TD.device)
        step = max(_CHUNK_WEIGHTS // d // _BLOCK_ROWS, 1) * _BLOCK_ROWS
        for start in range(0, v, step):
            rows = slice(start, min(start + step, v))
            torch.mul(product(hidden_TD, self._rows(rows).T), self.alpha, out=logits_TV[:, rows])
        return logits_TV

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the packed weight, and its resident operand."""
        packed = () if self.packed is None else self.packed.tensors().values()
        return [t for t in (*packed, self._operand) if t is not None]


def _operand_rows(weight: PackedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Unpack some rows with the zeros at their ends."""
    if isinstance(weight, PackedNVFP4):
        tiles = weight.group.tiles[rows.start // TILE_ROWS : rows.stop // TILE_ROWS]
        return tile_unpack.unpack(tiles, UnpackRows.ALL, dtype)
    part = cut_rows(weight, rows)
    assert part is not None, "rows begin with a block"
    return part.operand(dtype)


def _padded(packed: PackedWeight) -> PackedWeight:
    """Return the weight with rows as long as the decode kernel reads."""
    _, k = packed.shape
    missing = packed_width(k) - k
    if isinstance(packed, FP8) and missing:
        return FP8(_with_zeros(packed.codes, missing), packed.scales)
    if isinstance(packed, NVFP4) and missing:
        codes, scales = _with_zeros(packed.codes, missing // 2), packed.scales
        return NVFP4(codes, _with_zeros(scales, missing // NVFP4_BLOCK), packed.global_scale)
    return packed


def _with_zeros(x_NB: Tensor, count: int) -> Tensor:
    return F.pad(x_NB.view(torch.uint8), (0, count)).view(x_NB.dtype)
