"""Route the rows of a decode step to experts without the host: logits, choice, sorted rows, and the last sum.

    logits_BE = x_BD @ w_ED^T + bias_E                                  fp32
    ids, weights of kernels/experts/routing.py; of equal logits the expert with the lower number is chosen
    h_BD += scale * sum over a row's experts of weight * y_SD           fp32, ascending by expert

Up to 256 rows. A row at a negative position is not in use: it has no expert and its h stays. Letters: B rows
of the step, E experts, K chosen experts of a row, S = B K sorted rows, D width.
"""

import struct
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((1, 4, 2), (7, 8, 3), (64, 32, 4), (256, 128, 8), (33, 60, 4))  # B, E, K
MAX_ROWS, MAX_EXPERTS = 256, 256
_THREADS = 1024
_SORTING_CTAS = 128  # that sort rows of x
FILE = "moe_route.cu"


class Routed(NamedTuple):
    """The rows of a step sorted by expert, as grouped_product.py reads them."""

    plan: Tensor
    """int32: the number of items, then each: expert | rows << 8 | first sorted row << 16."""
    rows_S: Tensor
    """int16: the row of the step that a sorted row is."""
    places_BK: Tensor
    """int32: the sorted row of each choice; -1 of rows that are not in use."""
    weights_BK: Tensor
    """fp32."""
    item_rows: int
    """Most rows of an item."""
    x_SK: Tensor | None = None
    """The sorted rows of what was to be sorted; behind those in use undefined."""


class Record(NamedTuple):
    """The destination of a layer's ids: the slots of the rows' positions."""

    routes: Tensor
    """uint8 [pages, page_tokens, K]."""
    tables_BX: Tensor
    """int32; its rows may have a larger stride."""


def supports(num_experts: int, num_chosen: int) -> bool:
    return num_experts <= MAX_EXPERTS and num_chosen <= 16


class MoERoute:
    """The kernels of one device, compiled on first use."""

    def __init__(self, device: torch.device):
        self._device = device

    def logits(self, x_BD: Tensor, w_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return fp32 logits_BE; x and w are bfloat16, bias fp32."""
        (rows, width), experts = x_BD.shape, len(w_ED)
        assert x_BD.dtype == w_ED.dtype == torch.bfloat16 and w_ED.shape[1] == width and width % 8 == 0
        assert x_BD.is_contiguous() and w_ED.is_contiguous()
        assert x_BD.data_ptr() % 16 == w_ED.data_ptr() % 16 == 0
        assert bias_E is None or (bias_E.dtype == torch.float32 and bias_E.shape == (experts,))
        logits_BE = torch.empty(rows, experts, device=x_BD.device)
        row_kernel.kernel(FILE, "router_logits", self._device).launch(
            grid=-(-rows // 8) * -(-experts // 8),
            block_threads=256,
            parameters=(x_BD, w_ED, bias_E, logits_BE, rows, experts, width),
        )
        return logits_BE

    def route(
        self,
        logits_BE: Tensor,
        num_chosen: int,
        over: Literal["all", "chosen"],
        item_rows: int,
        positions_B: Tensor | None = None,
        record: Record | None = None,
        x_BK: Tensor | None = None,
    ) -> Routed:
        """positions_B: int32; None: all rows are in use. record needs positions. x_BK is sorted too."""
        (rows, experts), device = logits_BE.shape, logits_BE.device
        assert logits_BE.dtype == torch.float32 and logits_BE.is_contiguous() and rows <= MAX_ROWS
        assert supports(experts, num_chosen) and num_chosen <= experts
        assert positions_B is None or positions_B.dtype == torch.int32
        routed = Routed(
            torch.empty(1 + rows * num_chosen, dtype=torch.int32, device=device),
            torch.empty(rows * num_chosen, dtype=torch.int16, device=device),
            torch.empty(rows, num_chosen, dtype=torch.int32, device=device),
            torch.empty(rows, num_chosen, device=device),
            item_rows,
            None
            if x_BK is None
            else torch.empty(rows * num_chosen, x_BK.shape[1], dtype=x_BK.dtype, device=device),
        )
        assert x_BK is None or (row_kernel.are_vectors(x_BK) and x_BK.is_contiguous() and len(x_BK) == rows)
        where = bytes(24)
        if record is not None:
            routes, tables = record
            assert positions_B is not None and routes.dtype == torch.uint8 and routes.is_contiguous()
            assert routes.shape[2] == num_chosen and tables.dtype == torch.int32 and tables.stride(1) == 1
            where = struct.pack("2Q2i", *addresses(routes, tables), tables.stride(0), routes.shape[1])
        self._kernel("route", experts, num_chosen, over, item_rows)(
            grid=1 if x_BK is None else _SORTING_CTAS,
            block_threads=_THREADS,
            parameters=(
                *(logits_BE, positions_B, where, routed.plan, routed.rows_S, routed.places_BK),
                *(routed.weights_BK, x_BK, routed.x_SK, rows, 0 if x_BK is None else x_BK.shape[1] // 8),
            ),
        )
        return routed

    def add(self, h_BD: Tensor, y_SD: Tensor, routed: Routed, num_experts: int, scale: float = 1.0) -> Tensor:
        """Return h with the weighted sum of each row's experts added, in place."""
        (rows, width), num_chosen = h_BD.shape, routed.places_BK.shape[1]
        assert h_BD.dtype == torch.float32 and h_BD.is_contiguous() and width % 8 == 0
        assert y_SD.shape == (rows * num_chosen, width) and y_SD.dtype == torch.bfloat16
        assert y_SD.is_contiguous() and len(routed.places_BK) == rows
        ctas_a_row = -(-width // (8 * 128))
        parameters = h_BD, y_SD, routed.places_BK, routed.weights_BK, width, ctas_a_row
        self._kernel("add_experts", num_experts, num_chosen, "chosen", routed.item_rows)(
            grid=rows * ctas_a_row, block_threads=128, parameters=(*parameters, struct.pack("f", scale))
        )
        return h_BD

    def _kernel(self, name: str, experts: int, chosen: int, over: str, item_rows: int) -> Callable[..., None]:
        defines = {"E": experts, "CHOSEN": chosen, "OVER_ALL": int(over == "all"), "MT": item_rows}
        return row_kernel.kernel(FILE, name, self._device, **defines).launch
