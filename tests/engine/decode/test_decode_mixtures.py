"""Decode steps of mixtures of experts on a GPU: the kernels against PyTorch's path."""

from dataclasses import replace

import pytest
import torch

from engine.parts import drawn, engine_of, packed_logprobs, prompts_of, request_of
from parity.test_exact import SAMPLING, gap, groups_of
from qerl.config import AdapterConfig
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.forward import TorchForward
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.engine.decode.mixture import _AdaptedStack, kernel_routers, stack_obstacle
from qerl.kernels.attention.decode_state import DecodeState
from qerl.models.architecture import LayerKind, Mixture
from qerl.models.device import best_kernels
from qerl.models.mixture import copy_masters
from qerl.models.peft.adapter import add_adapter, publish
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


def decoder_of(mixture, format, rank, device, expert_rank=0):
    decoder = random_decoder(
        shape_of(mixture), format=format, rank=rank, device=device, seed=3, expert_rank=expert_rank
    )
    with torch.no_grad():
        decoder.lm_head.weight.mul_(8)
        for layer in decoder.layers:
            layer.tile()
            if hasattr(layer.mlp, "router"):  # choices that rounding seldom changes
                layer.mlp.router.weight.weight.mul_(4)
    return decoder


def test_experts_outside_tiles_or_with_adapters_of_other_ranks_are_left_to_pytorch():
    cpu = torch.device("cpu")
    decoder = random_decoder(shape_of(PLAIN), format="nvfp4", rank=None, device=cpu, seed=0)
    assert stack_obstacle(decoder) == "they take experts in NVFP4 or MXFP4"
    for layer in decoder.layers:
        layer.tile()
    assert all(isinstance(each.weight, TiledStack) for _, each in decoder.expert_linears())
    assert stack_obstacle(decoder) is None
    for rank, said in ((1, None), (16, None), (17, "they take adapters of experts of ranks up to 16, here")):
        config = AdapterConfig(rank=4, target_modules=("q_proj",), experts="per_expert", expert_rank=rank)
        add_adapter(decoder, config, seed=0)
        found = stack_obstacle(decoder)
        assert found == (said and f"{said} {rank}")


@pytest.mark.parametrize("kind", ["per_expert", "shared_a", "shared_b"])
@pytest.mark.parametrize("rank", [1, 4, 6])
def test_adapters_of_experts_have_zeros_up_to_a_rank_of_the_kernels(rank, kind):
    decoder = decoder_of(PLAIN, "nvfp4", None, torch.device("cpu"))
    add_adapter(decoder, AdapterConfig(experts=kind, expert_rank=rank, target_modules=("q_proj",)), seed=0)
    linear = next(each for _, each in decoder.expert_linears())
    stack = _AdaptedStack(linear)
    with torch.no_grad():
        linear.lora_B.normal_()
    copy_masters([linear])
    stack.publish()
    a_ERK, b_ENR = stack.experts.adapter[:2]
    assert a_ERK.shape[1] == b_ENR.shape[2] == {1: 4, 4: 4, 6: 8}[rank] and a_ERK.is_contiguous()
    assert (a_ERK is linear.a_work) == (rank == 4)  # copies only where they are needed
    both = [b.double() @ a.double() for b, a in ((b_ENR, a_ERK), (linear.b_work, linear.a_work))]
    assert both[1].std() > 0.01 and torch.equal(*both)


def test_the_kernels_multiply_by_a_router_unless_it_has_an_adapter():
    decoder = decoder_of(PLAIN, "nvfp4", 16, torch.device("cpu"))
    first, last = (decoder.layers[place].mlp.router for place in (0, -1))
    assert kernel_routers(decoder) == {first, last}
    add_adapter(decoder, AdapterConfig(rank=16, router=True), seed=0)
    assert kernel_routers(decoder) == set()


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("expert_rank", [0, 1, 4])
@pytest.mark.parametrize(("mixture", "format"), [(PLAIN, "nvfp4"), (CLAMPED, "nvfp4"), (CLAMPED, "mxfp4")])
@pytest.mark.parametrize("rows", [1, 9, 40])
@torch.no_grad()
def test_hidden_states_and_recorded_experts_are_those_of_pytorch(mixture, format, rows, expert_rank, device):
    decoder = decoder_of(mixture, format, 16, device, expert_rank)
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
            if position == 10 and expert_rank:
                for _, experts in decoder.expert_linears():
                    experts.lora_B.mul_(-2)
                    copy_masters([experts])
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
    chosen = len(ids[0]) * rows  # near ties differ: 3 deviations of so many choices
    assert torch.stack(agreements).mean() > 0.97 - 3 * (0.03 * 0.97 / chosen) ** 0.5
    assert torch.cat(errors).median() < 0.02


def greedy_gap(scorer, sampler, kernels, *, lengths=range(5, 65, 5), max_tokens=24):
    """Return by how many nats the tokens that the sampler finds most likely are, in the mean, less likely
    than the best ones by the scorer's packed forward pass, over the same text: 0 if both agree everywhere.

    A choice that rounding turns costs little here, unlike in a comparison of texts, which part there for
    good; tokens of wrong experts cost nats."""
    prompts_P = [replace(p, tokens_T=[17 * t % 1024 for t in p.tokens_T]) for p in prompts_of(*lengths)]
    engine = engine_of(sampler, stop_token_ids=frozenset(), kernels=kernels)
    assert (engine.kernels == "torch") == (kernels == "torch")
    samples = drawn(engine, prompts_P, num_samples=1, temperature=0.0, max_tokens=max_tokens)
    gaps = []
    for prompt, sample in zip(prompts_P, samples, strict=True):
        logprobs_TV = packed_logprobs(scorer, prompt, sample).float().cpu()
        chosen_T = logprobs_TV.gather(1, torch.tensor(sample.tokens_T)[:, None])[:, 0]
        gaps.append(logprobs_TV.amax(1) - chosen_T)
    return torch.cat(gaps).mean().item()


def test_greedy_tokens_of_exchanged_experts_lose_nats():
    cpu = torch.device("cpu")
    right, wrong = (decoder_of(PLAIN, "nvfp4", 16, cpu) for _ in range(2))
    for tensor in wrong.layers[-1].mlp.experts.down_proj.weight.tensors().values():
        tensor.copy_(tensor.flip(0).clone())
    few = {"lengths": (5, 20, 35, 50), "max_tokens": 12}
    assert greedy_gap(right, right, "torch", **few) < 0.05
    assert greedy_gap(right, wrong, "torch", **few) > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_greedy_tokens_are_those_of_the_packed_forward_as_nearly_as_pytorchs(kernels, device):
    if kernels == "hopper" and best_kernels(device) != "hopper":
        pytest.skip("needs a Hopper GPU")
    decoder = decoder_of(PLAIN, "nvfp4", 16, device)
    theirs, ours = (greedy_gap(decoder, decoder, each) for each in ("torch", kernels))
    assert theirs < 0.2 and ours < 2 * theirs + 0.1, (ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize(("mixture", "format"), [(PLAIN, "nvfp4"), (CLAMPED, "mxfp4")])
@pytest.mark.parametrize(("max_num_seqs", "has_router_adapter"), [(20, False), (100, False), (20, True)])
def test_in_exact_mode_scores_are_what_was_recorded_to_the_bit(
    mixture, format, max_num_seqs, has_router_adapter, kernels, device
):
    if kernels == "hopper" and best_kernels(device) != "hopper":
        pytest.skip("needs a Hopper GPU")
    decoder = decoder_of(mixture, format, *((None, device, 0) if has_router_adapter else (16, device, 4)))
    if has_router_adapter:
        add_adapter(decoder, AdapterConfig(rank=16, router=True, experts="per_expert", expert_rank=4), seed=0)
        with torch.no_grad():
            for name, linear in decoder.linears():
                if name.endswith("router"):
                    linear.lora_B.normal_(0, 0.1)
        publish(decoder)
    stops = frozenset(range(0, 1024, 12))  # samples of many lengths
    engine = engine_of(decoder, stop_token_ids=stops, exact=True, max_num_seqs=max_num_seqs, kernels=kernels)
    assert engine.kernels == kernels
    groups = groups_of(engine)
    assert len({len(s.tokens_T) for group in groups for s in group.samples_G}) > 4
    assert gap(engine, groups) == 0
    (alone,) = engine.generate(request_of([groups[1].prompt], num_samples=5, sampling=SAMPLING))
    assert alone == groups[1]  # tokens, logprobs and routes
