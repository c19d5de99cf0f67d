"""Former names of config fields and commands: refused on the command line, translated in stored runs.

Names are dotted as on the command line, with underscores: `engine.kv_gb`.
"""

from collections.abc import Iterable
from typing import Any

from qerl.errors import UserError

FIELDS = {
    "num_samples": "num_generations",
    "model.sampler": "model.sampler_format",
    "model.head": "model.head_format",
    "model.compute": "model.dtype",
    "adapter.targets": "adapter.target_modules",
    "adapter.start": "adapter.init_from",
    "task.reward_deadline_s": "task.reward_timeout_s",
    "task.system": "task.system_prompt",
    "task.code.test_deadline_s": "task.code.test_timeout_s",
    "engine.page_tokens": "engine.block_size",
    "engine.kv": "engine.kv_cache_dtype",
    "engine.kv_gb": "engine.kv_cache_gb",
    "engine.max_running": "engine.max_num_seqs",
    "engine.prefill_tokens": "engine.max_num_batched_tokens",
    "engine.burst_steps": "engine.decode_steps_per_sync",
    "learn.schedule": "learn.lr_scheduler_type",
    "learn.warmup_fraction": "learn.warmup_ratio",
    "learn.passes_per_step": "learn.num_iterations",
    "learn.micro_tokens": "learn.max_tokens_per_microbatch",
    "learn.recompute": "learn.gradient_checkpointing",
    "learn.optimizer": "learn.optim",
    "algo.loss": "algo.loss_type",
    "algo.clip_low": "algo.epsilon",
    "algo.clip_high": "algo.epsilon_high",
    "algo.kl_coefficient": "algo.beta",
    "noise.per": "noise.scope",
    "noise.control.quiet_steps": "noise.control.warmup_steps",
    "evaluate.right_from": "evaluate.success_threshold",
    "ray.num_ahead": "ray.max_staleness",
    "sft.num_looks": "sft.num_eval_samples",
}
VALUES = {
    "engine.kv_cache_dtype": {"compute": "auto"},
    "learn.optim": {"adamw8bit": "adamw_8bit"},
    "task.rewards": {"hints": "higher_lower"},
}
"""By field, in its present name: former values and the present ones."""
OPTIONS = {
    "eval": {"right_from": "success_threshold"},
    "generate": {"system": "system_prompt"},
    "serve": {"system": "system_prompt"},
    "sft": {"num_looks": "num_eval_samples", "look_tokens": "eval_max_tokens"},
    "data": {},
}
"""By command, other than train."""
RECIPES = {"hints": "higher_lower"}
COMMANDS = {
    "import": "qerl train RECIPE --init-adapter ADAPTER",
    "study": "python -m studies run NAME, in a checkout",
}
BENCHES = {
    "memory": "qerl bench step --memory",
    "linear": "python -m benchmarks linear, in a checkout",
    "parity": "python -m benchmarks parity, in a checkout",
    "tile": "python -m benchmarks tile, in a checkout",
}


def refuse_former_names(arguments: Iterable[str], former: dict[str, str] = FIELDS) -> None:
    """Raise UserError for an option under its former name, with the present one."""
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].partition("=")[0].replace("-", "_")
        if name in former:
            raise UserError(f"--{name} is now --{former[name]}".replace("_", "-"))


def refuse_former_options(command: str, arguments: Iterable[str]) -> None:
    """Raise UserError for a former option of the command, or a former field of a part of the config."""
    fields = {former: present for former, present in FIELDS.items() if "." in former}
    refuse_former_names(arguments, fields | OPTIONS[command])


def with_present_names(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a stored config under the present names of its fields and values."""
    found: dict[str, Any] = {}
    for former, value in config.items():
        path = FIELDS.get(prefix + former, prefix + former)
        if isinstance(value, dict):
            value = with_present_names(value, f"{path}.")
        found[path.rpartition(".")[2]] = _present(value, VALUES.get(path, {}))
    return found


def _present(value: Any, former: dict[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_present(each, former) for each in value]
    return former.get(value, value) if isinstance(value, str) else value
