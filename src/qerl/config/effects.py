"""Name the settings of a run that have no effect, so that none is ignored in silence: one table.

A field, or all fields of a section, acts only where the condition beside it holds; conditions are written as
in conflicts.py. `facts` are those of the run that no field shows. A field that has its default is not named.
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator
from typing import Any

from qerl.config.conflicts import holding
from qerl.config.dpo import OF_DIFFERENCE
from qerl.config.run import RunConfig

_LORA = "adapter.kind lora"
_NOISE = "noise.schedule not none"
_DISTIL = "distil.teacher"
_ENDPOINT = "distil.is_endpoint"
_PARTIAL = "rollout.partial"
_REWARDS = "no agent.function"
_SPLITS = "task.source hub or task.source gsm8k"
_HAS_RATIO = "algo.loss_type not sapo and algo.loss_type not maspo and algo.loss_type not nll"
_CAPPED = "algo.importance not none and algo.importance not ratio"
_SMOOTHED = " or ".join(f"dpo.loss_type has {name}" for name in ("robust", "exo_pair", "aot", "aot_unpaired"))
_OF_DIFFERENCE = " or ".join(f"dpo.loss_type has {name}" for name in OF_DIFFERENCE)
_TRACKED = "loggers has wandb or loggers has mlflow or loggers has trackio"
NEEDS: dict[str, str] = {
    "run_name": _TRACKED,
    "rank_timeout_s": "facts.has_ranks",
    "adapter.rank": _LORA,
    "adapter.alpha": _LORA,
    "adapter.use_rslora": _LORA,
    "adapter.rank_pattern": _LORA,
    "adapter.alpha_pattern": _LORA,
    "adapter.dropout": _LORA,
    "adapter.expert_rank": "adapter.experts not none",
    "task.env_options": "task.source environment",
    "task.gym": "task.source gym",
    "task.gym_options": "task.source gym",
    "task.num_rows": "task.source gym",
    "task.prompt_column": "task.source file or task.source hub",
    "task.split": _SPLITS,
    "task.held_out_split": f"{_SPLITS} or task.source file",
    "task.template": "facts.has_template",
    "task.chat_template_kwargs": "facts.has_chat_template",
    "task.rewards": _REWARDS,
    "task.reward_weights": _REWARDS,
    "task.reward_timeout_s": _REWARDS,
    "task.reward_scope": _REWARDS,
    "task.reward_workers": _REWARDS,
    "task.reward_overlap": _REWARDS,
    "task.code": "task.rewards has code",
    "task.judge": "task.rewards has judge",
    "task.reward_model": "task.rewards has reward_model",
    "task.environment": "facts.has_environment",
    "agent": "agent.function",
    "agent.tool_timeout_s": "task.source environment",
    "rollout.extra_prompts": _PARTIAL,
    "rollout.max_staleness": _PARTIAL,
    "noise": _NOISE,
    "noise.sigma_end": "noise.schedule not constant and no noise.is_controlled",
    "noise.num_stages": "no noise.is_controlled",
    "noise.router": "facts.is_mixture",
    "noise.control": "noise.is_controlled",
    "noise.control.gain": "noise.schedule adaptive",
    "noise.control.factor": "noise.schedule plappert",
    "algo.advantage": "no distil.teacher",
    "algo.epsilon": _HAS_RATIO,
    "algo.epsilon_high": _HAS_RATIO,
    "algo.sapo": "algo.loss_type sapo",
    "algo.maspo": "algo.loss_type maspo",
    "algo.kl_estimator": "algo.beta",
    "algo.importance_cap": _CAPPED,
    "algo.importance_floor": "algo.importance icepop",
    "algo.geometric_low": "algo.reject has geometric",
    "algo.geometric_high": "algo.reject has geometric",
    "algo.veto_ratio": "algo.reject has veto",
    "algo.router_replay": "facts.is_mixture",
    "algo.deep": "algo.branching deep",
    "algo.max_rounds": "algo.dynamic_sampling",
    "algo.overlong_buffer": "algo.overlong shape",
    "evaluate.every": "evaluate.num_prompts",
    "evaluate.success_threshold": "no sft.data",
    "ray.num_samplers": "ray.address",
    "distil": _DISTIL,
    "distil.format": f"no {_ENDPOINT}",
    "distil.jsd_beta": "distil.loss jsd",
    "distil.top_k": "distil.is_divergence",
    "distil.data": "distil.off_policy_share",
    "distil.split": "distil.off_policy_share and no distil.is_file",
    "distil.endpoint_model": _ENDPOINT,
    "distil.timeout_s": _ENDPOINT,
    "distil.retries": _ENDPOINT,
    "distil.max_concurrent": _ENDPOINT,
    "sft": "sft.data",
    "sft.eval_fraction": "no sft.eval_data",
    "sft.split": "no sft.is_file",
    "sft.text_column": "no dpo.loss_type",
    "dpo": "dpo.loss_type",
    "dpo.f_divergence_type": _OF_DIFFERENCE,
    "dpo.f_alpha_divergence_coef": "dpo.f_divergence_type alpha_divergence",
    "dpo.label_smoothing": _SMOOTHED,
    "dpo.discopop_tau": "dpo.loss_type has discopop",
    "dpo.desirable_weight": "no dpo.is_paired",
    "dpo.undesirable_weight": "no dpo.is_paired",
}
"""By field or section: the condition under which it acts."""
FACTS = {
    "facts.is_mixture": "a mixture of experts",
    "facts.has_environment": "an environment in task.rewards",
    "facts.has_chat_template": "a tokenizer that has a chat template",
    "facts.has_template": "prompts that are texts",
    "facts.has_ranks": "torchrun",
}
"""By fact of a RunFacts: what a message calls it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts of a run that no field of its config shows."""

    is_mixture: bool
    has_environment: bool
    """An environment among the rewards."""
    has_chat_template: bool
    has_template: bool
    """Prompts are made of task.template."""
    has_ranks: bool
    """More than one process learns."""


class _Run:
    """The sections of a config, and `facts` beside them."""

    def __init__(self, config: RunConfig, facts: RunFacts | None):
        self._config, self.facts = config, facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def effect_notices(config: RunConfig, facts: RunFacts | None = None) -> list[str]:
    """Return a line that names the settings without an effect, if there are any."""
    unused = settings_without_effect(config, facts)
    return [f"without effect: {', '.join(unused)}"] if unused else []


def settings_without_effect(config: RunConfig, facts: RunFacts | None = None) -> list[str]:
    """Return "algo.overlong_buffer 32 (needs algo.overlong shape)" for each field that has another value than
    its default, and no effect. facts: None before they are known; fields that need one are left out."""
    return [
        f"{field} {_shown(value)} (needs {FACTS.get(condition, condition)})"
        for field, value, condition in _unused(config, facts)
    ]


def without_unused(config: RunConfig, recipe: RunConfig, chosen: Iterable[str]) -> RunConfig:
    """Return the config with the defaults of fields that the recipe sets and that have no effect any more,
    such as task.gym_options once the task is a file. chosen: fields that the user has set, which stay."""
    of_recipe = dict(_changed(recipe, RunConfig()))
    unused = {field for field, value, _ in _unused(config, None) if of_recipe.get(field) == value}
    return _with_defaults(config, RunConfig(), unused.difference(chosen))


def _with_defaults(config: Any, default: Any, fields: Container[str], prefix: str = "") -> Any:
    """Return the config or section with the defaults of these fields, set at once as some are checked
    together."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        name, value, usual = (
            f"{prefix}{field.name}",
            getattr(config, field.name),
            getattr(default, field.name),
        )
        if dataclasses.is_dataclass(usual):
            changes[field.name] = _with_defaults(value, usual, fields, f"{name}.")
        elif name in fields:
            changes[field.name] = usual
    return dataclasses.replace(config, **changes)


def _unused(config: RunConfig, facts: RunFacts | None) -> Iterator[tuple[str, Any, str]]:
    """Yield the name and the value of each field that settings_without_effect names, and what it lacks."""
    run = _Run(config, facts)
    for field, value in _changed(config, RunConfig()):
        for condition in _conditions(field):
            is_known = facts is not None or "facts." not in condition
            if is_known and not holding(run, condition):
                yield field, value, condition
                break


def _conditions(field: str) -> Iterator[str]:
    """Yield the conditions of the field and of the sections that it is in, but those that it is named in:
    noise.schedule does not act on itself."""
    parts = field.split(".")
    for end in range(1, len(parts) + 1):
        condition = NEEDS.get(".".join(parts[:end]))
        if condition is not None and field not in condition.split():
            yield condition


def _changed(config: Any, default: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field that differs from the default."""
    for field in dataclasses.fields(config):
        value, usual = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(usual):
            yield from _changed(value, usual, f"{prefix}{field.name}.")
        elif value != usual:
            yield f"{prefix}{field.name}", value


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
