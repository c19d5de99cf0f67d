"""The description of a decoder: its shape, what its layers are made of, and how a checkpoint names its parts.

`families/` makes it from a checkpoint's config.json. The decoder, the loaders and writers, the memory plan
and the engine read nothing else of a family.
"""

import dataclasses
from typing import Literal, NamedTuple

from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.kernels.pointwise.swiglu import Activation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Settings of the rotary position embedding. Each kind uses some of them (rope.py)."""

    kind: str
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    """llama3, yarn, longrope: the maximum length before the frequencies were scaled."""
    low_frequency: float = 1.0
    """llama3: wavelengths over original_positions / low_frequency are scaled by the whole factor."""
    high_frequency: float = 4.0
    """llama3: wavelengths under original_positions / high_frequency are not scaled."""
    beta_fast: float = 32.0
    """yarn: dimensions with at least this many turns within original_positions are not scaled."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer turns than this are scaled by the whole factor."""
    is_truncated: bool = True
    """yarn: round the two limits outwards to whole dimensions."""
    magnitude: float | None = None
    """yarn, longrope: factor of cosine and sine; None derives it from `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    divisors: tuple[float, ...] = ()
    """longrope: each frequency's divisor."""
    num_turned: int | None = None
    """proportional: pairs that are rotated, the first ones; the others have angle 0."""
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / original_positions))."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """LayerKind(window=1024, rope="local"): attention to the last 1,024 positions, with its own rope."""

    mixer: Literal["attention", "delta"] = "attention"
    """The part that mixes tokens: attention, or Gated DeltaNet, which has recurrent states instead of keys
    and values (delta_net.py)."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all before it."""
    rope: Literal["main", "local", "none"] = "main"
    """Architecture.rope, Architecture.local_rope, or no rotation."""
    mlp: Literal["dense", "experts"] = "dense"
    """experts: a mixture of them, Architecture.mixture."""
    head_size: int | None = None
    """None: Architecture.head_size."""
    num_kv_heads: int | None = None
    """None: Architecture.num_kv_heads."""
    has_values: bool = True
    """False: there is no v_proj; values are keys before their norm and rotation."""


class KVHeads(NamedTuple):
    """The heads of keys and values in one layer."""

    num: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NormNames:
    """A layer's norms by their places, with the checkpoint's names; None: there is no norm in this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """The norm of the attention's output, before it is added to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def noised(self) -> tuple[str, str]:
        """The norm of the attention and that of the MLP that AQN adds noise to: the one before, if there is
        one, else the one after."""
        attention, mlp = self.before_attention or self.after_attention, self.before_mlp or self.after_mlp
        assert attention is not None and mlp is not None
        return attention, mlp

    @property
    def names(self) -> tuple[str, ...]:
        """All norms, those with noise first."""
        places = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return *self.noised, *(name for name in places if name and name not in self.noised)


PRE_NORMS = NormNames()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredLinear:
    """A linear of the checkpoint that has another name, or holds the rows of several linears, one after the
    other: StoredLinear(name="mlp.gate_up_proj", holds=("mlp.gate_proj", "mlp.up_proj"))."""

    name: str
    holds: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Mixture(num_experts=64, num_chosen=8, width=1024, softmax_over="all", stored="separate"): OLMoE's."""

    num_experts: int
    num_chosen: int
    """Experts of each token: those with the largest router logits."""
    width: int
    """Feed-forward width of one expert."""
    softmax_over: Literal["all", "chosen"]
    """Experts whose weights sum to 1. chosen: also softmax over all, divided by the sum of the chosen."""
    stored: Literal["separate", "stacked", "transposed", "blocks"]
    """The experts' tensors in the checkpoint (expert_names.py). blocks: in MXFP4; all else is in BF16."""
    has_bias: bool = False
    """Router and experts have biases."""
    swiglu_alpha: float | None = None
    """Factor of the clamped SwiGLU of gpt-oss (kernels/experts/clamped_swiglu.py); None: plain SwiGLU."""
    swiglu_limit: float = 7.0
    is_interleaved: bool = False
    """Rows of gate and up alternate: gate 0, up 0, gate 1, ..."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The shape of a decoder; `families.from_hf_config(json)` makes it."""

    family: str
    """Name of transformers' class."""
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ff_width: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    qk_norm_over: Literal["head", "projection"] = "head"
    """Norms of queries and keys act on each head, or on all heads together."""
    local_rope: Rope | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    """The kind of each layer; empty: every layer is LayerKind()."""
    norms: NormNames = PRE_NORMS
    activation: Activation = "silu"
    """Function of the MLP's gate."""
    rotary_size: int | None = None
    """Elements of a head that are rotated, its first ones; None: all."""
    rope_is_interleaved: bool = False
    """Pairs are neighbors (2 j, 2 j + 1), not (j, j + H / 2)."""
    attention_scale: float | None = None
    """Factor of q k^T; None: 1 / sqrt(head_size)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    norm_offset: float = 0.0
    """A number added to the stored weights of norms."""
    attention_gate: bool = False
    """q_proj has a gate behind each head's query; its sigmoid multiplies the head's output."""
    value_norm: bool = False
    """Values are divided by the RMS of each head."""
    layer_scalar: bool = False
    """A stored number multiplies the residual stream after each layer."""
    attention_sinks: bool = False
    """Each head has a logit that takes part in the softmax and has no value."""
    mixture: Mixture | None = None
    """The experts of the layers whose kind has them."""
    delta: DeltaShape | None = None
    """Shape of the layers with Gated DeltaNet."""
    delta_projections: Literal["by_part", "by_head"] = "by_part"
    """Linears of q | k | v, z, b and a; or two, whose rows are those of one key head after the other."""
    stored_linears: tuple[StoredLinear, ...] = ()
    """The layer's linears that the checkpoint stores in another way."""
    bf16_linears: frozenset[str] = frozenset()
    """Linears that a quantized checkpoint stores in full precision, by the decoder's names: they stay in
    BF16, whatever model.format is."""
    part_of: str | None = None
    """The multimodal class of the checkpoint whose language part this is."""

    def kind(self, layer_index: int) -> LayerKind:
        return self.layer_kinds[layer_index] if self.layer_kinds else LayerKind()

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return self.layer_kinds or (LayerKind(),) * self.num_layers

    @property
    def layers_with_experts(self) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(self.kinds) if kind.mlp == "experts")

    def layers_with(self, mixer: str) -> tuple[int, ...]:
        """Return the indices of the layers with this mixer."""
        return tuple(index for index, kind in enumerate(self.kinds) if kind.mixer == mixer)

    def kv_heads(self, kind: LayerKind) -> KVHeads:
        return KVHeads(kind.num_kv_heads or self.num_kv_heads, kind.head_size or self.head_size)

    @property
    def each_kv_heads(self) -> tuple[KVHeads, ...]:
        """The heads of each layer with attention."""
        return tuple(self.kv_heads(kind) for kind in self.kinds if kind.mixer == "attention")

    @property
    def kv_elements(self) -> int:
        """Elements of one token's keys in all layers; values have as many."""
        return sum(heads.num * heads.size for heads in self.each_kv_heads)

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.rotated_by("main")

    def rotated_by(self, rope: str) -> int:
        """Return the elements of a head that this LayerKind.rope rotates."""
        if self.rotary_size is not None:
            return self.rotary_size
        sizes = (self.kv_heads(kind).size for kind in self.kinds if kind.rope == rope)
        return next(sizes, self.head_size)
