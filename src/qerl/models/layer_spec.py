"""The linears and norms of one decoder layer: names, widths, and which linears read the same input.

    group     linears                    reads                            in_width   out_widths
    qkv       q_proj | k_proj | v_proj   input_layernorm(h)               D          N H | K H | K H
    o         o_proj                     the attention's output           N H        D
    gate_up   gate_proj | up_proj        post_attention_layernorm(h)      D          F | F
    down      down_proj                  silu(gate) * up                  F          D

In a layer with a mixture of experts, in the place of gate | up and down:

    router    router                     post_attention_layernorm(h)      D          E, not quantized
    experts   gate_up_proj               rows sorted by expert            D          2 F, each of E experts
              down_proj                  silu(gate) * up                  F          D, each of E experts

A layer with Gated DeltaNet has in the place of q | k | v the linears of `delta_net.py`, and out_proj in that
of o; gated attention has a q_proj of width 2 N H. Norms before and after are those of Architecture.norms.
Names are Hugging Face's, relative to the layer ("self_attn.q_proj"). The model, its loaders and writers, the
memory plan, the engine and the benchmarks take a layer's geometry from here.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.architecture import Architecture, LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """LinearSpec(name="self_attn.q_proj", in_width=3584, out_width=3584, has_bias=True)"""

    name: str
    in_width: int
    out_width: int
    has_bias: bool
    is_quantized: bool = True
    """False: the weight stays in BF16, whatever model.format is."""

    @property
    def short_name(self) -> str:
        """Name without its block: "q_proj", as adapter.target_modules has it."""
        return self.name.rpartition(".")[2]

    @property
    def num_weights(self) -> int:
        return self.in_width * self.out_width


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearGroupSpec:
    """Linears of a layer that read the same input."""

    name: str
    linears: tuple[LinearSpec, ...]
    input_from: str | None
    """Module that makes the input: multiplying its output rows by s multiplies the input's channels by s.
    None: there is no such module, or the residual stream itself is read."""

    @property
    def is_quantized(self) -> bool:
        """False if all of its weights stay in BF16."""
        return any(linear.is_quantized for linear in self.linears)

    @property
    def in_width(self) -> int:
        return self.linears[0].in_width

    @property
    def out_widths(self) -> tuple[int, ...]:
        return tuple(linear.out_width for linear in self.linears)

    @property
    def out_width(self) -> int:
        return sum(self.out_widths)

    @property
    def num_weights(self) -> int:
        return self.in_width * self.out_width

    def num_adapter_weights(self, rank: int) -> int:
        """Number of weights in A and B of all its linears."""
        return rank * sum(self.in_width + width for width in self.out_widths)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpec:
    """One linear of each expert, as a stack: ExpertSpec(name="mlp.experts.down_proj", num_experts=128,
    in_width=768, out_width=2048, has_bias=False)"""

    name: str
    num_experts: int
    in_width: int
    out_width: int
    has_bias: bool

    @property
    def num_weights(self) -> int:
        return self.num_experts * self.in_width * self.out_width


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One decoder layer; `layer_spec(architecture)` makes it."""

    qkv: LinearGroupSpec
    o: LinearGroupSpec
    mlp: tuple[LinearGroupSpec, ...]
    """gate | up and down, or the router."""
    experts: tuple[ExpertSpec, ...]
    """gate_up_proj and down_proj; none without a mixture."""
    kind: LayerKind
    norm_widths: dict[str, int]
    """Width of each norm by its name; q_norm and k_norm act on one head or on all."""
    other_shapes: dict[str, tuple[int, ...]]
    """Shapes of the layer's other tensors by their names."""

    @property
    def groups(self) -> tuple[LinearGroupSpec, ...]:
        """Groups in the order in which a forward pass multiplies by them."""
        return self.qkv, self.o, *self.mlp

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return tuple(linear for group in self.groups for linear in group.linears)


def layer_specs(a: Architecture) -> list[LayerSpec]:
    """Return the geometry of each layer."""
    forms = _forms(a)
    specs = {form: layer_spec(a, *form) for form in dict.fromkeys(forms)}
    return [specs[form] for form in forms]


@functools.lru_cache(maxsize=4)
def counted_specs(a: Architecture) -> tuple[tuple[LayerSpec, int], ...]:
    """Return the geometry of each kind of layer, with the number of layers of this kind."""
    return tuple((layer_spec(a, *form), count) for form, count in Counter(_forms(a)).items())


def _forms(a: Architecture) -> list[tuple[LayerKind, frozenset[str]]]:
    """Return each layer's kind, with the names in the layer of linears in Architecture.bf16_linears."""
    names: list[set[str]] = [set() for _ in a.kinds]
    for name in a.bf16_linears:
        _, layer, linear = name.split(".", 2)
        names[int(layer)].add(linear)
    return list(zip(a.kinds, map(frozenset, names), strict=True))


def kinds_of_linears(a: Architecture) -> tuple[LinearSpec, ...]:
    """Return the linears of one layer of each kind; of those of the same name the last kind's."""
    return tuple({x.name: x for kind in a.kinds for x in layer_spec(a, kind).linears}.values())


def adapter_targets(a: Architecture, adapter: AdapterConfig) -> tuple[str, ...]:
    """Return the linears that get an adapter: adapter.target_modules, but those of an MLP that no layer has,
    because all have experts; with adapter.router the router too."""
    if a.mixture is None:
        return adapter.target_modules
    names = {linear.short_name for linear in kinds_of_linears(a)}
    mlp = {"gate_proj", "up_proj", "down_proj"} - names
    targets = tuple(target for target in adapter.target_modules if target not in mlp)
    return (*targets, "router") if adapter.router and "router" not in targets else targets


def check_dense(a: Architecture, what: str) -> None:
    """Raise UserError for a mixture of experts, which `what` does not support."""
    if a.mixture is not None:
        raise UserError(f"{what} does not support a mixture of experts, which {a.family} is")


def layer_spec(
    a: Architecture, kind: LayerKind | None = None, bf16_linears: Collection[str] = ()
) -> LayerSpec:
    """Return the geometry of the layers of this kind; None: of the first layer. bf16_linears: names in the
    layer of linears that stay in BF16."""
    kind = a.kind(0) if kind is None else kind
    qkv, o, norm_widths, other_shapes = _MIXERS[kind.mixer](a, kind)
    mlp, experts = _MLPS[kind.mlp](a)
    if a.mixture is not None and a.mixture.stored == "blocks":
        bf16_linears = {*bf16_linears, *(linear.name for group in (qkv, o) for linear in group.linears)}
    qkv, o, *mlp = (_with_bf16(group, bf16_linears) for group in (qkv, o, *mlp))
    return LayerSpec(
        kind=kind,
        qkv=qkv,
        o=o,
        mlp=tuple(mlp),
        experts=experts,
        norm_widths=dict.fromkeys(a.norms.names, a.width) | norm_widths,
        other_shapes=other_shapes | ({"layer_scalar": (1,)} if a.layer_scalar else {}),
    )


def _group(
    name: str, block: str, input_from: str | None, in_width: int, has_bias: bool, out_widths: dict[str, int]
) -> LinearGroupSpec:
    linears = tuple(
        LinearSpec(name=f"{block}.{short}", in_width=in_width, out_width=out_width, has_bias=has_bias)
        for short, out_width in out_widths.items()
    )
    return LinearGroupSpec(name=name, linears=linears, input_from=input_from)


def _with_bf16(group: LinearGroupSpec, names: Collection[str]) -> LinearGroupSpec:
    """Return the group with the linears of these names in BF16."""
    linears = (
        dataclasses.replace(linear, is_quantized=False) if linear.name in names else linear
        for linear in group.linears
    )
    return dataclasses.replace(group, linears=tuple(linears))


def _dense(a: Architecture) -> tuple[tuple[LinearGroupSpec, ...], tuple[ExpertSpec, ...]]:
    """Return gate | up and down."""
    gate_up = {"gate_proj": a.ff_width, "up_proj": a.ff_width}
    groups = (
        _group("gate_up", "mlp", a.norms.before_mlp, a.width, a.mlp_bias, gate_up),
        _group("down", "mlp", "mlp.up_proj", a.ff_width, a.mlp_bias, {"down_proj": a.width}),
    )
    return groups, ()


def _experts(a: Architecture) -> tuple[tuple[LinearGroupSpec, ...], tuple[ExpertSpec, ...]]:
    """Return the router and the stacks of experts."""
    mixture = a.mixture
    assert mixture is not None
    router = _group("router", "mlp", None, a.width, mixture.has_bias, {"router": mixture.num_experts})
    widths = {"gate_up_proj": (a.width, 2 * mixture.width), "down_proj": (mixture.width, a.width)}
    shared: dict[str, Any] = {"num_experts": mixture.num_experts, "has_bias": mixture.has_bias}
    stacks = (
        ExpertSpec(name=f"mlp.experts.{name}", in_width=k, out_width=n, **shared)
        for name, (k, n) in widths.items()
    )
    return (_with_bf16(router, ["mlp.router"]),), tuple(stacks)


_MLPS = {"dense": _dense, "experts": _experts}
_Mixer = tuple[LinearGroupSpec, LinearGroupSpec, dict[str, int], dict[str, tuple[int, ...]]]


def _attention(a: Architecture, kind: LayerKind) -> _Mixer:
    """Return q | k | v, o, and the widths and shapes of the other tensors."""
    block, heads = "self_attn", a.kv_heads(kind)
    q_width, kv_width = a.num_heads * heads.size, heads.num * heads.size
    qkv = {"q_proj": q_width * (1 + a.attention_gate), "k_proj": kv_width}
    if kind.has_values:
        qkv["v_proj"] = kv_width
    head_norms: dict[str, int] = {}
    if a.qk_norm:
        is_over_head = a.qk_norm_over == "head"
        q_size, k_size = (heads.size, heads.size) if is_over_head else (q_width, kv_width)
        head_norms = {f"{block}.q_norm": q_size, f"{block}.k_norm": k_size}
    values = None if a.value_norm else f"{block}.v_proj"
    return (
        _group("qkv", block, a.norms.before_attention, a.width, a.qkv_bias, qkv),
        _group("o", block, values, q_width, a.output_bias, {"o_proj": a.width}),
        head_norms,
        {f"{block}.sinks": (a.num_heads,)} if a.attention_sinks else {},
    )


def _delta_net(a: Architecture, kind: LayerKind) -> _Mixer:
    """Return the same for Gated DeltaNet."""
    shape, block = a.delta, "linear_attn"
    assert shape is not None
    parts = {
        "in_proj_qkv": shape.channels,
        "in_proj_z": shape.value_width,
        "in_proj_b": shape.num_value_heads,
        "in_proj_a": shape.num_value_heads,
    }
    if a.delta_projections == "by_head":
        parts = {"in_proj_qkvz": shape.channels + shape.value_width, "in_proj_ba": 2 * shape.num_value_heads}
    shapes: dict[str, tuple[int, ...]] = {f"{block}.conv1d.weight": (shape.channels, 1, shape.num_taps)}
    return (
        _group("qkv", block, a.norms.before_attention, a.width, False, parts),
        _group("o", block, None, shape.value_width, False, {"out_proj": a.width}),
        {f"{block}.norm": shape.value_size},
        shapes | dict.fromkeys((f"{block}.A_log", f"{block}.dt_bias"), (shape.num_value_heads,)),
    )


_MIXERS: dict[str, Callable[[Architecture, LayerKind], _Mixer]] = {
    "attention": _attention,
    "delta": _delta_net,
}
