"""The mixing of a Gated DeltaNet layer: a short convolution over q | k | v, then the gated delta rule.

    mix          packed sequences, each from a state of its own          engine, prefill
    mix_step     one token of each row                                   engine, decode
    mix_trees    prompts from zeros, then branches from their prompts    learner

A tree is not unpacked: the state after a prompt is the state that each of its branches starts from, and its
gradient is the sum over the branches, in the order of the rows. Letters: T tokens, C channels of q | k | v, W
taps, K key heads, N value heads, H and V their sizes, S sequences.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.delta_net.gated_delta import CHUNK, SequenceLayout, gated_delta, gated_delta_step
from qerl.kernels.delta_net.short_conv import short_conv, short_conv_step
from qerl.kernels.runtime.gpu_memory import sent
from qerl.types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """DeltaShape(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128, num_taps=4)"""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Width of q | k | v."""
        return 2 * self.key_width + self.value_width

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Shape of a sequence's state of the convolution, in the compute dtype."""
        return self.num_taps - 1, self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state of the delta rule, in fp32."""
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def working_bytes(self) -> int:
        """Estimate the bytes that the chunked form in PyTorch allocates for each row: fp32 queries, keys and
        values of every head, what is solved for, and a chunk's products."""
        return 4 * self.num_value_heads * (8 * self.key_size + 6 * self.value_size + 4 * CHUNK)


class DeltaInputs(NamedTuple):
    qkv_TC: Tensor
    log_decay_TN: Tensor
    beta_TN: Tensor
    weight_CW: Tensor
    shape: DeltaShape

    def rows(self, index: Tensor) -> "DeltaInputs":
        return self._replace(
            qkv_TC=self.qkv_TC[index], log_decay_TN=self.log_decay_TN[index], beta_TN=self.beta_TN[index]
        )

    def heads(self, y_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (q_TKH, k_TKH, v_TNV)."""
        s = self.shape
        q_TC, k_TC, v_TC = y_TC.split((s.key_width, s.key_width, s.value_width), 1)
        return (
            q_TC.unflatten(1, (-1, s.key_size)),
            k_TC.unflatten(1, (-1, s.key_size)),
            v_TC.unflatten(1, (-1, s.value_size)),
        )


class DeltaState(NamedTuple):
    """The states of S sequences in one layer."""

    conv_SWC: Tensor
    """Last inputs of the convolution, [S, W - 1, C]."""
    state_SNHV: Tensor

    @classmethod
    def zeros(cls, shape: DeltaShape, num: int, like: Tensor) -> "DeltaState":
        state = torch.zeros(num, *shape.state_shape, device=like.device)
        return cls(like.new_zeros(num, *shape.conv_shape), state)


def mix(inputs: DeltaInputs, layout: SequenceLayout, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Return (o_TNV, the states after the sequences); differentiable in the rows and the states."""
    y_TC, conv_SWC = short_conv(inputs.qkv_TC, inputs.weight_CW, layout, state.conv_SWC)
    rows = *inputs.heads(y_TC), inputs.log_decay_TN, inputs.beta_TN
    o_TNV, state_SNHV = gated_delta(*rows, layout, state.state_SNHV)
    return o_TNV, DeltaState(conv_SWC, state_SNHV)


def mix_step(inputs: DeltaInputs, state: DeltaState) -> tuple[Tensor, DeltaState]:
    """Return (o_BNV, the states) after one token of each of B sequences."""
    y_BC, conv_BWC = short_conv_step(inputs.qkv_TC, inputs.weight_CW, state.conv_SWC)
    rows = *inputs.heads(y_BC), inputs.log_decay_TN, inputs.beta_TN
    o_BNV, state_BNHV = gated_delta_step(*rows, state.state_SNHV)
    return o_BNV, DeltaState(conv_BWC, state_BNHV)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TreeSequences:
    """The prompts and the branches of a batch's trees as two layers of sequences."""

    prompts: SequenceLayout
    branches: SequenceLayout
    rows_T: Tensor
    """Rows of all prompts, then of all branches."""
    places_T: Tensor
    """Index of each row in rows_T."""
    parents_S: Tensor
    """Prompt of each branch."""
    nth: tuple[tuple[Tensor, Tensor], ...]
    """For the first branch of every tree, the second, ...: the prompts, the branches."""

    @classmethod
    def of(cls, trees: Sequence[Tree], device: torch.device | str = "cpu") -> "TreeSequences":
        """Return the sequences of trees that together cover the rows 0..T-1."""
        prompts, branches, parents = [], [], []
        nth: list[list[tuple[int, int]]] = []
        for index, tree in enumerate(trees):
            prompts.append(range(tree.start, tree.start + tree.prompt_tokens))
            row = prompts[-1].stop
            for number, length in enumerate(length for length in tree.branch_tokens if length):
                nth += [[]] * (number == len(nth))
                nth[number] = [*nth[number], (index, len(branches))]
                branches.append(range(row, row + length))
                parents.append(index)
                row += length
        rows = [row for sequence in (*prompts, *branches) for row in sequence]
        rows_T = sent(torch.tensor(rows, dtype=torch.long), device)
        return cls(
            prompts=SequenceLayout.of([len(p) for p in prompts], device),
            branches=SequenceLayout.of([len(b) for b in branches], device),
            rows_T=rows_T,
            places_T=rows_T.argsort(),
            parents_S=sent(torch.tensor(parents, dtype=torch.long), device),
            nth=tuple(tuple(sent(torch.tensor(pairs), device).unbind(1)) for pairs in nth),
        )


def mix_trees(inputs: DeltaInputs, trees: TreeSequences) -> Tensor:
    """Return o_TNV; the prompts start from zeros. Differentiable and deterministic."""
    num_prompt_rows = len(trees.prompts.places_T)
    prompt_rows, branch_rows = trees.rows_T.split((num_prompt_rows, len(trees.rows_T) - num_prompt_rows))
    zeros = DeltaState.zeros(inputs.shape, len(trees.prompts.lengths), inputs.qkv_TC)
    o_TNV, state = mix(inputs.rows(prompt_rows), trees.prompts, zeros)
    if len(branch_rows):
        started = DeltaState(*(_Branched.apply(x, trees) for x in state))
        o_TNV = torch.cat((o_TNV, mix(inputs.rows(branch_rows), trees.branches, started)[0]))
    return o_TNV[trees.places_T]


class _Branched(torch.autograd.Function):
    """Return the prompts' states, one for each branch."""

    @staticmethod
    def forward(ctx, x_P, trees):
        ctx.trees, ctx.num_prompts = trees, len(x_P)
        return x_P[trees.parents_S]

    @staticmethod
    def backward(ctx, dx_S):  # type: ignore[override]
        dx_P = dx_S.new_zeros(ctx.num_prompts, *dx_S.shape[1:], dtype=torch.float32)
        for prompts, branches in ctx.trees.nth:  # no call adds to a prompt twice: the order is fixed
            dx_P.index_add_(0, prompts, dx_S[branches].float())
        return dx_P.to(dx_S.dtype), None
