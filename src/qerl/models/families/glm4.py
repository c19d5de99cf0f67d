"""GLM-4 (0414): neighbors in a head rotate as pairs, half of the head by default; norms before and after
attention and MLP; gate and up are stored as one tensor."""

from qerl.models.architecture import Architecture, NormNames, StoredLinear
from qerl.models.families.dense import dense, read_head_size
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rotary_size

_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm4(config: ConfigReader) -> Architecture:
    config = config.filled(head_dim=128, max_position_embeddings=131_072, num_key_value_heads=2)
    return dense(
        config,
        "Glm4ForCausalLM",
        eps=1.5625e-7,
        rotary_size=read_rotary_size(config, read_head_size(config), default=0.5),
        rope_is_interleaved=True,
        qkv_bias=config.flag("attention_bias", True),
        norms=_NORMS,
        stored_linears=(StoredLinear(name="mlp.gate_up_proj", holds=("mlp.gate_proj", "mlp.up_proj")),),
    )
