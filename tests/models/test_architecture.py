import pytest

from models.published import CONFIGS
from models.tiny import FAMILIES, oracle
from qerl.errors import UserError
from qerl.models.architecture import Architecture, Rope
from qerl.models.families import from_hf_config
from qerl.models.random_weights import SHAPES

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_a_published_config_gives_its_numbers():
    assert from_hf_config(SMOLLM2) == Architecture(
        family="LlamaForCausalLM",
        num_layers=30,
        width=576,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        ff_width=1536,
        vocab_size=49152,
        norm_eps=1e-5,
        rope=Rope(kind="default", theta=100000.0, original_positions=8192),
        max_positions=8192,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=True,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_models_config_is_read(name):
    got, config = from_hf_config(CONFIGS[name]), CONFIGS[name]
    assert got.family == config["architectures"][0] and got.vocab_size == config["vocab_size"]
    assert got.head_size in (64, 128) and got.num_layers == config["num_hidden_layers"]
    assert got.max_positions == config["max_position_embeddings"]  # no window is in use


@pytest.mark.parametrize("name", [name for name in SHAPES if name in CONFIGS])
def test_a_named_shape_is_what_the_published_config_says(name):
    assert SHAPES[name] == from_hf_config(CONFIGS[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_norms_follow_the_family(family):
    names = oracle(family).state_dict()
    got = from_hf_config(oracle(family).config.to_dict())
    layer = "model.layers.0"
    assert got.qkv_bias == (f"{layer}.self_attn.q_proj.bias" in names)
    assert got.output_bias == (f"{layer}.self_attn.o_proj.bias" in names)
    assert got.mlp_bias == (f"{layer}.mlp.up_proj.bias" in names)
    assert got.qk_norm == (f"{layer}.self_attn.q_norm.weight" in names)


def test_both_spellings_of_the_rope_mean_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 4096}
    old = SMOLLM2 | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = SMOLLM2 | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    want = Rope(kind="llama3", theta=5e5, factor=8.0, original_positions=4096)
    assert from_hf_config(old).rope == from_hf_config(new).rope == want


@pytest.mark.parametrize(
    ("family", "settings", "max_positions"),
    (
        ("Mistral", {"sliding_window": 4096}, 4096),
        ("Mistral", {"sliding_window": None}, 8192),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": False}, 8192),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("Qwen3", {"sliding_window": 9000, "use_sliding_window": True}, 8192),
    ),
)
def test_a_window_in_use_caps_the_positions(family, settings, max_positions):
    config = SMOLLM2 | {"architectures": [f"{family}ForCausalLM"]} | settings
    assert from_hf_config(config).max_positions == max_positions


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, MistralForCausalLM,"
            " Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": []}, r"architecture \(none named\) is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"num_key_value_heads": 2}, "multiple of num_key_value_heads, got 9 and 2"),
        ({"hidden_size": None}, "hidden_size must be a positive integer in the model's config, got None"),
    ),
)
def test_what_is_not_computed_is_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        from_hf_config(SMOLLM2 | settings)


def test_left_out_settings_have_transformers_defaults():
    least = {k: v for k, v in SMOLLM2.items() if k not in ("num_key_value_heads", "rope_theta")}
    got = from_hf_config(least)
    assert (got.num_kv_heads, got.rope.theta, got.rope.kind) == (9, 10_000.0, "default")
