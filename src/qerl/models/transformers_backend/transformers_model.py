"""A model that transformers' own code runs, with our quantized linears and adapters in the place of its
linears. It is what makes a family trainable that families/ does not describe: right, and slow.

    in a layer      nn.Linear -> SequenceLinear: packed weight, adapter (linear.py)
    routers         stay nn.Linear: a router's choice is not rounded
    everything else transformers' modules and tensors in the compute dtype: embedding, norms, convolutions,
                    experts that are one tensor
    head            its product in fp32

transformers_loader.py makes it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qerl.aqn.module_noise import ModuleNoise, add_noise
from qerl.aqn.noise_table import NoiseTable
from qerl.errors import UserError
from qerl.kernels.pointwise.matmul_fp32 import frozen_linear
from qerl.models.linear import QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.mixture import ExpertLinear
from qerl.models.transformers_backend.backend import language_limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds to import, which only this backend needs


class RunningPass:
    """The pass that runs now: transformers' code calls linears without one."""

    def __init__(self):
        self.linear_pass = PLAIN

    @contextlib.contextmanager
    def within(self, linear_pass: LinearPass) -> Iterator[None]:
        """Have linears multiply in this pass, within the context."""
        before = self.linear_pass
        try:
            self.linear_pass = linear_pass
            yield
        finally:
            self.linear_pass = before

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], ...]:
        """Return the contexts of a layer that runs now and, in the same pass, again later."""
        return contextlib.nullcontext(), self.within(self.linear_pass)


class SequenceLinear(QuantLinear):
    """A QuantLinear of inputs of any shape [..., K]."""

    running: RunningPass

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y_TN = super().forward(x.reshape(-1, x.shape[-1]), self.running.linear_pass)
        return y_TN.unflatten(0, x.shape[:-1])


class FloatHead(nn.Module):
    """A head whose logits are fp32, as those of our decoder (matmul_fp32.py)."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, x: Tensor) -> Tensor:
        y_TV = frozen_linear(x.reshape(-1, x.shape[-1]), self.weight)
        return (y_TV if self.bias is None else y_TV + self.bias).unflatten(0, x.shape[:-1])


class TransformersModel(nn.Module):
    """A PolicyModel (policy_model.py). The parameters that need a gradient are the adapter's."""

    name_prefix = ""
    architecture = None

    def __init__(self, model: "PreTrainedModel", compute: torch.dtype, device: torch.device):
        """model: with weights."""
        super().__init__()
        self.model, self.compute, self.device = model, compute, device
        self.family = type(model).__name__
        self.max_positions, self.width, self.vocab_size = language_limits(model.config)
        self.norms: list[ModuleNoise] = add_noise(model, self.width)
        self.noise_table = NoiseTable(self.norms)
        self.notices: Sequence[str] = ()
        """Lines for the user about how it was loaded."""
        self.running = RunningPass()
        for _, linear in self.linears():
            assert isinstance(linear, SequenceLinear)
            linear.running = self.running

    def linears(self) -> Iterator[tuple[str, QuantLinear]]:
        """Yield every quantized linear with its name in transformers' model."""
        return ((name, m) for name, m in self.model.named_modules() if isinstance(m, QuantLinear))

    def expert_linears(self) -> Iterator[tuple[str, ExpertLinear]]:
        """Yield nothing: experts are tensors of transformers' modules."""
        return iter(())

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the argument: the forward passes of TransformersEngine return logits already."""
        return hidden_TD

    def checkpoint_layers(self) -> None:
        """Keep only each layer's input for the backward pass."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not self.model.supports_gradient_checkpointing:
            reason = f"transformers' {self.family} has none; set it to none"
            raise UserError(f"learn.gradient_checkpointing: {reason}")
        enable = getattr(self.model, "activation_checkpointing_enable", None)  # the other is its former name
        options = {"use_reentrant": False, "context_fn": self.running.contexts}
        (enable or self.model.gradient_checkpointing_enable)(options)
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # of the layer alone: modules in it stay in eval mode, without dropout

    @property
    def num_bytes(self) -> int:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        packed = (t for _, linear in self.linears() for t in linear.tensors)
        return sum({id(t): t.nbytes for t in (*frozen, *self.model.buffers(), *packed)}.values())
