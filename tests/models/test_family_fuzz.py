"""Random configs of every family: what is loaded computes what transformers computes, the rest is refused."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from models.family_rows import ROWS, SHAPE, config_class, load, randomize, save
from models.tiny import logits_of
from qerl.errors import UserError

TOKENS_T = torch.arange(20) * 11 % 61
EXAMPLES = 5  # of each family; 60 found nothing more
quick = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
RATIO = st.sampled_from([0.25, 0.5, 1.0, 2.0])
LAYER_TYPES = st.lists(
    st.sampled_from(["full_attention", "sliding_attention"]), min_size=4, max_size=4
) | st.lists(st.sampled_from(["full_attention", "chunked_attention", "linear_attention"]), max_size=4)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"])},
    optional={
        "rope_theta": st.sampled_from([100.0, 1e4]),
        "factor": st.sampled_from([2.0, 8.0]),
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
        "original_max_position_embeddings": st.sampled_from([8, 32]),
        "partial_rotary_factor": RATIO,
        "attention_factor": st.just(1.5),
    },
)
CHANGES = {
    "attention_bias": st.booleans(),
    "mlp_bias": st.booleans(),
    "head_dim": st.sampled_from([8, 12, 16]),
    "num_key_value_heads": st.sampled_from([1, 2, 3, 6]),
    "sliding_window": st.sampled_from([1, 3, 17, 5000, None]),
    "use_sliding_window": st.booleans(),
    "layer_types": LAYER_TYPES,
    "hidden_act": st.sampled_from(["silu", "gelu"]),
    "hidden_activation": st.sampled_from(["gelu_pytorch_tanh", "gelu", "relu"]),
    "tie_word_embeddings": st.booleans(),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-2]),
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
    "rope_theta": st.sampled_from([100.0, 1e4]),
    "partial_rotary_factor": RATIO,
    "max_position_embeddings": st.sampled_from([24, 256]),
    "query_pre_attn_scalar": st.sampled_from([8, 24]),
    "attn_logit_softcapping": st.sampled_from([None, 1.0]),
    "final_logit_softcapping": st.sampled_from([None, 2.0]),
    "use_bidirectional_attention": st.booleans(),
    "no_rope_layers": st.lists(st.integers(0, 1), min_size=4, max_size=4),
    "no_rope_layer_interval": st.integers(1, 4),
    "attention_multiplier": st.sampled_from([0.05, 1.0]),
    "residual_multiplier": st.sampled_from([0.2, 1.0]),
    "logits_scaling": st.sampled_from([0.5, 4.0]),
    "position_embedding_type": st.sampled_from([None, "rope"]),
    "num_local_experts": st.sampled_from([0, 2]),
}
SOME = st.lists(st.sampled_from(sorted(CHANGES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: CHANGES[name] for name in names})
)


def model_of(family, entries):
    """transformers' model, or None where transformers itself refuses the config or crashes with it."""
    try:
        config = config_class(family)(**entries, attn_implementation="eager", experts_implementation="eager")
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            model(TOKENS_T[None])
    except Exception:  # a dozen unrelated types
        return None
    return randomize(model.eval().requires_grad_(False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ROWS)
def test_a_config_is_computed_as_transformers_does_or_refused_in_one_line(family):
    tried = {"same": 0, "refused": 0}

    @quick
    @given(SOME)
    def each(changes):
        model = model_of(family, copy.deepcopy(SHAPE | ROWS[family] | changes))
        assume(model is not None)
        with tempfile.TemporaryDirectory() as folder:
            try:
                decoder = load(save(model, Path(folder)))
            except UserError as error:
                assert "\n" not in str(error)
                tried["refused"] += 1
                return
        tokens_T = TOKENS_T[: decoder.architecture.max_positions]
        theirs_TV = model(tokens_T[None]).logits[0]
        torch.testing.assert_close(logits_of(decoder, tokens_T), theirs_TV, atol=2e-4, rtol=1e-4)
        tried["same"] += 1

    each()
    assert tried["same"] >= EXAMPLES / 4, tried
