"""Decode steps of mixtures of experts on a GPU: the kernels against PyTorch's path."""

from dataclasses import replace

import pytest
import torch

from engine.parts import drawn, engine_of, prompts_of
from qerl.config import AdapterConfig
from qerl.engine.decode_forward import TorchForward
from qerl.engine.decode_kernels import KernelForward
from qerl.engine.decode_mixture_step import stack_obstacle
from qerl.engine.kv_cache import KVCache
from qerl.kernels.decode_state import DecodeState
from qerl.models.adapter import add_adapter
from qerl.models.architecture import LayerKind, Mixture
from qerl.models.device import best_kernels
from qerl.models.random_weights import SHAPES, random_decoder
from qerl.models.tiled_experts import TiledStack

PLAIN = Mixture(num_experts=16, num_chosen=4, width=128, softmax_over="all", stored="separate")
CLAMPED = replace(
    PLAIN, num_experts=60, softmax_over="chosen", has_bias=True, swiglu_alpha=1.702, is_interleaved=True
)
PAGE_TOKENS, PAGES = 16, 3


def shape_of(mixture, num_layers=3):
    return replace(
        SHAPES["qwen3-30b-a3b"],
        num_layers=num_layers,
        width=256,
        num_heads=4,
        num_kv_heads=2,
        ff_width=512,
        vocab_size=1024,
        layer_kinds=(
            LayerKind(mlp="experts"),
            *(LayerKind(mlp="dense"),) * (num_layers - 2),
            LayerKind(mlp="experts"),
        ),
        mixture=mixture,
    )


def decoder_of(mixture, format, rank, device):
    decoder = random_decoder(shape_of(mixture), format=format, rank=rank, device=device, seed=3)
    with torch.no_grad():
        decoder.lm_head.weight.mul_(8)
        for layer in decoder.layers:
            layer.tile()
            if hasattr(layer.mlp, "router"):  # choices that rounding seldom changes
                layer.mlp.router.weight.weight.mul_(4)
    return decoder


def test_experts_outside_tiles_or_with_adapters_are_left_to_pytorch():
    cpu = torch.device("cpu")
    decoder = random_decoder(shape_of(PLAIN), format="nvfp4", rank=None, device=cpu, seed=0)
    assert stack_obstacle(decoder) == "they take experts in NVFP4 or MXFP4"
    for layer in decoder.layers:
        layer.tile()
    assert all(isinstance(each.weight, TiledStack) for _, each in decoder.expert_linears())
    assert stack_obstacle(decoder) is None
    add_adapter(
        decoder, AdapterConfig(rank=4, target_modules=("q_proj",), experts="each", expert_rank=2), seed=0
    )
    assert stack_obstacle(decoder) == "they do not compute adapters of experts"


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("mixture", "format"), [(PLAIN, "nvfp4"), (CLAMPED, "nvfp4"), (CLAMPED, "mxfp4")])
@pytest.mark.parametrize("rows", [1, 9, 40])
@torch.no_grad()
def test_hidden_states_and_recorded_experts_are_those_of_pytorch(mixture, format, rows, device):
    decoder = decoder_of(mixture, format, 16, device)
    a = decoder.architecture
    assert KernelForward.obstacle(decoder, PAGE_TOKENS) is None
    caches = [KVCache(a, rows * PAGES, PAGE_TOKENS, torch.bfloat16, device) for _ in range(2)]
    rng = torch.Generator(device).manual_seed(0)
    with caches[0].present(), caches[1].present():
        forwards = [
            KernelForward(decoder, caches[0], rows, PAGES),
            TorchForward(decoder, caches[1], rows, PAGES),
        ]
        state = DecodeState.empty(rows, PAGES, 1, device)
        state.tables_BX.copy_(torch.arange(rows * PAGES, device=device).view(rows, PAGES))
        errors, agreements = [], []
        for position in range(20):
            state.tokens_B.copy_(torch.randint(0, 1024, (rows,), generator=rng, device=device))
            state.positions_B.fill_(position)
            ours, theirs = (forward(state, rows).float() for forward in forwards)
            errors.append(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).cpu())
        pages = list(range(rows * PAGES))
        for row in range(rows):
            own = pages[row * PAGES : (row + 1) * PAGES]
            ids = [
                torch.frombuffer(bytearray(cache.read_routes(own, 20)), dtype=torch.uint8) for cache in caches
            ]
            agreements.append((ids[0] == ids[1]).float().mean())
    assert torch.stack(agreements).mean() > 0.97
    assert torch.cat(errors).median() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_greedy_samples_are_those_of_pytorch(kernels, device):
    if kernels == "hopper" and best_kernels(device) != "hopper":
        pytest.skip("needs a Hopper GPU")
    decoder = decoder_of(PLAIN, "nvfp4", 16, device)
    prompts_P = [
        replace(p, tokens_T=[17 * t % 1024 for t in p.tokens_T]) for p in prompts_of(9, 31, 1, 16, 40)
    ]
    tokens = []
    for choice in (kernels, "torch"):
        engine = engine_of(decoder, stop_token_ids=frozenset(), kernels=choice)
        assert (engine.kernels == "torch") == (choice == "torch")
        samples = drawn(engine, prompts_P, num_samples=1, temperature=0.0, max_tokens=8)
        tokens.append([sample.tokens_T for sample in samples])
    same = [ours == theirs for ours, theirs in zip(*tokens, strict=True)]
    assert sum(same) >= 4, tokens
