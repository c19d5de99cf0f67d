"""SmolLM3: Llama, of which every fourth layer does not rotate queries and keys."""

from qerl.errors import UserError
from qerl.models.architecture import Architecture, LayerKind
from qerl.models.families.dense import attention_biases, dense, read_layer_kinds, read_num_layers
from qerl.models.families.reader import ConfigReader, short_text
from qerl.models.families.rope_settings import read_rope


def smollm3(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=32_768, tie_word_embeddings=True, num_key_value_heads=4)
    rope, kinds, mlp_bias = read_rope(config, theta=2e6), _kinds(config), config.flag("mlp_bias")
    parts = {"rope": rope, "layer_kinds": kinds, "mlp_bias": mlp_bias}
    return dense(config, "SmolLM3ForCausalLM", **attention_biases(config), **parts)


def _kinds(config: ConfigReader) -> tuple[LayerKind, ...]:
    num_layers, every = read_num_layers(config), config.count("no_rope_layer_interval", 4)
    rotates = [int((index + 1) % every != 0) for index in range(num_layers)]
    if config.get("no_rope_layers") is not None:
        rotates = config.listed("no_rope_layers", num_layers)
        if odd := [each for each in rotates if each not in (0, 1)]:
            raise UserError(f"no_rope_layers must be 0 or 1, got {short_text(odd[0])}")
    windows: tuple[int | None, ...] = (None,) * num_layers
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        kinds = read_layer_kinds(config, lambda index: not rotates[index])
        windows = tuple(kind.window for kind in kinds) or windows
    return tuple(
        LayerKind(window=window, rope="main" if is_rotated else "none")
        for window, is_rotated in zip(windows, rotates, strict=True)
    )
