"""What a peft.LoraConfig says is what is trained, as in PEFT, or is refused by the field's name."""

import copy
import dataclasses
import functools
import inspect
import logging
import tempfile
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from models.family_rows import SHAPE, load, oracle, save
from qerl.config import AdapterConfig, ModelConfig
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.peft import peft_fields
from qerl.models.peft.adapter import add_adapter
from qerl.models.transformers_backend.transformers_loader import load_transformers_model
from qerl.trl.lora import adapter_config

BASE = AdapterConfig(rank=4, alpha=8.0)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),  # of combinations that PEFT itself ignores
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following"),
]


@functools.cache
def folder_of(family):
    if family != "StableLm":  # transformers' code runs it
        return save(oracle(family), Path(tempfile.mkdtemp()))
    config = transformers.StableLmConfig(**SHAPE, architectures=["StableLmForCausalLM"])
    transformers.StableLmForCausalLM(config).save_pretrained(folder := Path(tempfile.mkdtemp()))
    return folder


def translated(config, family="Llama"):
    return adapter_config(config, BASE, ModelConfig(path=str(folder_of(family))))


def trained_here(config, family="Llama"):
    """The scaling and rank of each linear that has an adapter."""
    adapter = translated(config, family)
    decoder = load(folder_of(family))
    add_adapter(decoder, adapter, seed=0)
    adapted = [(name, x) for name, x in decoder.linears() if x.lora_A is not None]
    return {f"model.{name}": (x.rank, pytest.approx(x.scaling)) for name, x in adapted}


def trained_by_peft(config, family="Llama"):
    model = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32)
    model = peft.get_peft_model(model, copy.deepcopy(config)).base_model.model
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    return {name: (m.r["default"], m.scaling["default"]) for name, m in layers}


def lora(**fields):
    return peft.LoraConfig(r=4, lora_alpha=8, **fields)


SAME = {
    "a full name": {"target_modules": ["model.layers.0.self_attn.q_proj"]},
    "full names": {
        "target_modules": [f"model.layers.{i}.mlp.{x}_proj" for i in (1, 3) for x in ("up", "down")]
    },
    "part of a name": {"target_modules": ["layers.2.self_attn.o_proj", "self_attn.q_proj"][:1]},
    "a block": {"target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
    "a pattern": {"target_modules": r".*\.self_attn\.(q|v)_proj"},
    "a pattern of layers": {"target_modules": r"model\.layers\.[02]\.mlp\..*_proj"},
    "all linears": {"target_modules": "All-Linear"},
    "all but": {"target_modules": "all-linear", "exclude_modules": ["down_proj", "o_proj"]},
    "all but a pattern": {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"},
    "all but layers": {"target_modules": ["q_proj"], "exclude_modules": r"model\.layers\.[13]\..*"},
    "a layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 2},
    "layer 0": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 0},
    "no layers named": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "layers": {
        "target_modules": ["q_proj", "up_proj"],
        "layers_to_transform": [0, 3],
        "layers_pattern": "layers",
    },
    "a full name and layers": {"target_modules": ["model.layers.1.mlp.up_proj"], "layers_to_transform": [0]},
    "rsLoRA": {"use_rslora": True},
    "rsLoRA of a rank": {"use_rslora": True, "rank_pattern": {"q_proj": 9, "v_proj": 9}},
    "one rank for all": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"[qv]_proj": 2}},
    "another rank": {"rank_pattern": {"q_proj": 2}},
    "another alpha": {"alpha_pattern": {"layers.1.*v_proj": 2}},
    "other ranks with rsLoRA": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {r"layers\.0\..*proj": 2, "down_proj": 3},
        "alpha_pattern": {"o_proj": 5},
    },
    "other linears in each layer": {"target_modules": ["layers.0.self_attn.q_proj", "v_proj"]},
    "one alpha for all": {
        "target_modules": ["q_proj"],
        "alpha_pattern": {r"layers\.\d+\.self_attn.q_proj": 3},
    },
    "a pattern of others": {"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2, "proj": 3}},
    "a linear that is not there": {"target_modules": ["q_proj", "query_key_value"]},
}


@pytest.mark.parametrize("fields", SAME.values(), ids=SAME)
def test_the_same_linears_learn_with_the_same_rank_and_scaling_as_in_peft(fields):
    assert trained_here(lora(**fields)) == trained_by_peft(lora(**fields))


@pytest.mark.parametrize("family", ["Phi3", "Qwen3_5"])
def test_other_names_and_layers_that_differ_select_as_in_peft(family):
    config = lora(target_modules="all-linear", layers_to_transform=None)
    theirs = set(trained_by_peft(config, family))
    split = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    parts = {
        f"{name.rpartition('.')[0]}.{part}"
        for name in theirs
        for part in split.get(name.rpartition(".")[2], (name.rpartition(".")[2],))
    }
    assert set(trained_here(config, family)) == parts and len(parts) >= len(theirs)


def test_a_linear_that_transformers_stores_with_others_is_named_as_there():
    config = lora(target_modules=["qkv_proj"], layers_to_transform=[1])
    expected = {f"model.layers.1.self_attn.{x}_proj" for x in "qkv"}
    assert set(trained_here(config, "Phi3")) == expected


def test_a_model_that_transformers_runs_is_adapted_as_peft_does():
    model = ModelConfig(path=str(folder_of("StableLm")))
    for fields in (
        {"target_modules": "all-linear"},
        {"target_modules": ["up_proj"], "layers_to_transform": [1]},
    ):
        adapter = adapter_config(lora(**fields), BASE, model)
        policy = load_transformers_model(
            locate(model.path),
            format="bf16",
            compute=torch.float32,
            device=torch.device("cpu"),
            resident=False,
        )
        add_adapter(policy, adapter, seed=0)
        names = {name for name, x in policy.linears() if x.lora_A is not None}
        assert names == set(trained_by_peft(lora(**fields), "StableLm")) and names


OTHER = {  # a value of each field that is not its default, and fields that it needs
    "task_type": "SEQ_CLS",
    "revision": "v2",
    "inference_mode": True,
    "r": 3,
    "target_modules": ["k_proj"],
    "exclude_modules": ["v_proj"],
    "lora_alpha": 5,
    "lora_dropout": 0.25,
    "fan_in_fan_out": True,
    "bias": "all",
    "use_rslora": True,
    "modules_to_save": ["lm_head"],
    "init_lora_weights": "gaussian",
    "layers_to_transform": [1],
    "layers_pattern": {"layers_pattern": "layers", "layers_to_transform": [2]},
    "rank_pattern": {"rank_pattern": {"q_proj": 3}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 3}},
    "megatron_config": {"megatron_config": {"a": 1}},
    "trainable_token_indices": [1, 2],
    "loftq_config": {"init_lora_weights": "loftq", "loftq_config": peft.LoftQConfig()},
    "eva_config": peft.EvaConfig(),
    "corda_config": peft.tuners.lora.config.CordaConfig(),
    "lora_ga_config": peft.tuners.lora.config.LoraGAConfig(),
    "use_dora": True,
    "velora_config": peft.tuners.lora.config.VeloraConfig(),
    "alora_invocation_tokens": {"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"},
    "use_qalora": True,
    "monteclora_config": peft.tuners.lora.config.MontecloraConfig(),
    "layer_replication": [(0, 2), (1, 4)],
    "lora_bias": True,
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_bdlora": peft.tuners.lora.config.BdLoraConfig(),
    "arrow_config": peft.tuners.lora.config.ArrowConfig(),
    "kasa_config": peft.tuners.lora.config.KasaConfig(),
    "ensure_weight_tying": True,
}
NO_EFFECT = {  # in PEFT's training neither
    "auto_mapping": {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
    "base_model_name_or_path": "another",
    "megatron_core": "other.core",
    "qalora_group_size": 32,
    "runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True),
}
FILLED = {"peft_type", "peft_version"}  # by PEFT itself


def with_value(field, value):
    is_whole = isinstance(value, dict)
    return peft.LoraConfig(**(value if is_whole else {field: value}))


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(peft.LoraConfig) if f.name not in FILLED]
)
def test_every_field_acts_as_in_peft_or_is_refused_by_its_name(field, caplog):
    assert field in OTHER.keys() ^ NO_EFFECT.keys(), "a new field of PEFT: give it a value"
    if field in NO_EFFECT:
        assert translated(with_value(field, NO_EFFECT[field])) == translated(peft.LoraConfig())
        assert f"no effect here: {field}" in caplog.text
        return
    config = with_value(field, OTHER[field])
    try:
        adapter = translated(config)
    except UserError as error:
        fields = OTHER[field] if isinstance(OTHER[field], dict) else {field}
        assert any(str(error).startswith(f"peft_config.{name} ") for name in fields), error
        return
    assert adapter != translated(peft.LoraConfig())
    if field != "lora_dropout":
        assert trained_here(config) == trained_by_peft(config)
    assert not caplog.records


READ = (
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "layers_to_transform",
)


@pytest.mark.parametrize("field", [*READ, "layers_pattern"])
def test_these_fields_are_not_refused(field):
    assert translated(with_value(field, OTHER[field])) != translated(peft.LoraConfig())


def test_a_field_of_a_later_peft_is_refused_by_its_name_unless_it_has_its_default():
    later = dataclasses.make_dataclass(
        "LoraConfig", [("new_scale", float, 1.5), ("new_mode", str | None, None)], bases=(peft.LoraConfig,)
    )
    assert translated(later()) == translated(peft.LoraConfig())
    for name, value in (("new_scale", 0.0), ("new_mode", "fast")):
        with pytest.raises(UserError, match=rf"^peft_config\.{name} is {value!r}"):
            translated(later(**{name: value}))


def test_another_kind_of_adapter_is_refused():
    for other in (peft.AdaLoraConfig(total_step=10), peft.IA3Config(), {"r": 4}):
        with pytest.raises(
            UserError, match=r"^peft_config(\.peft_type is 'ADALORA'| must be a peft\.LoraConfig)"
        ):
            translated(other)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"target_modules": ["nothing"]},
            "target_modules, exclude_modules and layers_to_transform select no",
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "target_modules has lm_head, which can have no such adapter",
        ),
        (
            {"target_modules": ["embed_tokens"]},
            "target_modules has model.embed_tokens, which can have no such",
        ),
        ({"target_modules": "(q_proj"}, "target_modules: '(q_proj' is not a regular expression"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; only plain LoRA"),
        ({"init_lora_weights": False}, "init_lora_weights is False; only plain LoRA"),
        ({"target_modules": []}, "target_modules must name at least one linear, got none"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields, said):
    with pytest.raises(UserError) as caught:
        trained_here(lora(**fields))
    assert said in str(caught.value) and str(caught.value).startswith("peft_config.")


def test_a_linear_that_is_not_there_and_a_pattern_that_matches_none_are_named(caplog):
    fields = {"target_modules": ["q_proj", "c_attn"], "exclude_modules": ["x"], "rank_pattern": {"v_proj": 2}}
    with caplog.at_level(logging.WARNING):
        translated(lora(**fields))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"peft_config.{name}" for name in ("target_modules", "exclude_modules", "rank_pattern")
    ]
    assert "the model has no linear 'c_attn'" in caplog.text


def test_experts_are_adapted_by_target_parameters():
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = lora(target_modules=["q_proj"], target_parameters=names, rank_pattern=dict.fromkeys(names, 2))
    adapter = translated(config, "Olmoe")
    assert (adapter.experts, adapter.expert_rank, adapter.rank) == ("per_expert", 2, 4)
    assert adapter.target_modules == ("q_proj",)


def test_all_fields_of_adapter_config_are_of_the_installed_peft():
    """So a name that is misspelled here is noticed."""
    assert {*peft_fields.NO_EFFECT, *peft_fields.READ} <= {*inspect.signature(peft.LoraConfig).parameters}
