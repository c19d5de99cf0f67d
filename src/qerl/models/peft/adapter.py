"""Low-rank adapters of a decoder: add, publish, disable, save and load them under PEFT's names.

    W + scaling * B @ A,   scaling = alpha / rank,   A_RK uniform in +-1 / sqrt(K),   B_NR zero

A new adapter changes no output bit: `tests/models/peft/test_adapter.py`. With adapter.kind full, the fp32
masters of the weights take the adapter's place, under Hugging Face's names. Weights that are trained whole
beside it (trained_weight.py) have PEFT's names too.
"""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from qerl.algo.seeds import mix
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.formats import BF16, FP8Flow, PackedWeight
from qerl.models.checkpoint.one_thread import one_thread
from qerl.models.decoder import Decoder, Layer
from qerl.models.layer_spec import adapter_targets
from qerl.models.linear import QuantLinear
from qerl.models.mixture import ExpertLinear, MixtureMLP, copy_masters
from qerl.models.peft.peft_experts import shared
from qerl.models.peft.peft_names import PEFT_PREFIX, PREFIX, decoder_tensors, peft_linears
from qerl.models.peft.peft_selection import (
    LinearAdapter,
    adapter_of,
    layer_of,
    linear_names,
    unused_entries,
)
from qerl.models.policy_model import PolicyModel
from qerl.models.trained_weight import (
    Module,
    base_weights,
    learn_wholes,
    publish_weights,
    replaced_weights,
    trained_weights,
    wholes_of,
)

_EXPERTS = 1  # keeps these seeds apart from the linears'


def add_adapter(decoder: PolicyModel, config: AdapterConfig, seed: int) -> None:
    """Add an adapter to every linear in config.target_modules; its A depends on the seed and the linear only.
    With config.kind full, make the linear's weight trainable instead."""
    _check_targets(decoder, config)
    _check_mixture(decoder, config)
    for index, _, linear, (rank, alpha) in _targeted(decoder, config):
        if config.kind == "full":
            if not isinstance(linear.weight, BF16):
                raise UserError("adapter.kind full needs unquantized weights: set --model.format bf16")
            linear.learn_weight()
        else:
            a_RK = _new_a((rank, linear.in_width), mix(seed, index))
            b_NR = torch.zeros(linear.out_width, rank, device=decoder.device)
            scaling = config.scaling(rank, alpha)
            linear.add_adapter(a_RK.to(decoder.device), b_NR, scaling)
    if config.experts != "none":
        _add_expert_adapters(decoder, config, seed)
    if config.trains_whole:
        if not isinstance(decoder, Decoder):
            field = "train_norms" if config.train_norms else "modules_to_save"
            raise UserError(f"adapter.{field} needs the package's own decoder (model.backend)")
        learn_wholes(decoder, config)


def check_rank(decoder: PolicyModel, config: AdapterConfig) -> None:
    """Raise UserError if the rank exceeds that of every weight it would be added to."""
    widths = [min(linear.in_width, linear.out_width) for _, _, linear, _ in _targeted(decoder, config)]
    limit, rank = max(widths, default=config.rank), config.max_rank
    if config.kind == "lora" and rank > limit:
        field = "rank" if rank == config.rank else "rank_pattern"
        raise UserError(
            f"adapter.{field} must be at most {limit}, the rank of the largest weight, got {rank}"
        )


def targets_of(decoder: PolicyModel, config: AdapterConfig) -> tuple[str, ...]:
    """Return the linears that get an adapter, by the last part of their name. In a model that transformers
    runs, which may have other linears than those of the default, the default is all of them."""
    if decoder.architecture is not None:
        return adapter_targets(decoder.architecture, config)
    names = tuple(dict.fromkeys(name.rpartition(".")[2] for name, _ in decoder.linears()))
    is_default = config.target_modules == AdapterConfig().target_modules
    return names if is_default else config.target_modules


def adapted_linears(decoder: PolicyModel, config: AdapterConfig) -> dict[str, LinearAdapter]:
    """Return rank and alpha of each linear that gets an adapter, by its name in the decoder."""
    return {name: numbers for _, name, _, numbers in _targeted(decoder, config)}


def _targeted(
    decoder: PolicyModel, config: AdapterConfig
) -> Iterator[tuple[int, str, QuantLinear, LinearAdapter]]:
    """Yield each linear that gets an adapter with its index among all linears, its name and its numbers."""
    targets, layers = targets_of(decoder, config), config.layers_to_transform
    usual = LinearAdapter(config.rank, config.alpha)
    if decoder.architecture is None:
        config = dataclasses.replace(config, target_modules=targets)
    for index, (name, linear) in enumerate(decoder.linears()):
        if config.selects_names:
            numbers = adapter_of(config, linear_names(decoder.architecture, name))
        else:
            is_in_layers = layers is None or layer_of(name) in layers
            numbers = usual if is_in_layers and name.rpartition(".")[2] in targets else None
        if numbers is not None:
            yield index, name, linear, numbers


def _check_targets(decoder: PolicyModel, config: AdapterConfig) -> None:
    """Raise UserError for a linear or a layer that the model does not have, or if none is left."""
    names = [name for name, _ in decoder.linears()]
    shorts, layers = {name.rpartition(".")[2] for name in names}, {layer_of(name) for name in names}
    there_are = f"it has {', '.join(sorted(shorts))}"
    if beyond := sorted(set(config.layers_to_transform or ()) - layers):
        last = max(layer for layer in layers if layer is not None)
        raise UserError(f"adapter.layers_to_transform: the model has layers 0 to {last}, got {beyond[0]}")
    if config.selects_names:
        of_linears = [name for each in names for name in linear_names(decoder.architecture, each)]
        unused = unused_entries(config, targets_of(decoder, config), of_linears)
        if not unused and not any(_targeted(decoder, config)):
            unused = [f"target_modules {', '.join(config.target_modules)}"]
        if unused:
            raise UserError(f"adapter.{unused[0]}: no linear of the model matches; {there_are}")
        peft_linears(decoder.architecture, config, adapted_linears(decoder, config))  # raises what PEFT lacks
        return
    if unknown := [target for target in targets_of(decoder, config) if target not in shorts]:
        raise UserError(f"adapter.target_modules: the model has no linear {unknown[0]!r}; {there_are}")
    if not any(_targeted(decoder, config)):
        raise UserError(
            f"adapter.layers_to_transform {config.layers_to_transform}: these layers have none of the linears"
            f" {', '.join(config.target_modules)}"
        )


def _check_mixture(decoder: PolicyModel, config: AdapterConfig) -> None:
    has_experts = decoder.architecture is not None and decoder.architecture.mixture is not None
    if not has_experts and (config.router or config.experts != "none"):
        name = "adapter.router" if config.router else "adapter.experts"
        raise UserError(f"{name} needs a mixture of experts; {decoder.family} has none")


def _add_expert_adapters(decoder: PolicyModel, config: AdapterConfig, seed: int) -> None:
    for index, (_, experts) in enumerate(decoder.expert_linears()):
        num, rank = experts.spec.num_experts, config.expert_rank
        num_a, num_b = (1 if config.experts == shared else num for shared in ("shared_a", "shared_b"))
        a_ERK = _new_a((num_a, rank, experts.spec.in_width), mix(seed, _EXPERTS, index))
        b_ENR = torch.zeros(num_b, experts.spec.out_width, rank, device=decoder.device)
        experts.add_adapter(a_ERK.to(decoder.device), b_ENR, config.scaling(rank))


def _new_a(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return A, uniform in +-1 / sqrt(K)."""
    bound = 1 / math.sqrt(shape[-1])
    with one_thread():
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul_(2 * bound).sub_(bound)


def publish(decoder: PolicyModel) -> None:
    """Copy the fp32 masters into the working copies that the forward pass multiplies by."""
    copy_masters([linear for _, linear in _linears(decoder)])
    publish_weights(decoder)


def _linears(decoder: PolicyModel) -> Iterator[tuple[str, QuantLinear | ExpertLinear]]:
    """Yield every linear and every stack of experts with its name."""
    yield from decoder.linears()
    yield from decoder.expert_linears()


def set_router_noise(decoder: Decoder, reads_noise: bool) -> None:
    """Let the routers of a mixture of experts read AQN's noise, or not."""
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        if isinstance(layer.mlp, MixtureMLP):
            layer.mlp.reads_noise = reads_noise


@contextlib.contextmanager
def adapter_off(decoder: PolicyModel) -> Iterator[None]:
    """Disable the adapter within the context."""
    before = [(linear, linear.adapter_enabled) for _, linear in _linears(decoder)]
    try:
        for linear, _ in before:
            linear.adapter_enabled = False
        with replaced_weights(base_weights(decoder)):
            yield
    finally:
        for linear, enabled in before:
            linear.adapter_enabled = enabled


class OtherAdapter:
    """A frozen adapter of any rank that can replace the decoder's own for a while."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, config: AdapterConfig, tensors: Mapping[str, Tensor]):
        """tensors: with PEFT's names or the decoder's own. Raise UserError if they do not fit the decoder."""
        linears = {name: (linear, numbers) for _, name, linear, numbers in _targeted(decoder, config)}
        names = [f"{PREFIX}{name}.lora_{side}.weight" for name in linears for side in "AB"]
        wholes = wholes_of(decoder, config)
        names += [_whole_name(name) for name, _, _ in wholes]
        tensors = _decoder_tensors(decoder, tensors, names)
        self._decoder, self._usual = decoder, config.scaling(config.rank)
        self._tensors: dict[str, tuple[Tensor, ...]] = {}
        self._scalings: dict[str, float] = {}
        for name, (linear, (rank, alpha)) in linears.items():
            self._scalings[name] = config.scaling(rank, alpha)
            a_RK, b_NR = (tensors[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
            expected = (rank, linear.in_width), (linear.out_width, rank)
            if (tuple(a_RK.shape), tuple(b_NR.shape)) != expected:
                raise UserError(
                    f"{name}: the adapter must have the shapes {expected[0]} and {expected[1]},"
                    f" got {tuple(a_RK.shape)} and {tuple(b_NR.shape)}"
                )
            masters = [t.detach().to(decoder.device, torch.float32, copy=True) for t in (a_RK, b_NR)]
            work = [t.to(linear.compute, copy=True) for t in masters]
            self._tensors[name] = *(nn.Parameter(t, requires_grad=False) for t in masters), *work
        self._weights: dict[Module, Tensor] = base_weights(decoder)
        for name, module, offset in wholes:
            weight = tensors[_whole_name(name)].detach()
            if module.weight is None:
                raise UserError(f"{name}: the adapter trains it whole, which needs model.head_format bf16")
            if weight.shape != module.weight.shape:
                shapes = f"{tuple(module.weight.shape)}, got {tuple(weight.shape)}"
                raise UserError(f"{name}: the adapter's weight must have the shape {shapes}")
            self._weights[module] = (weight.to(decoder.device, torch.float32) + offset).to(module.weight)

    @contextlib.contextmanager
    def active(self) -> Iterator[Decoder]:
        """Compute with this adapter within the context, without gradients. The learner's is not touched."""
        before = []
        try:
            for name, linear in self._decoder.linears():
                before.append((linear, [getattr(linear, field) for field in _ADAPTER_FIELDS]))
                is_fused = isinstance(linear.weight, BF16 | FP8Flow)
                scaling = self._scalings.get(name, self._usual)
                values = (*self._tensors.get(name, (None,) * 4), scaling, is_fused, True)
                for field, value in zip(_ADAPTER_FIELDS, values, strict=True):
                    setattr(linear, field, value)
            with torch.no_grad(), replaced_weights(self._weights):
                yield self._decoder
        finally:
            for linear, values in before:
                for field, value in zip(_ADAPTER_FIELDS, values, strict=True):
                    setattr(linear, field, value)


_ADAPTER_FIELDS = "lora_A", "lora_B", "a_work", "b_work", "scaling", "skips_group", "adapter_enabled"


def dropout_of(decoder: PolicyModel, rate: float, *coordinates: int) -> Mapping[nn.Module, tuple[float, int]]:
    """Return `dropout` of LinearPass, empty for a rate of 0; the seed of each linear's mask follows from the
    coordinates and its index."""
    adapted = [linear for _, linear in decoder.linears() if linear.lora_A is not None] if rate else []
    return {linear: (rate, mix(*coordinates, index)) for index, linear in enumerate(adapted)}


def adapter_tensors(decoder: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the masters, not copies, by their names in a PEFT checkpoint of linears that are stored one by
    one (peft_names.py)."""
    masters = {
        master_name: master
        for name, linear in _linears(decoder)
        for master_name, master in _masters(decoder.name_prefix + name, linear)
        if master is not None
    }
    return masters | {
        _whole_name(name): module.full
        for name, module, _ in trained_weights(decoder)
        if module.full is not None
    }


def _whole_name(name: str) -> str:
    """Return PEFT's name of a weight that is trained whole."""
    return f"{PEFT_PREFIX if name == 'lm_head' else PREFIX}{name}.weight"


def _masters(name: str, linear: QuantLinear | ExpertLinear) -> list[tuple[str, nn.Parameter | None]]:
    return [
        (f"{PEFT_PREFIX}{name}.lora_A.weight", linear.lora_A),
        (f"{PEFT_PREFIX}{name}.lora_B.weight", linear.lora_B),
        (f"{name}.weight", linear.full if isinstance(linear, QuantLinear) else None),
    ]


@torch.no_grad()
def load_adapter(decoder: PolicyModel, tensors: Mapping[str, Tensor]) -> None:
    """Set the masters from tensors with PEFT's names or the decoder's own, then publish."""
    masters = adapter_tensors(decoder)
    tensors = _decoder_tensors(decoder, tensors, masters)
    for name, master in masters.items():
        tensors[name] = shared(name, tensors[name], len(master))
        expected, shape = tuple(master.shape), tuple(tensors[name].shape)
        if expected != shape:
            raise UserError(f"{name} must have the shape {expected}, got {shape}")
        if not tensors[name].is_floating_point():
            raise UserError(f"{name} must have floating-point numbers, got {tensors[name].dtype}")
        if not bool(tensors[name].float().isfinite().all()):
            raise UserError(f"{name} has NaN or infinity; the adapter is damaged, or its training diverged")
    for name, master in masters.items():
        master.copy_(tensors[name])
    publish(decoder)


def _decoder_tensors(
    decoder: PolicyModel, tensors: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors under the decoder's names; raise UserError unless these are `names`."""
    tensors = decoder_tensors(decoder.architecture, tensors, names)
    if differing := sorted(set(names) ^ tensors.keys()):
        problem = "lacks" if differing[0] in names else "has an unknown"
        raise UserError(f"the adapter {problem} tensor {differing[0]} ({len(differing)} names differ)")
    return tensors


def merged_expert(experts: ExpertLinear, index: int) -> Tensor:
    """Return one expert's W + scaling * B @ A, float64 [N, K]."""
    assert experts.weight is not None
    if experts.lora_A is None:
        return _merged(experts.weight[index])
    a_RK, b_NR = (t[index if len(t) > 1 else 0] for t in (experts.lora_A, experts.lora_B))
    return _merged(experts.weight[index], a_RK, b_NR, experts.scaling)


def merged_weight(linear: QuantLinear) -> Tensor:
    """Return W + scaling * B @ A, float64 [N, K], from the frozen weight and the fp32 masters."""
    if linear.full is not None:
        return linear.full.detach().double()
    assert linear.weight is not None
    return _merged(linear.weight, linear.lora_A, linear.lora_B, linear.scaling)


def _merged(
    weight: PackedWeight, a_RK: Tensor | None = None, b_NR: Tensor | None = None, scaling: float = 0.0
) -> Tensor:
    weight_NK = weight.operand(torch.float32).double() * weight.alpha.double().reshape(-1, 1)
    if a_RK is not None and b_NR is not None:
        weight_NK += scaling * (b_NR.detach().double() @ a_RK.detach().double())
    return weight_NK
