"""Learning: optimizer, schedule and batches."""

import dataclasses
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearnConfig:
    learning_rate: float = 1e-5
    """Peak learning rate of the adapter."""

    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up; linear and cosine reach the minimum one update after the last."""

    min_lr_ratio: float = 0.0
    """Minimum of linear and cosine, as a share of learning_rate."""

    warmup_ratio: float = 0.1
    """Share of all updates over which the rate rises linearly from zero."""

    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates of the first and second moment."""

    adam_epsilon: float = 1e-8
    """AdamW's term in the denominator."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""

    max_nonfinite_updates: int = 8
    """An update with a non-finite gradient is skipped; this many in a row end the run."""

    updates_per_step: int = 1
    """Optimizer updates per step; each uses an equal share of the groups, or of the samples if there are more
    updates than groups."""

    num_iterations: int = 1
    """Number of passes over the step's samples."""

    read_share: float = 1.0
    """Share of the groups without a gradient, those of equal rewards, that the learner reads for its metrics
    and that stand for all of them there. It changes no update. Such groups were half of a run on GSM8K."""

    max_tokens_per_microbatch: int | None = None
    """Maximum number of packed tokens per forward and backward pass; the gradient does not depend on it.
    One prompt with one sample may be more. None: 8,192, and on a GPU more as far as memory is free: 16,384 if
    the unpacked operands still fit beside them, and for a model of less than about 6 billion weights up to
    65,536, since with fewer the GPU would wait for the host. A resumed run keeps its size if it still fits;
    two fresh runs with equal bits need it set."""

    logprob_chunk_tokens: int = 1024
    """Number of rows of logits in memory at a time, 6 bytes a logit on a GPU. An update of Qwen2.5 7B is 1 to
    2 % slower with 512, and no faster with 2,048."""

    gradient_checkpointing: Literal["auto", "none", "layer", "offload"] = "auto"
    """Activations kept for the backward pass. none: all activations. layer: each layer's input. offload: the
    same, in host memory as far as it has room. auto: the first of these whose planned memory fits the GPU;
    none on a CPU."""

    backward: Literal["bf16", "int8"] = "bf16"
    """Numbers whose products give the gradient of a linear's input. int8: rotated and rounded to 8-bit
    integers, and so are gate_proj and up_proj where a layer is recomputed. The pass whose log-probabilities
    are learned from, the adapter's own products, experts and the head stay as they are. It needs an H100 or
    H200, model.dtype bf16, adapter.kind lora without dropout, and another format than fp8-flow."""

    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps the moments in 8 bits and needs the package bitsandbytes."""

    @property
    def microbatch_tokens(self) -> int:
        """max_tokens_per_microbatch; where that is None, what a memory plan starts from."""
        return 8192 if self.max_tokens_per_microbatch is None else self.max_tokens_per_microbatch

    def __post_init__(self):
        check_positive(self, "learning_rate", "adam_epsilon", "max_grad_norm", prefix="learn.")
        check_positive(self, "updates_per_step", "num_iterations", "max_nonfinite_updates", prefix="learn.")
        share = self.read_share
        require(0 < share <= 1, f"learn.read_share must be above 0 and at most 1, got {share}")
        check_positive(self, "max_tokens_per_microbatch", "logprob_chunk_tokens", prefix="learn.")
        check_not_negative(self, "weight_decay", prefix="learn.")
        for name in ("warmup_ratio", "min_lr_ratio"):
            ratio = getattr(self, name)
            require(0 <= ratio <= 1, f"learn.{name} must be in [0, 1], got {ratio}")
        require(all(0 <= beta < 1 for beta in self.betas), f"learn.betas must be in [0, 1), got {self.betas}")
