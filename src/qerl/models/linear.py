"""A linear: a frozen weight in a packed format with a LoRA adapter, or a weight that is trained itself.

    y = x @ decode(weight)^T + bias + scaling * (x @ A^T) @ B^T

A and B exist twice: fp32 masters (`lora_A`, `lora_B`), which the optimizer updates, and working copies in
the compute dtype (`a_work`, `b_work`), which are multiplied. Only `publish` copies the masters to them.
After `learn_weight` the weight has an fp32 master too, `full`, and is its own working copy.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor, nn

from qerl.formats import BF16, FP8Flow, PackedWeight
from qerl.kernels.linear.fp8_linear import fp8_linear
from qerl.kernels.linear.full_linear import full_linear
from qerl.kernels.linear.int8_codes import Rotation
from qerl.kernels.linear.lora_dropout import dropped_lora
from qerl.kernels.linear.lora_linear import Adapter, lora_linear
from qerl.models.linear_pass import PLAIN, LinearPass, OperandCache


class FrozenWeight(nn.Module):
    """One tensor: an embedding, an untied head, or the weights of a norm or a convolution. If it is trained,
    `full` is its master and `base` what it was before (models/trained_weight.py)."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight: Tensor
        self.full: nn.Parameter | None
        self.register_parameter("full", None)
        self.base: Tensor | None = None
        self.register_buffer("weight", torch.empty(shape, dtype=dtype, device=device))


class OperandGroup(Protocol):
    """Weights of linears that read the same x, as one operand."""

    @property
    def in_width(self) -> int: ...

    def operand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return W [sum N, K]; it is in `out` if given, or keeps the adapters' b behind its rows."""
        ...


class QuantLinear(nn.Module):
    def __init__(
        self, in_width: int, out_width: int, *, has_bias: bool, compute: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.in_width, self.out_width, self.compute = in_width, out_width, compute
        self.weight: PackedWeight | None = None
        self.adapter_enabled = True
        self.scaling = 0.0
        self.bias: Tensor | None
        bias = torch.empty(out_width, dtype=compute, device=device) if has_bias else None
        self.register_buffer("bias", bias)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.register_parameter("full", None)
        self.a_work: Tensor | None = None
        self.b_work: Tensor | None = None
        self.fused: OperandGroup | None = None
        """Group that this weight is fused into (fused_weights.py)."""
        self.b_fused: Tensor | None = None
        """The place of b_work behind the rows of a fused BF16 weight."""
        self._operand: Tensor | None = None
        self.rotations: dict[bool, tuple[OperandGroup, Rotation]] = {}
        """By `along_k`: its fused weight, and the factors of that in int8 once known (rotated_weight.py)."""
        self.skips_group = False
        """True if it multiplies for itself, because its place among fused weights is of another adapter's
        rank."""
        self.alpha: float | Tensor = 1.0
        """The factor that the operand leaves out."""

    def load_weight(self, packed: PackedWeight) -> None:
        """Take this weight and drop the resident operand of an earlier one."""
        assert packed.shape == (self.out_width, self.in_width), (packed.shape, self)
        self.weight, self._operand = packed, None
        self.fused = self.b_fused = None
        self.rotations.clear()
        alpha = packed.alpha
        self.alpha = alpha if alpha.dim() else 1.0 if alpha.is_meta else alpha.item()

    def make_resident(self) -> None:
        """Keep the unpacked operand in addition to the weight: the same numbers, unpacked once."""
        self._operand = self.operand()

    def operand(self, operands: OperandCache | None = None) -> Tensor:
        """Return the matrix [N, K] to multiply by, in the compute dtype (FP8Flow: fp32), without alpha.
        operands: has it for further products, unless it is resident."""
        assert self.weight is not None, "no weight was loaded"
        if self._operand is not None:
            return self._operand
        # In bf16 the product of FP8Flow's code and scale would be rounded.
        dtype = torch.float32 if isinstance(self.weight, FP8Flow) else self.compute
        unpack = functools.partial(self.weight.operand, dtype)
        return unpack() if operands is None else operands.of(self, unpack)

    @property
    def is_resident(self) -> bool:
        return self._operand is not None

    def is_unfused(self, linear_pass: LinearPass) -> bool:
        """True if it must multiply for itself: it skips its group, its weight is trained, its adapter's input
        is dropped, its adapter differs by row, or a hook wants to see its input (calibration), which a fused
        product would pass by."""
        return (
            self.skips_group
            or self.full is not None
            or self in linear_pass.dropout
            or linear_pass.row_adapters is not None
            or bool(self._forward_pre_hooks)
        )

    @property
    def rank(self) -> int:
        """Rank of the adapter; 0 without one or while it is switched off."""
        return 0 if self.a_work is None or not self.adapter_enabled else len(self.a_work)

    def add_adapter(self, a_RK: Tensor, b_NR: Tensor, scaling: float) -> None:
        """Create masters and working copies with these values."""
        assert a_RK.shape[1] == self.in_width and b_NR.shape == (self.out_width, len(a_RK))
        self.lora_A, self.lora_B = nn.Parameter(a_RK.float()), nn.Parameter(b_NR.float())
        self.a_work, self.b_work = a_RK.to(self.compute, copy=True), b_NR.to(self.compute, copy=True)
        self.scaling, self.fused, self.b_fused = scaling, None, None

    def learn_weight(self) -> None:
        """Create an fp32 master of the weight, which must be in BF16."""
        assert isinstance(self.weight, BF16), self.weight
        if self.compute != torch.bfloat16:
            self.make_resident()  # in bf16 the operand is the weight itself
        self.full = nn.Parameter(self.operand().detach().float().clone())

    @property
    def working_copies(self) -> list[tuple[Tensor, Tensor]]:
        """(working copy, master) of everything that is trained."""
        pairs = (self.a_work, self.lora_A), (self.b_work, self.lora_B)
        full: list[tuple[Tensor, Tensor]] = [] if self.full is None else [(self.operand(), self.full)]
        return full + [(work, master) for work, master in pairs if work is not None]

    @property
    def fused_copies(self) -> list[tuple[Tensor, Tensor]]:
        """(copy, working copy) of b behind the rows of a fused weight."""
        return [] if self.b_fused is None or self.b_work is None else [(self.b_fused, self.b_work)]

    @property
    def tensors(self) -> list[Tensor]:
        """The packed weight, the resident operand and the bias, not the adapter; linears may share one."""
        packed = [] if self.weight is None else self.weight.tensors().values()
        return [t for t in (*packed, self._operand, self.bias) if t is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors, each counted once: the operand of BF16 is its weight."""
        return sum({id(t): t.nbytes for t in self.tensors}.values())

    @property
    def adapter(self) -> Adapter | None:
        """The adapter as the kernels take it; None without one or while it is switched off."""
        if self.a_work is None or self.b_work is None or not self.adapter_enabled:
            return None
        return Adapter(self.lora_A, self.lora_B, self.a_work, self.b_work, self.scaling)

    def frozen(self, x_TK: Tensor, linear_pass: LinearPass = PLAIN) -> Tensor:
        """Return y without the adapter."""
        return self._product(x_TK, None, linear_pass)

    def forward(self, x_TK: Tensor, linear_pass: LinearPass = PLAIN) -> Tensor:
        if linear_pass.row_adapters is not None:
            return linear_pass.row_adapters.add(self.frozen(x_TK, linear_pass), x_TK, self)
        if self.full is not None:
            return full_linear(x_TK, self.operand(linear_pass.operands), self.full, self.bias)
        dropout = linear_pass.dropout.get(self)
        if dropout is None or self.adapter is None:
            return self._product(x_TK, self.adapter, linear_pass)
        rate, seed = dropout
        return self.frozen(x_TK, linear_pass) + dropped_lora(x_TK, *self.adapter, rate=rate, seed=seed)

    def _product(self, x_TK: Tensor, adapter: Adapter | None, linear_pass: LinearPass) -> Tensor:
        needed = linear_pass.needs_output
        if isinstance(self.weight, FP8Flow):
            return fp8_linear(x_TK, self.weight, self._operand, adapter, self.bias, needs_output=needed)
        operand = functools.partial(self.operand, linear_pass.operands)
        return lora_linear(x_TK, operand, self.alpha, adapter, self.bias, needs_output=needed)
