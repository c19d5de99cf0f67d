"""The linears and norms of one decoder layer: names, widths, and which linears read the same input.

    group     linears                    reads                            in_width   out_widths
    qkv       q_proj | k_proj | v_proj   input_layernorm(h)               D          N H | K H | K H
    o         o_proj                     the attention's output           N H        D
    gate_up   gate_proj | up_proj        post_attention_layernorm(h)      D          F | F
    down      down_proj                  silu(gate) * up                  F          D

Norms before and after are those of Architecture.norms. Names are Hugging Face's, relative to the layer
("self_attn.q_proj"). The model, its loaders and writers, the memory plan, the engine and the benchmarks take
a layer's geometry from here.
"""

import dataclasses

from qerl.models.architecture import Architecture


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """LinearSpec(name="self_attn.q_proj", in_width=3584, out_width=3584, has_bias=True)"""

    name: str
    in_width: int
    out_width: int
    has_bias: bool

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
    None: the residual stream itself is read."""

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
class LayerSpec:
    """One decoder layer; `layer_spec(architecture)` makes it."""

    qkv: LinearGroupSpec
    o: LinearGroupSpec
    gate_up: LinearGroupSpec
    down: LinearGroupSpec
    norm_widths: dict[str, int]
    """Width of each norm by its name; q_norm and k_norm act on one head or on all."""

    @property
    def groups(self) -> tuple[LinearGroupSpec, LinearGroupSpec, LinearGroupSpec, LinearGroupSpec]:
        """Groups in the order in which a forward pass multiplies by them."""
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return tuple(linear for group in self.groups for linear in group.linears)


def layer_spec(a: Architecture) -> LayerSpec:
    """Return the geometry that all layers of this architecture have."""
    q_width, kv_width = a.num_heads * a.head_size, a.num_kv_heads * a.head_size

    def group(
        name: str, input_from: str | None, in_width: int, has_bias: bool, **out_widths: int
    ) -> LinearGroupSpec:
        block = "self_attn" if name in ("qkv", "o") else "mlp"
        linears = tuple(
            LinearSpec(name=f"{block}.{short}", in_width=in_width, out_width=out_width, has_bias=has_bias)
            for short, out_width in out_widths.items()
        )
        return LinearGroupSpec(name=name, linears=linears, input_from=input_from)

    qkv = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    gate_up = {"gate_proj": a.ff_width, "up_proj": a.ff_width}
    head_norms = {}
    if a.qk_norm:
        is_over_head = a.qk_norm_over == "head"
        widths = (a.head_size, a.head_size) if is_over_head else (q_width, kv_width)
        head_norms = dict(zip(("self_attn.q_norm", "self_attn.k_norm"), widths, strict=True))
    return LayerSpec(
        qkv=group("qkv", a.norms.before_attention, a.width, a.qkv_bias, **qkv),
        o=group("o", "self_attn.v_proj", q_width, a.output_bias, o_proj=a.width),
        gate_up=group("gate_up", a.norms.before_mlp, a.width, a.mlp_bias, **gate_up),
        down=group("down", "mlp.up_proj", a.ff_width, a.mlp_bias, down_proj=a.width),
        norm_widths=dict.fromkeys(a.norms.names, a.width) | head_norms,
    )
