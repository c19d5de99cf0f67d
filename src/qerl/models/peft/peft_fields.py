"""Fields of PEFT's LoraConfig and of adapter_config.json: which are read, which change nothing, and that all
others, also those of later versions of PEFT, are refused by their names unless they are unset."""

from collections.abc import Collection, Mapping
from typing import Any

from qerl.errors import UserError
from qerl.models.families.reader import short_text

READ = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
}
NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "peft_version", "runtime_config"),
    *("megatron_core", "qalora_group_size"),  # of megatron_config and use_qalora, which are refused
}
"""Fields that describe the adapter, or say where PEFT computes."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True,),
    "revision": ("main",),
}
"""Values of other fields, besides unset ones."""


def check_fields(
    settings: Mapping[str, Any], *, no_effect: Collection[str] = NO_EFFECT, init: tuple[Any, ...] = (True,)
) -> None:
    """Raise UserError for the first field that cannot be honoured. init: values of init_lora_weights."""
    plain = _PLAIN | {"init_lora_weights": init}
    for name, value in settings.items():
        value = getattr(value, "value", value)  # of PEFT's enums of strings
        allowed = plain.get(name, ())
        is_plain = any(type(value) is type(each) and value == each for each in allowed)
        is_unset = _is_unset(value) and not (value is False and name in plain)
        if name in READ or name in no_effect or is_plain or is_unset:
            continue
        expected = repr(allowed[0]) if allowed else "which leaves it unset"
        raise UserError(f"{name} is {short_text(value)}; only plain LoRA is supported, {expected}")


def _is_unset(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is False or value is None or (not is_number and not value)
