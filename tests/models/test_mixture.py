"""Mixtures of experts: adapters of experts, routes that are given, real shapes, and what is refused."""

import copy
import dataclasses

import pytest
import torch
import transformers
from safetensors.torch import save_file

from conftest import rms_error
from models.family_rows import Pairs, load, oracle, oracle_logprobs, sampled_logprobs, save
from models.tiny import forest, logits_of
from qerl.config import AdapterConfig
from qerl.cost.weights import embedding_bytes, stack_bytes, weight_bytes
from qerl.errors import UserError
from qerl.export.write import _merged_tensors
from qerl.formats import FORMATS
from qerl.learner.activation_checkpointing import RECOMPUTE
from qerl.models.checkpoint.stored_names import stored_tensors
from qerl.models.families import from_hf_config
from qerl.models.families.experts import NOT_SUPPORTED
from qerl.models.layer_spec import layer_specs
from qerl.models.peft.adapter import (
    adapter_off,
    adapter_tensors,
    add_adapter,
    load_adapter,
    publish,
    set_router_noise,
)
from qerl.models.random_weights import SHAPES, random_decoder, shape_of_hub_id
from qerl.models.sampler_copy import make_sampler_copy

TOKENS_T = torch.arange(40) * 7 % 61
MIXTURES = "GptOss", "Qwen3Moe", "Olmoe", "GraniteMoe"
PROMPT, BRANCHES = 11, (9, 0, 14)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("mixtures"))


def with_experts(decoder, kind):
    """Add random adapters to queries, the router and the experts."""
    decoder = copy.deepcopy(decoder)
    config = AdapterConfig(
        rank=4, alpha=8.0, target_modules=("q_proj",), router=True, experts=kind, expert_rank=2
    )
    add_adapter(decoder, config, seed=3)
    rng = torch.Generator().manual_seed(4)
    for master in adapter_tensors(decoder).values():
        master.data.copy_(torch.randn(master.shape, generator=rng) * 0.1)
    publish(decoder)
    return decoder


def expert_changes(decoder):
    """Return scaling * B @ A of each stack [E, N, K], by transformers' name of the parameter."""
    mixture, changes = decoder.architecture.mixture, {}
    at = "block_sparse_moe" if mixture.stored == "stacked" else "mlp"
    for name, experts in decoder.expert_linears():
        change_ENK = experts.scaling * torch.matmul(experts.lora_B, experts.lora_A)
        change_ENK = change_ENK.mT if mixture.stored == "transposed" else change_ENK
        changes[f"model.{name.replace('mlp', at)}"] = change_ENK
    return changes


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("kind", ["per_expert", "shared_a", "shared_b"])
def test_gradients_of_experts_adapters_are_those_of_transformers(pairs, family, kind):
    """Logprobs of two packed samples of one prompt, and their gradients in every A and B."""
    model, _, decoder = pairs.of(family)
    decoder = with_experts(decoder, kind)
    masters = adapter_tensors(decoder)
    tokens_T = torch.cat((TOKENS_T[:PROMPT], TOKENS_T[20:29], TOKENS_T[3:17]))
    samples = [torch.cat((tokens_T[:PROMPT], part)) for part in tokens_T[PROMPT:].split((9, 14))]
    weight_C = torch.randn(23, generator=torch.Generator().manual_seed(7))
    ours_C = sampled_logprobs(decoder, tokens_T, forest((PROMPT, BRANCHES)))
    with torch.enable_grad():
        weights, changes = dict(model.named_parameters()), expert_changes(decoder)
        changed = {name: weights[name] + change for name, change in changes.items()}
        theirs_C = torch.cat([oracle_logprobs(model, decoder, t, PROMPT, changed) for t in samples])
    torch.testing.assert_close(ours_C, theirs_C, atol=1e-4, rtol=0)
    ours = torch.autograd.grad((ours_C * weight_C).sum(), list(masters.values()))
    theirs = torch.autograd.grad((theirs_C * weight_C).sum(), list(masters.values()))
    num_layers = sum(kind.mlp == "experts" for kind in decoder.architecture.kinds)
    assert sum("experts" in name for name in masters) == 4 * num_layers
    assert sum("router" in name for name in masters) == 2 * num_layers
    for name, got, want in zip(masters, ours, theirs, strict=True):
        assert rms_error(got, want) < 1e-4, name
        assert want.abs().max() > 1e-3, name


@pytest.mark.parametrize("kind", ["per_expert", "shared_a", "shared_b"])
def test_a_new_adapter_of_experts_changes_nothing_and_comes_back_from_its_tensors(pairs, kind):
    decoder = pairs.of("Qwen3Moe")[2]
    plain_TV, changed = logits_of(decoder, TOKENS_T), with_experts(decoder, kind)
    new = copy.deepcopy(decoder)
    add_adapter(
        new,
        AdapterConfig(
            target_modules=("q_proj",), rank=4, alpha=8.0, router=True, experts=kind, expert_rank=2
        ),
        0,
    )
    assert torch.equal(logits_of(new, TOKENS_T), plain_TV)
    changed_TV = logits_of(changed, TOKENS_T)
    assert rms_error(changed_TV, plain_TV) > 1e-2
    with adapter_off(changed):
        assert torch.equal(logits_of(changed, TOKENS_T), plain_TV)
    load_adapter(new, {name: master.detach() for name, master in adapter_tensors(changed).items()})
    assert torch.equal(logits_of(new, TOKENS_T), changed_TV)


@pytest.mark.parametrize("mode", ["layer", "offload"])
def test_activation_checkpointing_changes_no_bit_of_a_gradient(pairs, mode):
    decoder = with_experts(pairs.of("GptOss")[2], "per_expert")
    masters, trees = list(adapter_tensors(decoder).values()), forest((PROMPT, BRANCHES))
    tokens_T = torch.arange(34) * 5 % 61
    plain = torch.autograd.grad(sampled_logprobs(decoder, tokens_T, trees).sum(), masters)
    run_layer = RECOMPUTE[mode](torch.device("cpu"))()
    again = torch.autograd.grad(sampled_logprobs(decoder, tokens_T, trees, run_layer).sum(), masters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_route_sees_every_choice_and_may_replace_it(pairs, family):
    decoder = pairs.of(family)[2]
    mixture, seen = decoder.architecture.mixture, {}
    plain_TV = logits_of(decoder, TOKENS_T)

    def watch(layer_index, ids_TK):
        seen[layer_index] = ids_TK
        return ids_TK

    def turn(layer_index, ids_TK):
        return ((ids_TK + 1) % mixture.num_experts).sort(-1).values

    watched_TV, turned_TV = (logits_of(decoder, TOKENS_T, route=route) for route in (watch, turn))
    assert torch.equal(watched_TV, plain_TV) and rms_error(turned_TV, plain_TV) > 0.02
    with_mixture = [i for i, kind in enumerate(decoder.architecture.kinds) if kind.mlp == "experts"]
    assert list(seen) == with_mixture and with_mixture
    for ids_TK in seen.values():
        assert ids_TK.shape == (40, mixture.num_chosen) and (ids_TK.diff(dim=1) > 0).all()
        assert ids_TK.min() >= 0 and ids_TK.max() < mixture.num_experts


def test_the_bytes_of_real_shapes_are_those_of_their_checkpoints_and_what_tiles_add():
    """65.25 GB: experts 60.91, attention 1.91, embedding and head 2.32, biases 0.1; 13.8 and 18.1 GB."""
    for name, format, gigabytes in (
        ("gpt-oss-120b", "mxfp4", 65.25),
        ("gpt-oss-20b", "mxfp4", 13.76),
        ("qwen3-30b-a3b", "nvfp4", 18.09),
    ):
        a, added = SHAPES[name], 0.0
        for x in (x for spec in layer_specs(a) for x in spec.experts):
            stored = x.num_weights * FORMATS[format].bytes_per_weight
            added += stack_bytes(x, format) - stored - 2 * x.num_experts * x.out_width * x.has_bias
        stored = weight_bytes(a, format) + embedding_bytes(a) - added
        assert stored == pytest.approx(gigabytes * 1e9, rel=1e-3), name
        assert 0 < added < 0.07 * stored
    spec = layer_specs(SHAPES["gpt-oss-120b"])[0]
    assert sum(x.num_weights for x in spec.experts) * 36 * 17 / 32 == pytest.approx(60.91e9, rel=1e-3)
    assert shape_of_hub_id("openai/gpt-oss-120b") == "gpt-oss-120b"
    assert shape_of_hub_id("Qwen/Qwen3-30B-A3B-Instruct-2507") == "qwen3-30b-a3b"


@pytest.mark.parametrize(("name", "format"), [("gpt-oss-20b", "mxfp4"), ("qwen3-30b-a3b", "nvfp4")])
def test_random_weights_of_a_small_copy_of_a_real_shape(name, format):
    whole = SHAPES[name]
    mixture = dataclasses.replace(whole.mixture, num_experts=4, num_chosen=2, width=64)
    small = {"num_layers": 2, "width": 128, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 61}
    a = dataclasses.replace(whole, **small, layer_kinds=whole.layer_kinds[:2], mixture=mixture)
    cpu = torch.device("cpu")
    decoder = random_decoder(a, format=format, rank=4, device=cpu, seed=0, compute=torch.float32)
    kinds = {experts.weight.kind.name for _, experts in decoder.expert_linears()}
    assert kinds == {format} and logits_of(decoder, TOKENS_T).isfinite().all()
    is_plain = dict(decoder.linears())["layers.0.self_attn.q_proj"].weight.name == "bf16"
    assert is_plain == (name == "gpt-oss-20b")
    parts = [w.float().std() for _, x in decoder.expert_linears() for w in (x.weight[1].decode(),)]
    assert all(
        0.5 < part * x.spec.in_width**0.5 < 2
        for part, (_, x) in zip(parts, decoder.expert_linears(), strict=True)
    )


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_other_mixtures_are_refused_with_what_is_missing(name):
    with pytest.raises(UserError) as error:
        from_hf_config({"architectures": [name]})
    assert f"architecture {name} is not supported: this mixture of experts has" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv must be None"),
        ("Olmoe", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts (5), got 9"),
        ("Olmoe", {"num_experts": 300}, "num_experts must be at most 256"),
        ("Qwen3Moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ("GptOss", {"hidden_act": "gelu"}, "hidden_act must be silu"),
    ],
)
def test_a_wrong_entry_is_refused_in_one_line(pairs, family, change, words):
    config = pairs.of(family)[0].config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    with pytest.raises(UserError) as error:
        from_hf_config(config | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_mixtures_do_not_support_is_refused(pairs, tmp_path):
    decoder = pairs.of("Olmoe")[2]
    with pytest.raises(UserError, match=r"sampler_format fp8 does not support a mixture of experts"):
        make_sampler_copy(decoder, "fp8")
    dense = load(save(oracle("Llama"), tmp_path))
    for settings, name in (({"router": True}, "router"), ({"experts": "shared_a"}, "experts")):
        with pytest.raises(UserError, match=rf"adapter.{name} needs a mixture of experts"):
            add_adapter(copy.deepcopy(dense), AdapterConfig(**settings), seed=0)


def test_the_default_targets_of_a_mixture_are_the_linears_that_it_has(pairs):
    decoder = copy.deepcopy(pairs.of("Olmoe")[2])
    add_adapter(decoder, AdapterConfig(), seed=0)
    adapted_names = {name.rpartition(".")[2] for name, x in decoder.linears() if x.lora_A is not None}
    assert adapted_names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    partly = copy.deepcopy(pairs.of("Qwen3Moe")[2])  # its third layer has no experts
    add_adapter(partly, AdapterConfig(), seed=0)
    names = [name for name, x in partly.linears() if x.lora_A is not None and "mlp" in name]
    assert names == [f"layers.2.mlp.{x}_proj" for x in ("gate", "up", "down")]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_merged_model_is_transformers_with_the_adapters_in_its_weights(pairs, family, tmp_path):
    decoder = with_experts(pairs.of(family)[2], "per_expert")
    tensors = dict(stored_tensors(decoder.architecture, _merged_tensors(decoder, torch.float32)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    pairs.of(family)[0].config.save_pretrained(tmp_path)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        theirs_TV = merged(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs_TV, atol=1e-4, rtol=0)


def test_a_router_that_reads_no_noise_keeps_the_first_layers_routes(pairs):
    decoder, routes = copy.deepcopy(pairs.of("Olmoe")[2]), []

    def watch(layer_index, ids_TK):
        routes.append(ids_TK) if layer_index == 0 else None
        return ids_TK

    plain_TV = logits_of(decoder, TOKENS_T, route=watch)
    for norm in decoder.noise_table.norms[1::2]:  # those before the experts
        norm.noise.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    for reads_noise in (False, True):
        set_router_noise(decoder, reads_noise)
        assert rms_error(logits_of(decoder, TOKENS_T, route=watch), plain_TV) > 0.01
    assert torch.equal(routes[1], routes[0]) and not torch.equal(routes[2], routes[0])
