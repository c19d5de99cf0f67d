"""The model and its adapter."""

import dataclasses
import math
import re
from typing import Literal

from qerl.config.check import check_positive
from qerl.config.conflicts import check_conflicts
from qerl.errors import UserError, require

_NAME = re.compile(r"\w+")
Scales = Literal["auto", "plain", "mse"]


def chosen_scales(scales: Scales, *, uses_gptq: bool) -> Literal["plain", "mse"]:
    """Return the block scales that are meant: auto is mse with GPTQ, which was measured with no other."""
    if scales != "auto":
        return scales
    return "mse" if uses_gptq else "plain"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = "smollm2-135m-instruct"
    """A folder of safetensors, a .gguf file, a hub id such as Qwen/Qwen2.5-7B-Instruct, or the built-in
    smollm2-135m-instruct."""

    backend: Literal["auto", "qerl", "transformers"] = "auto"
    """The code that runs the model. qerl: the package's decoder, for the families that it supports.
    transformers: the class in transformers, with quantized linears and adapters in it, slowly. auto: qerl if
    it supports the class, else transformers."""

    format: Literal["nvfp4", "mxfp4", "nf4", "fp8", "fp8-flow", "int8", "bf16"] = "nvfp4"
    """Format of the frozen linear weights. A checkpoint that is already NVFP4 is loaded as it is. fp8-flow:
    FP8 weights whose inputs are quantized to FP8 too, in sampling and in learning."""

    scales: Scales = "auto"
    """Choice of the block scales where float weights are quantized to nvfp4 or mxfp4. plain: map the largest
    weight of a block to the largest code. mse: pick the candidate with the least squared error. auto: mse
    with model.calibrate, else plain."""

    calibrate: Literal["none", "gptq", "auto"] = "none"
    """gptq: before training, choose the NVFP4 codes of a float checkpoint so that each layer's outputs on the
    task's prompts and the model's own samples change least. The run writes the result to its folder base and
    trains it. This keeps what a merged or fine-tuned model learned, which plain rounding may undo. auto: gptq
    where it takes less time than the first evaluation, by an estimate; else none."""

    sampler_format: Literal["fp8", "fp8-flow", "int8"] | None = None
    """Format of a second copy of the linear weights, for the sampler only (FlashRL). The two policies then
    differ, which algo.importance corrects. None: sampler and learner share one copy."""

    head_format: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """Format of the LM head, in sampling and in learning. bf16: in model.dtype, like the embedding,
    with which a tied head shares its table. nvfp4 needs a vocabulary divisible by 64 and a width divisible
    by 16."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a CUDA device if there is one."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of activations and of the adapter's working copies. auto: bf16 where the device has native bf16
    products, else fp32."""

    operand: Literal["auto", "packed", "resident"] = "auto"
    """packed: weights are unpacked for each product. resident: unpacked weights are kept in memory too, with
    the same values, for devices without fused kernels. auto: resident on a CPU."""

    def __post_init__(self):
        check_conflicts(self, "model")

    @property
    def loading(self) -> str:
        """Name of the loading of the model, for a line or a bar of progress."""
        return f"loading {self.path} in {self.format}"

    @property
    def block_scales(self) -> Literal["plain", "mse"]:
        """model.scales, with auto replaced."""
        return chosen_scales(self.scales, uses_gptq=self.calibrate != "none")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    kind: Literal["lora", "full"] = "lora"
    """lora: low-rank adapters beside frozen weights. full: the weights of target_modules are trained, from
    fp32 masters; needs model.format bf16 and ignores rank and alpha."""

    rank: int = 32
    """LoRA rank R."""

    alpha: float = 32.0
    """LoRA scaling: the adapter's output is multiplied by alpha / rank."""

    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""

    rank_pattern: tuple[tuple[str, int], ...] = ()
    """Other ranks, as q_proj 8 'layers\\.0\\..*' 16: of the linears whose full name, such as
    model.layers.0.self_attn.q_proj, ends in a match of the regular expression. The first match counts."""

    alpha_pattern: tuple[tuple[str, float], ...] = ()
    """Other values of alpha, in the same way."""

    dropout: float = 0.0
    """Share of the adapter's inputs that are dropped while learning, never while sampling."""

    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The linears with an adapter, by their name or the last parts of their full name; or one regular
    expression of whole full names, as '.*\\.layers\\.[0-3]\\..*_proj'; or all-linear."""

    layers_to_transform: tuple[int, ...] | None = None
    """The layers whose linears have an adapter, the first is 0. None: all layers. Adapters of experts are in
    all layers."""

    train_norms: bool = False
    """Train the RMSNorms before the attention and the MLP of every layer too (in Gemma and OLMo also those
    after), as QeRL's scripts do. AQN adds its noise to the trained weights. PEFT reads them as
    modules_to_save; they have no weight decay."""

    modules_to_save: tuple[Literal["embed_tokens", "lm_head"], ...] = ()
    """Train the embedding or the LM head whole, where the model does not tie them: 16 bytes a weight besides
    the model's own. PEFT's field of this name has the norms of train_norms too."""

    router: bool = False
    """Train the routers of a mixture of experts too, with adapters of this rank."""

    experts: Literal["none", "per_expert", "shared_a", "shared_b"] = "none"
    """Adapters of the experts of a mixture. per_expert: A and B of each. shared_a, shared_b: the experts of a
    layer share one A, or one B."""

    expert_rank: int = 4
    """LoRA rank of the experts' adapters. They are scaled by alpha / rank, like all adapters."""

    init_from: str | None = None
    """A PEFT adapter folder to start from. A KL penalty still uses the model without adapter as reference."""

    def __post_init__(self):
        check_positive(self, "rank", "alpha", "expert_rank", prefix="adapter.")
        require(0 <= self.dropout < 1, f"adapter.dropout must be in [0, 1), got {self.dropout}")
        check_conflicts(self, "adapter")
        has_any = len(self.target_modules) > 0
        require(has_any, "adapter.target_modules must name at least one linear, got none")
        for field in ("target_modules", "rank_pattern", "alpha_pattern"):
            self._check_patterns(field)
        layers = self.layers_to_transform
        is_valid = layers is None or (len(layers) > 0 and min(layers) >= 0)
        require(is_valid, f"adapter.layers_to_transform must have numbers of layers from 0 on, got {layers}")

    def _check_patterns(self, field: str) -> None:
        """Raise UserError for a regular expression that is none, or a number that is not positive."""
        for entry in getattr(self, field):
            pattern, number = (entry, 1) if isinstance(entry, str) else entry
            require(number > 0, f"adapter.{field} must have positive numbers, got {number} for {pattern}")
            try:
                re.compile(pattern)
            except re.error as error:
                what = f"{pattern!r} is not a regular expression: {error}"
                raise UserError(f"adapter.{field}: {what}") from error

    @property
    def selects_names(self) -> bool:
        """True if the last part of a linear's name does not say whether it has an adapter, and which."""
        is_plain = all(_NAME.fullmatch(entry) for entry in self.target_modules)
        return bool(self.rank_pattern or self.alpha_pattern) or not is_plain

    @property
    def max_rank(self) -> int:
        """The largest rank that a linear may have."""
        return max(self.rank, *(rank for _, rank in self.rank_pattern), 0)

    @property
    def trains_whole(self) -> bool:
        """True if weights are trained beside the adapters of linears."""
        return self.train_norms or len(self.modules_to_save) > 0

    def scaling(self, rank: int, alpha: float | None = None) -> float:
        """Return the factor of an adapter of this rank; alpha: that of adapter.alpha if None."""
        value = self.alpha if alpha is None else alpha
        return value / (math.sqrt(rank) if self.use_rslora else rank)
