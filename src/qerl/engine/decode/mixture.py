"""A mixture of experts in a decode step: six launches, and no word of the host about who goes where.

    x = norm(h)    logits = router(x)    k of E experts a row, rows sorted by expert
    y = silu(gate) * up of x, of all experts    z = down(y), of all experts    h += sum of weight * z

moe_route.py and grouped_product.py have the kernels, grouped_hopper.py those for Hopper. A router with an
adapter, or not in BF16, multiplies by its module. The chosen ids are recorded in the cache's pages, as the
PyTorch path does. Adapters of experts take a launch more for each product; those of a rank that the kernels
do not have are copied, with zeros up to the next one.
"""

from bisect import bisect_left

from torch import Tensor

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.engine.decode.group_bank import with_rank
from qerl.engine.decode.layer import LayerStep, StepParts, StepRows
from qerl.formats import BF16
from qerl.kernels.experts import moe_route
from qerl.kernels.experts.grouped_product import (
    RANKS,
    Activation,
    AdapterRows,
    ExpertAdapter,
    TiledExperts,
    item_rows,
)
from qerl.kernels.experts.moe_route import MoERoute, Record
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.linear import QuantLinear
from qerl.models.mixture import ExpertLinear, MixtureMLP
from qerl.models.tiled_experts import ExpertRows, TiledStack, in_tile_order

_ADAPTER_ROWS = {
    ExpertRows.PLAIN: AdapterRows.AS_TILES,
    ExpertRows.GATE_UP: AdapterRows.GATE_UP,
    ExpertRows.ALTERNATING: AdapterRows.ALTERNATING,
}


class MixtureSteps:
    def __init__(self, parts: StepParts):
        device = parts.decoder.device
        self.parts, self.routes, self.products = parts, MoERoute(device), parts.grouped(device)

    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        mixture = a.mixture
        assert mixture is not None
        if not moe_route.supports(mixture.num_experts, mixture.num_chosen):
            return (
                f"they route to at most 16 of {moe_route.MAX_EXPERTS} experts,"
                f" here {mixture.num_chosen} of {mixture.num_experts}"
            )
        if mixture.width % 64:
            return f"they take experts whose width is a multiple of 64, here {mixture.width}"
        return None

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep:
        return _MixtureStep(self, layer_index, layer)


def stack_obstacle(decoder: Decoder) -> str | None:
    """Return why the kernels cannot multiply by this decoder's experts; None if they can."""
    for _, experts in decoder.expert_linears():
        if experts.a_work is not None and (rank := experts.a_work.shape[1]) > RANKS[-1]:
            return f"they take adapters of experts of ranks up to {RANKS[-1]}, here {rank}"
        if not isinstance(experts.weight, TiledStack):
            return "they take experts in NVFP4 or MXFP4"
    return None


def kernel_routers(decoder: Decoder) -> set[QuantLinear]:
    """Return the routers that moe_route.py multiplies; the others multiply by their modules."""
    mlps = (layer.mlp for layer in decoder.layers if isinstance(layer, Layer))
    return {m.router for m in mlps if isinstance(m, MixtureMLP) and _is_plain(m.router)}


def _is_plain(router: QuantLinear) -> bool:
    return isinstance(router.weight, BF16) and router.lora_A is None and router.full is None


class _MixtureStep:
    def __init__(self, shared: MixtureSteps, layer_index: int, layer: Layer):
        assert isinstance(layer.mlp, MixtureMLP) and layer.norms.before_mlp is not None
        arch = shared.parts.decoder.architecture
        self._shared, self._layer_index, self._mlp = shared, layer_index, layer.mlp
        self._norm: NoisedRMSNorm = getattr(layer, layer.norms.before_mlp)
        self._scale, mixture = arch.residual_scale, layer.mlp.mixture
        self._activation = Activation(mixture.swiglu_alpha, mixture.swiglu_limit)
        self.groups = tuple(map(_AdaptedStack, layer.mlp.stacks))
        self._gate_up, self._down = (group.experts for group in self.groups)

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        shrink, norm, shared = self._shared.parts.shrink, self._norm, self._shared
        noise, rows_B = norm.noise_of(rows.noise_rows_B)
        x_BD = shrink.norm(h_BD, norm.weight, noise, norm.eps, rows_M=rows_B)
        reads_noise = self._mlp.reads_noise
        router_x_BD = x_BD if reads_noise else shrink.norm(h_BD, norm.weight, None, norm.eps)
        logits_BE, mixture, state = self._logits(router_x_BD), self._mlp.mixture, rows.state
        routed = shared.routes.route(
            logits_BE,
            mixture.num_chosen,
            mixture.softmax_over,
            item_rows(len(h_BD), mixture.num_chosen, mixture.num_experts),
            state.positions_B[: len(h_BD)],
            Record(shared.parts.cache.routes_of(self._layer_index), state.tables_BX[: len(h_BD)]),
            None if shared.products.gathers else x_BD,
        )
        x = x_BD if routed.x_SK is None else routed.x_SK
        y_SF = shared.products.swiglu(x, self._gate_up, routed, self._activation)
        y_SD = shared.products.linear(y_SF, self._down, routed)
        return shared.routes.add(h_BD, y_SD, routed, mixture.num_experts, self._scale)

    def _logits(self, x_BD: Tensor) -> Tensor:
        router: QuantLinear = self._mlp.router
        if isinstance(router.weight, BF16) and _is_plain(router):
            return self._shared.routes.logits(x_BD, router.weight.weight, router.bias)
        return router(x_BD.float())


class _AdaptedStack:
    """A stack of experts with its adapters, as the kernels read them."""

    def __init__(self, linear: ExpertLinear):
        stack, bias = linear.weight, linear.bias
        assert isinstance(stack, TiledStack)
        in_order = None if bias is None else in_tile_order(bias, stack.rows)
        self._linear, self._adapter = linear, None
        if (parts := self._padded()) is not None:
            self._adapter = ExpertAdapter(*parts, linear.scaling, _ADAPTER_ROWS[stack.rows])
        self.experts = TiledExperts(stack.tiles, stack.factors_EN, in_order, self._adapter)

    def publish(self) -> None:
        """Copy the adapters in place, unless they are the working copies themselves."""
        adapter = self._adapter
        if adapter is not None and adapter.a_ERK is not self._linear.a_work and (parts := self._padded()):
            adapter.a_ERK.copy_(parts[0])
            adapter.b_ENR.copy_(parts[1])

    def _padded(self) -> tuple[Tensor, Tensor] | None:
        """Return the working copies, with zeros up to a rank that the kernels have; None without adapters."""
        a_ERK, b_ENR = self._linear.a_work, self._linear.b_work
        if a_ERK is None or b_ENR is None:
            return None
        return with_rank(a_ERK, b_ENR, RANKS[bisect_left(RANKS, a_ERK.shape[1])])
