"""Adapters selected by pattern, of several ranks and scalings, or with trained norms, as PEFT has them."""

import json
import types

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText

import tiny_run
from export.test_export import decoder_of, exported
from export.test_export_families import TOKENS_T, loaded, made, theirs
from models.tiny import logits_of
from qerl.cli.main import command
from qerl.config import AdapterConfig
from qerl.cost.weights import num_trained_weights
from qerl.engine.decode.linears import LinearGroup
from qerl.errors import UserError
from qerl.export.adapter_card import NOT_IN_VLLM, WHOLE_NOT_IN_VLLM, read_written_adapter, vllm_obstacle
from qerl.formats import BF16
from qerl.models.linear import QuantLinear
from qerl.models.peft.adapter import adapted_linears, adapter_tensors, add_adapter, load_adapter
from qerl.models.peft.peft_reader import adapter_config, read_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ADAPTERS = {
    "rsLoRA": AdapterConfig(rank=4, alpha=8.0, use_rslora=True),
    "a pattern of layers": AdapterConfig(rank=4, target_modules=(r".*\.layers\.[01]\..*(o|up)_proj",)),
    "all linears": AdapterConfig(rank=4, target_modules=("all-linear",)),
    "full names": AdapterConfig(
        rank=4, target_modules=("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj")
    ),
    "norms": AdapterConfig(rank=4, train_norms=True),
    "ranks": AdapterConfig(rank=4, rank_pattern=(("o_proj", 2), (r"layers\.1\..*down_proj", 7))),
    "patterns of one factor, spelled in two ways": AdapterConfig(
        rank=4, alpha=8.0, rank_pattern=(("o_proj", 2),), alpha_pattern=((r"layers\.\d+\..*o_proj", 4.0),)
    ),
    "ranks and alphas with rsLoRA": AdapterConfig(
        rank=4,
        alpha=3.0,
        use_rslora=True,
        rank_pattern=(("down_proj", 2),),
        alpha_pattern=(("o_proj", 9.0),),
    ),
}
OTHERS = {  # linears stored as one, layers that differ, names of another form
    "Phi3": ("rsLoRA", "ranks", "norms"),
    "Qwen3_5": ("all linears", "norms"),
    "Gemma2": ("norms",),
    "Glm4": ("norms",),
    "Olmo2": ("norms",),
    "a part of Gemma3": ("a pattern of layers", "ranks", "norms"),
}
CASES = [(name, "Qwen2") for name in ADAPTERS] + [
    (n, family) for family, each in OTHERS.items() for n in each
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_peft_loads_it_with_our_logits_and_it_is_read_again(name, family, tmp_path):
    adapter = ADAPTERS[name]
    _, config, decoder = made(tmp_path, family, adapter=adapter)
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    is_part = family.startswith("a part of ")
    base = (
        AutoModelForImageTextToText.from_pretrained(config.model.path, **settings)
        if is_part
        else loaded(config.model.path, dtype=torch.float32)
    )
    out = exported(tmp_path, config, "peft")
    model = peft.PeftModel.from_pretrained(base, out)
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    described = json.loads((out / "adapter_config.json").read_text())
    factor = described["lora_alpha"] / described["r"] ** (0.5 if described["use_rslora"] else 1)
    factors = [each.scaling["default"] for each in model.modules() if hasattr(each, "lora_A")]
    is_whole, is_even = (
        bool(described.get("modules_to_save")),
        factors == pytest.approx([factor] * len(factors)),
    )
    expected = WHOLE_NOT_IN_VLLM if is_whole else None if is_even else NOT_IN_VLLM
    assert vllm_obstacle(read_written_adapter(out)) == expected
    card = (out / "README.md").read_text()
    assert [text in card for text in (WHOLE_NOT_IN_VLLM, NOT_IN_VLLM)] == [is_whole, expected == NOT_IN_VLLM]
    masters = adapter_tensors(decoder)
    assert num_trained_weights(decoder.architecture, adapter) == sum(t.numel() for t in masters.values())
    try:
        again = adapter_config(str(out))
    except UserError as error:  # of an adapter that differs between linears, where some are stored as one
        assert family == "Phi3" and adapter.rank_pattern and "linears stored as one" in str(error)
        return
    other = decoder_of(config)
    add_adapter(other, again, seed=5)
    load_adapter(other, read_adapter(str(out), again))
    assert all(torch.equal(adapter_tensors(other)[name], master) for name, master in masters.items())
    torch.testing.assert_close(logits_of(other, TOKENS_T), logits_of(decoder, TOKENS_T), rtol=1e-5, atol=1e-5)


def test_the_scaling_is_that_of_the_linears_own_rank_and_alpha(tmp_path):
    adapter = ADAPTERS["ranks and alphas with rsLoRA"]
    _, _, decoder = made(tmp_path, "Qwen2", adapter=adapter)
    found = {name.rpartition(".")[2]: (x.rank, x.scaling) for name, x in decoder.linears()}
    assert found["down_proj"] == (2, pytest.approx(3 / 2**0.5))
    assert found["o_proj"] == (4, pytest.approx(9 / 2)) and found["q_proj"] == (4, pytest.approx(3 / 2))
    assert set(adapted_linears(decoder, ADAPTERS["full names"])) == {
        "layers.0.self_attn.o_proj",
        "layers.1.mlp.down_proj",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": (r".*\.nothing_proj",)}, "target_modules .*: no linear of the model matches"),
        ({"rank_pattern": (("o_proj", 999),)}, "rank_pattern must be at most"),
        ({"rank_pattern": (("o_prj", 2),)}, "rank_pattern o_prj: no linear of the model matches"),
        ({"alpha_pattern": (("o_prj", 2.0),)}, "alpha_pattern o_prj: no linear of the model matches"),
        (
            {"target_modules": ("mlp.up_proj", "o_prj")},
            "target_modules o_prj: no linear of the model matches",
        ),
        (
            {"target_modules": ("mlp.up_proj",), "layers_to_transform": (0, 9)},
            "layers_to_transform: the model has layers 0 to 3, got 9",
        ),
    ],
)
def test_what_no_linear_can_have_is_refused(fields, message, tmp_path):
    from qerl.models.peft.adapter import check_rank

    _, config, _ = made(tmp_path, "Qwen2")
    adapter, decoder = AdapterConfig(**{"rank": 4} | fields), decoder_of(config)
    with pytest.raises(UserError, match=f"adapter.{message}"):
        check_rank(decoder, adapter)
        add_adapter(decoder, adapter, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ("(q_proj",)}, r"target_modules: '\(q_proj' is not a regular expression"),
        ({"alpha_pattern": (("q_proj", -1.0),)}, "alpha_pattern must have positive numbers, got -1.0 for q"),
    ],
)
def test_a_pattern_that_is_none_is_refused_when_the_config_is_made(fields, message):
    with pytest.raises(UserError, match=f"adapter.{message}"):
        AdapterConfig(**fields)


def test_ranks_that_differ_within_a_linear_that_is_stored_as_one_are_refused(tmp_path):
    adapter = AdapterConfig(rank=4, rank_pattern=(("q_proj", 2),))
    with pytest.raises(UserError, match=r"differ within model.layers.0.self_attn.qkv_proj, stored as one"):
        made(tmp_path, "Phi3", adapter=adapter)


@pytest.mark.parametrize("has_tiles", [False, True])
def test_a_group_of_the_sampler_has_the_largest_rank_and_scaling_and_the_same_products(has_tiles):
    rng, linears = torch.Generator().manual_seed(0), []
    for rank, scaling in ((2, 0.5), (4, 2.0), (3, 1.5)):
        linear = QuantLinear(8, 6, has_bias=False, compute=torch.float32, device=torch.device("cpu"))
        linear.load_weight(BF16.encode(torch.randn(6, 8, generator=rng)))
        linear.add_adapter(torch.randn(rank, 8, generator=rng), torch.randn(6, rank, generator=rng), scaling)
        linears.append(linear)
    group = LinearGroup(linears)
    if has_tiles:
        group.tiles = types.SimpleNamespace(rows=None)
    a, b = group._stacked()
    u = group.scaling * torch.eye(8) @ a.T
    if has_tiles:  # one rank for all: b has no zeros between the linears
        blocks = zip(u.split(group.rank, dim=1), b.split(6), strict=True)
        found = torch.cat([u_R @ b_NR.T for u_R, b_NR in blocks], dim=1)
    else:
        found = u @ b.T
    expected = [x.scaling * x.a_work.T @ x.b_work.T for x in linears]
    torch.testing.assert_close(found, torch.cat(expected, dim=1))


def test_a_run_samples_and_learns_with_it(tmp_path):
    folder = tiny_run.write_files(tmp_path)
    more = ["--adapter.target-modules", r".*\.layers\.[01]\..*", "--adapter.use-rslora"]
    more += [
        "--adapter.rank-pattern",
        "q_proj",
        "2",
        r"layers\.1\..*",
        "6",
        "--adapter.alpha-pattern",
        "v_proj",
        "9",
    ]
    more += ["--num-steps", "3", "--evaluate.num-prompts", "0", "--noise.schedule", "none"]
    command(["train", "demo", *tiny_run.options(folder, tmp_path / "run"), *more])
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and all(step["mismatch_max"] < 1e-4 for step in steps)
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    written = json.loads((checkpoint / "adapter_config.json").read_text())
    assert written["use_rslora"] and written["rank_pattern"]["model.layers.0.self_attn.q_proj"] == 2
    assert written["rank_pattern"]["model.layers.1.mlp.up_proj"] == 6
