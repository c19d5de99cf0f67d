"""Scale rows that are sorted by expert, and add to them: out[s] = alpha_e * product[s] + bias_e + plus[s].

    product, plus, out   [S, N]; out may be the product
    bias_EN, alpha_E     one row and one number (fp32) for each of E experts
    chosen_G, ends_G     int32: the experts that have rows, and the end of each one's rows

Sums are fp32 and rounded once. On a GPU one kernel reads and writes each row once (402 MB for 65,536 rows of
1,536); PyTorch's operations broadcast alphas at a fifth of the memory's rate and write the biases out.
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((5, 4, 64), (300, 32, 1536), (64, 7, 2880))  # S, E, N


def reference(
    product_SN: Tensor,
    chosen: list[int],
    ends: list[int],
    alpha_E: Tensor | None,
    bias_EN: Tensor | None,
    plus_SN: Tensor | None,
) -> Tensor:
    """Compute the definition in float64, row by row."""
    rows = []
    for s, product_N in enumerate(product_SN.double()):
        e = next(e for e, end in zip(chosen, ends, strict=True) if end > s)
        y_N = product_N if alpha_E is None else alpha_E[e].double() * product_N
        y_N = y_N if bias_EN is None else y_N + bias_EN[e].double()
        rows.append(y_N if plus_SN is None else y_N + plus_SN[s].double())
    return torch.stack(rows)


def scale_and_add(
    product_SN: Tensor,
    chosen_G: Tensor,
    ends_G: Tensor,
    *,
    alpha_E: Tensor | None,
    bias_EN: Tensor | None,
    plus_SN: Tensor | None,
    out: Tensor,
) -> None:
    """Write out[s], for all rows of the product; out may be the product itself."""
    (S, N), terms = product_SN.shape, [x for x in (bias_EN, plus_SN) if x is not None]
    if not S or (alpha_E is None and not terms):
        if out is not product_SN:
            out.copy_(product_SN)
        return
    if row_kernel.are_vectors(product_SN, out, *terms):
        assert all(x.is_contiguous() for x in (product_SN, out, chosen_G, ends_G, *terms))
        assert alpha_E is None or (alpha_E.dtype == torch.float32 and alpha_E.is_contiguous())
        blocks = -(-N // 2048)
        pointers = addresses(product_SN, alpha_E, bias_EN, plus_SN, chosen_G, ends_G, out)
        operands = struct.pack("7Q3i4x", *pointers, len(chosen_G), N, blocks)
        kernel = row_kernel.kernel("expert_rows.cu", "scale_and_add", out.device)
        kernel.launch(grid=S * blocks, block_threads=256, parameters=(operands,))
        return
    if bias_EN is not None:
        bias_SN = _of_rows(bias_EN, chosen_G, ends_G, S)
        plus_SN = bias_SN if plus_SN is None else bias_SN.add_(plus_SN)
    if alpha_E is None:
        assert plus_SN is not None
        torch.add(product_SN, plus_SN, out=out)
    elif plus_SN is None:
        torch.mul(product_SN, _of_rows(alpha_E, chosen_G, ends_G, S)[:, None], out=out)
    else:
        alpha_S1 = _of_rows(alpha_E, chosen_G, ends_G, S)[:, None]
        torch.addcmul(plus_SN, product_SN, alpha_S1, out=out)


def _of_rows(x: Tensor, chosen_G: Tensor, ends_G: Tensor, num_rows: int) -> Tensor:
    """Return each row's expert's part of x [E, ...]."""
    lengths_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
    return x.index_select(0, chosen_G).repeat_interleave(lengths_G, 0, output_size=num_rows)
