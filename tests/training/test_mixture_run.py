"""A mixture of experts in sampling and learning: the engine records routes, the learner replays them."""

import dataclasses

import pytest
import torch

from engine.parts import EOS, branched, drawn, engine_of, prompts_of, request_of
from engine.test_conversation import Talk, talked
from learner.tiny import run_config
from models.family_rows import load, oracle, save
from models.tiny import logits_of
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.cost.cache import page_bytes
from qerl.learner import Learner
from qerl.learner.packing import pack
from qerl.learner.router_replay import RouterReplay
from qerl.models import mixture
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import add_adapter
from qerl.types import Group

LENGTHS = (9, 31, 1, 20)
FEW = frozenset({EOS})
ADAPTER = AdapterConfig(rank=4, alpha=8.0)
MANY = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4, "mlp_only_layers": [2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    return save(oracle("Qwen3Moe", **sizes, **MANY), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def decoder(folder):
    return load(folder)


def routes_of(decoder, tokens_T):
    """Return the routes of the packed forward, as Sample has them."""
    seen = {}

    def watch(layer_index, ids_TK):
        seen[layer_index] = ids_TK
        return ids_TK

    logits_of(decoder, torch.tensor(tokens_T), route=watch)
    assert tuple(seen) == decoder.architecture.layers_with_experts
    return torch.stack(list(seen.values()), 1).to(torch.uint8).numpy().tobytes()


def assert_recorded(decoder, prompt, sample):
    assert sample.routes == routes_of(decoder, prompt.tokens_T + sample.tokens_T[:-1])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4, "max_num_seqs": 4},
        {"decode_steps_per_sync": 16, "block_size": 4, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_recorded_routes_are_those_of_the_packed_forward(decoder, settings):
    prompts_P = prompts_of(*LENGTHS)
    samples = drawn(engine_of(decoder, **settings), prompts_P, num_samples=3, max_tokens=12)
    assert decoder.architecture.layers_with_experts == (0, 1, 3)
    for index, sample in enumerate(samples):
        assert_recorded(decoder, prompts_P[index // 3], sample)
    assert any(len(sample.tokens_T) == 1 for sample in samples)


def test_preempted_samples_keep_their_routes(decoder):
    arch, prompts_P = decoder.architecture, prompts_of(*LENGTHS)
    kv_gb = 21.5 * page_bytes(arch, 4, torch.float32) / 1e9
    engine = engine_of(decoder, stop_token_ids=FEW, block_size=4, kv_cache_gb=kv_gb)
    samples = drawn(engine, prompts_P, num_samples=3, max_tokens=24)
    assert engine.stats.num_preemptions > 0
    for index, sample in enumerate(samples):
        assert_recorded(decoder, prompts_P[index // 3], sample)


def test_branches_have_the_routes_of_what_they_share(decoder):
    groups, branches, _, _ = branched(engine_of(decoder, block_size=4), prompts_of(*LENGTHS))
    assert branches
    for group in (*groups, *branches):
        for sample in group.samples_G:
            assert_recorded(decoder, group.prompt, sample)


def test_turns_of_a_conversation_have_routes_too(decoder):
    prompts_P = prompts_of(*LENGTHS)
    samples = talked(engine_of(decoder, stop_token_ids=FEW, block_size=4), Talk(), prompts_P, max_tokens=24)
    assert any(sample.environment_spans for sample in samples)
    num_samples = len(samples) // len(prompts_P)
    for index, sample in enumerate(samples):
        assert_recorded(decoder, prompts_P[index // num_samples], sample)


@pytest.fixture(scope="module")
def windowed(request, tmp_path_factory):
    """gpt-oss with windows of 6 positions in every other layer, as it has them, or in all."""
    changes = {"sliding_window": 6}
    if request.param == "all":
        changes["layer_types"] = ["sliding_attention"] * 4
    decoder = load(save(oracle("GptOss", **changes), tmp_path_factory.mktemp("windowed")))
    is_windowed = [kind.window == 6 for kind in decoder.architecture.kinds]
    assert all(is_windowed) if request.param == "all" else any(is_windowed) and not all(is_windowed)
    return decoder


def assert_all_recorded(decoder, groups):
    """Check the routes of samples that are much longer than the window."""
    assert max(len(s.tokens_T) for group in groups for s in group.samples_G) >= 40
    for group in groups:
        for sample in group.samples_G:
            assert_recorded(decoder, group.prompt, sample)


@pytest.mark.parametrize(
    ("windowed", "is_short"),
    [("all", False), ("mixed", True)],
    indirect=["windowed"],
    ids=["roomy", "preempted"],
)
def test_routes_outlive_the_pages_of_windows(windowed, is_short):
    settings, prompts_P = (
        {"block_size": 4, "stop_token_ids": FEW, "max_num_batched_tokens": 11},
        prompts_of(*LENGTHS),
    )
    if is_short:
        settings["kv_cache_gb"] = 26.5 * page_bytes(windowed.architecture, 4, torch.float32) / 1e9
    engine = engine_of(windowed, decode_steps_per_sync=4, **settings)
    samples = drawn(engine, prompts_P, num_samples=3, max_tokens=50)
    groups = [Group(prompt=p, samples_G=samples[3 * i : 3 * i + 3]) for i, p in enumerate(prompts_P)]
    assert_all_recorded(windowed, groups)
    assert engine.stats.peak_window_pages > 0
    assert (engine.stats.num_preemptions > 0) == is_short


@pytest.mark.parametrize("windowed", ["mixed"], indirect=True)
def test_branches_of_a_windowed_mixture_have_routes(windowed):
    engine = engine_of(windowed, block_size=4, stop_token_ids=FEW, max_num_batched_tokens=11)
    groups, branches, _, _ = branched(engine, prompts_of(9, 31, 14), max_tokens=50)
    assert branches and engine.stats.peak_window_pages
    assert_all_recorded(windowed, [*groups, *branches])


def groups_of(decoder, *, sigma=0.0, num_samples=3):
    """Groups with advantages, sampled with noise of this sigma."""
    engine, rng = engine_of(decoder, stop_token_ids=FEW), torch.Generator().manual_seed(0)
    with noised(decoder.noise_table, sigma=sigma, unit="absolute", seed=1, step=1):
        request = request_of(prompts_of(*LENGTHS), num_samples=num_samples, max_tokens=16, seed=1, step=1)
        groups = engine.generate(request)
    return [
        dataclasses.replace(
            group,
            samples_G=[
                dataclasses.replace(s, reward=1.0, advantage=torch.randn((), generator=rng).item())
                for s in group.samples_G
            ],
        )
        for group in groups
    ]


def learned(folder, format, *, is_replayed, sigma=0.0, checkpointing="none", compute=torch.float32):
    cpu = torch.device("cpu")
    decoder = build_decoder(
        locate(str(folder)).open(), format=format, compute=compute, device=cpu, resident=True
    )
    add_adapter(decoder, ADAPTER, seed=3)
    config = run_config({"router_replay": is_replayed}, {"gradient_checkpointing": checkpointing})
    learner = Learner(decoder, dataclasses.replace(config, adapter=ADAPTER))
    return learner.step(groups_of(decoder, sigma=sigma)), learner


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_replay_lowers_the_mismatch_that_noise_makes_and_changes_nothing_without(folder, format):
    with_replay, without = (
        learned(folder, format, is_replayed=is_replayed, sigma=0.02)[0] for is_replayed in (True, False)
    )
    assert without["mismatch_abs"] > 1.2 * with_replay["mismatch_abs"]
    assert without["mismatch_kl"] > 1.5 * with_replay["mismatch_kl"]
    for metrics in (with_replay, without):  # noise alone changes routes
        assert 0.05 < metrics["route_changes"] < metrics["route_change_rows"] < 0.9
    quiet, _ = learned(folder, format, is_replayed=False)
    assert quiet["route_changes"] == quiet["route_change_rows"] == 0 and quiet["mismatch_max"] < 1e-4


def test_the_load_of_the_experts_is_logged(folder):
    metrics, _ = learned(folder, "nvfp4", is_replayed=True)
    assert 0 <= metrics["expert_load_min"] < 1 < metrics["expert_load_max"] <= 16 / 4
    assert 0.5 < metrics["expert_entropy"] < 1


def test_replay_is_the_same_when_layers_are_computed_again(folder):
    plain, again = (
        learned(folder, "nvfp4", is_replayed=True, sigma=0.02, checkpointing=mode)
        for mode in ("none", "layer")
    )
    assert plain[0] == again[0]
    for name, tensor in plain[1].adapter_state().items():
        assert torch.equal(tensor, again[1].adapter_state()[name]), name


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_layer_asks_the_device_for_its_routes_once_and_not_if_they_are_replayed(
    folder, is_replayed, monkeypatch
):
    """On a GPU each answer waits for all work before it."""
    passes, asked, sort_rows = [], [], mixture.sort_rows

    class Offsets:
        """Offsets that count how often they are read."""

        def __init__(self, tensor):
            self.tensor = tensor

        def tolist(self):
            asked.append(1)
            return self.tensor.tolist()

    def sorted_rows(*arguments):
        rows = sort_rows(*arguments)
        return rows._replace(offsets=Offsets(rows.offsets))

    def counted(self):
        passes.append(1)
        return rows_by_layer(self)

    _, learner = learned(folder, "nvfp4", is_replayed=is_replayed, checkpointing="layer")
    groups, rows_by_layer = groups_of(learner._forward._decoder, sigma=0.0), RouterReplay.rows_by_layer
    monkeypatch.setattr(mixture, "sort_rows", sorted_rows)
    monkeypatch.setattr(RouterReplay, "rows_by_layer", counted)
    choose, chosen = mixture.choose, []
    monkeypatch.setattr(mixture, "choose", lambda *each: chosen.append(1) or choose(*each))
    learner.step(groups)
    assert len(chosen) == 3 * len(passes)  # not again when a layer is recomputed
    assert len(passes) > 0 and len(asked) == (0 if is_replayed else 3 * len(passes))  # layers with experts


def test_packed_routes_are_the_samples_rows_and_missing_ones_turn_replay_off(decoder):
    groups, cpu = groups_of(decoder), torch.device("cpu")
    weighted = [(group, [1.0] * len(group.samples_G)) for group in groups]
    for batch in pack(weighted, max_tokens=100, device=cpu):
        start = 0
        for tree in batch.trees:
            lengths, at = tree.branch_tokens, tree.start + tree.prompt_tokens
            for length in lengths:
                rows = [*range(tree.start, tree.start + tree.prompt_tokens), *range(at, at + length)]
                tokens_T = batch.tokens_T[rows].tolist()
                assert batch.routes_T[rows].numpy().tobytes() == routes_of(decoder, tokens_T)
                at += length
            start += tree.num_tokens
        assert len(batch.routes_T) == start == len(batch.tokens_T)
    group = groups[0]
    first = dataclasses.replace(group.samples_G[0], routes=None)
    unknown = dataclasses.replace(group, samples_G=[first, *group.samples_G[1:]])
    (batch,) = pack([(unknown, [1.0] * 3)], max_tokens=10_000, device=cpu)
    assert batch.routes_T is None
