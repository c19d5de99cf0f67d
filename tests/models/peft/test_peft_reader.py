"""What an adapter of PEFT's computes is computed here, or the field that prevents it is named."""

import dataclasses
import json
import math

import peft
import pytest
import torch
from peft.tuners.lora import config as lora_configs
from safetensors.torch import load_file, save_file

from models.family_rows import load, oracle, save
from models.tiny import logits_of
from peft_adapters import write_learned
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.peft.adapter import add_adapter, load_adapter
from qerl.models.peft.peft_reader import ADAPTER, adapter_config, read_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
TOKENS_T = torch.arange(3, 40) * 7 % 60


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(oracle("Llama"), tmp_path_factory.mktemp("base"))


def trained(base, folder, **fields):
    """Write an adapter with something learned; return the logits of PEFT's model."""
    model = write_learned(base, folder, seed=3, scale=0.2, **{"r": 4, "lora_alpha": 8} | fields)
    with torch.no_grad():
        return model(TOKENS_T[None]).logits[0]


def continued(base, folder):
    """Return the config that continues from the adapter, and the logits of our model with it."""
    config = adapter_config(str(folder))
    decoder = load(base)
    add_adapter(decoder, config, seed=0)
    load_adapter(decoder, read_adapter(str(folder), config))
    return config, logits_of(decoder, TOKENS_T)


SAME = {
    "plain": {},
    "a full name": {"target_modules": ["model.layers.0.self_attn.q_proj"]},
    "a pattern": {"target_modules": r".*\.layers\.[02]\.self_attn\.(q|v)_proj"},
    "all but": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "all but some layers": {"target_modules": ["up_proj", "q_proj"], "exclude_modules": r".*\.[13]\..*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 3]},
    "a layer by its list": {"layers_to_transform": 2, "layers_pattern": "layers"},
    "rsLoRA": {"use_rslora": True, "r": 3},
    "rsLoRA of a rank": {"use_rslora": True, "rank_pattern": {"q_proj": 9, "v_proj": 9}},
    "a rank for all": {"rank_pattern": {"self_attn.q_proj": 2, "v_proj": 2}},
    "an alpha for all": {"alpha_pattern": {"q_proj": 3, "v_proj": 3}},
    "a pattern of others": {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"o_proj": 1}},
    "ranks that differ": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "ranks that differ, rsLoRA": {"use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
    "other linears in each layer": {
        "target_modules": ["layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"]
    },
    "dropout": {"lora_dropout": 0.25},
    "another start": {"init_lora_weights": "gaussian"},
    "an orthogonal start": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("fields", SAME.values(), ids=SAME)
def test_an_adapter_of_peft_has_its_logits_here(base, tmp_path, fields):
    theirs_TV = trained(base, tmp_path, **fields)
    config, ours_TV = continued(base, tmp_path)
    torch.testing.assert_close(ours_TV, theirs_TV, rtol=1e-4, atol=1e-4)
    assert config.dropout == fields.get("lora_dropout", 0.0)


CHANGED = {  # values of adapter_config.json with which the same tensors would compute or learn something else
    "peft_type": "ADALORA",
    "task_type": "SEQ_CLS",
    "r": 3,
    "target_modules": ["q_proj", "k_proj"],
    "exclude_modules": ["q_proj"],
    "fan_in_fan_out": True,
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa",
    "layers_to_transform": [1],
    "layers_pattern": 3,
    "rank_pattern": {"q_proj": 3},
    "megatron_config": {"a": 1},
    "trainable_token_indices": [1],
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "use_dora": True,
    "velora_config": {"num_groups": 4},
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2], [1, 4]],
    "lora_bias": True,
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "ensure_weight_tying": True,
}
READ = {"lora_alpha": 5, "lora_dropout": 0.5, "use_rslora": True, "alpha_pattern": {"v_proj": 3}}
NO_EFFECT = {
    "auto_mapping": {"base_model_class": "A"},
    "peft_version": "0.1",
    "base_model_name_or_path": "another",
    "revision": "v2",
    "inference_mode": False,
    "megatron_core": "other",
    "qalora_group_size": 32,
    "eva_config": dataclasses.asdict(lora_configs.EvaConfig()),
    "runtime_config": {"ephemeral_gpu_offload": True},
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(peft.LoraConfig)])
def test_every_field_of_adapter_config_is_read_or_refused_by_its_name(base, tmp_path, field):
    trained(base, tmp_path)
    before = adapter_config(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    value = (CHANGED | READ | NO_EFFECT)[field]
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    if field in CHANGED:
        with pytest.raises(
            UserError,
            match=rf": {field} |^\S*lora_A\S* must have|: target_modules \[.* are not|and {field} must",
        ):
            continued(base, tmp_path)
    else:
        assert (adapter_config(str(tmp_path)) != before) == (field in READ)


def test_a_field_of_a_later_peft_is_refused_by_its_name(base, tmp_path):
    trained(base, tmp_path)
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"new_mode": None, "new_list": [], "new_flag": False}))
    assert adapter_config(str(tmp_path)).rank == 4
    for value in (1.5, "fast", {"a": 1}, True, 0):
        file.write_text(json.dumps(settings | {"new_scale": value}))
        with pytest.raises(UserError, match=r": new_scale is "):
            adapter_config(str(tmp_path))


@pytest.mark.parametrize("pattern", ["(a*)*q_proj", "q_proj|v_proj", "[q"])
def test_a_pattern_that_may_take_forever_is_refused(base, tmp_path, pattern):
    trained(base, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {pattern: 4}}))
    with pytest.raises(UserError, match=r": rank_pattern must name linears, got the pattern "):
        adapter_config(str(tmp_path))


def changed_tensor(folder, change):
    tensors = load_file(folder / ADAPTER)
    name = min(tensors)
    save_file(tensors | {name: change(tensors[name])}, folder / ADAPTER)
    return name


def with_value(value, dtype=torch.float32):
    return lambda tensor: torch.full_like(tensor, value, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensor: tensor.index_fill(1, torch.tensor([2]), math.nan), "NaN or infinity"),
        (with_value(-math.inf), "NaN or infinity"),
        (with_value(math.inf, torch.bfloat16), "NaN or infinity"),
        (with_value(math.nan, torch.float8_e4m3fn), "NaN or infinity"),
        (with_value(1e300, torch.float64), "NaN or infinity"),
        (with_value(1, torch.int8), "torch.int8"),
        (with_value(1, torch.int64), "torch.int64"),
        (with_value(1, torch.bool), "torch.bool"),
        (lambda tensor: tensor.flatten(), "shape"),
        (lambda tensor: tensor[:0].clone(), "shape"),
        (lambda tensor: torch.tensor(1.0), "shape"),
    ],
)
def test_a_damaged_tensor_of_an_adapter_is_refused_by_its_name(base, tmp_path, change, said):
    trained(base, tmp_path)
    name = changed_tensor(tmp_path, change)
    with pytest.raises(UserError, match=said) as error:
        continued(base, tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_an_adapter_may_have_any_floating_point_type(base, tmp_path, dtype):
    logits = trained(base, tmp_path)
    changed_tensor(tmp_path, lambda tensor: tensor.to(dtype))
    torch.testing.assert_close(continued(base, tmp_path)[1], logits, atol=5e-2, rtol=0)


def test_layers_of_a_run_are_exported_for_peft(base, tmp_path):
    config = AdapterConfig(
        rank=4, alpha=8.0, target_modules=("q_proj", "up_proj"), layers_to_transform=(1, 3)
    )
    decoder = load(base)
    add_adapter(decoder, config, seed=0)
    names = [name for name, linear in decoder.linears() if linear.lora_A is not None]
    assert names == [f"layers.{i}.{x}_proj" for i in (1, 3) for x in ("self_attn.q", "mlp.up")]
    for layers, said in (((4,), "the model has layers 0 to 3, got 4"), ((), "must have numbers of layers")):
        with pytest.raises(UserError, match=f"adapter.layers_to_transform.*{said}"):
            add_adapter(load(base), dataclasses.replace(config, layers_to_transform=layers), seed=0)


def test_an_adapter_is_not_continued_with_another_scaling(base, tmp_path):
    trained(base, tmp_path / "adapter")
    config = dataclasses.replace(adapter_config(str(tmp_path / "adapter")), use_rslora=True)
    with pytest.raises(UserError, match=r"use_rslora is False, adapter\.use_rslora is True"):
        read_adapter(str(tmp_path / "adapter"), config)
