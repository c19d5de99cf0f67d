"""The products of a decode step that a shape makes."""

import dataclasses

from qerl.model.architecture import Architecture


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """Linears of a layer that share their input.

    Gemm(name="qkv", in_width=3584, out_widths=(3584, 512, 512))
    """

    name: str
    in_width: int
    out_widths: tuple[int, ...]

    @property
    def out_width(self) -> int:
        return sum(self.out_widths)

    @property
    def num_weights(self) -> int:
        return self.in_width * self.out_width

    def num_adapter_weights(self, rank: int) -> int:
        """A and B of each of its linears."""
        return rank * sum(self.in_width + width for width in self.out_widths)


def gemms(a: Architecture) -> tuple[Gemm, Gemm, Gemm, Gemm]:
    """q|k|v, o, gate|up, down."""
    queries, keys = a.num_heads * a.head_size, a.num_kv_heads * a.head_size
    return (
        Gemm(name="qkv", in_width=a.width, out_widths=(queries, keys, keys)),
        Gemm(name="o", in_width=queries, out_widths=(a.width,)),
        Gemm(name="gate_up", in_width=a.width, out_widths=(a.ff_width, a.ff_width)),
        Gemm(name="down", in_width=a.ff_width, out_widths=(a.width,)),
    )
