"""Refuse settings that do not go together: one table, which docs/config.md shows.

A config is refused if two settings hold that do not work together. Both are conditions on fields:

    rollout.partial          it is set: not None, False, 0 or empty      no ray.address         it is not
    noise.scope sample       it has this value                           noise.scope not step   another
    task.rewards has judge   this is among its values                    A and B or C           as in Python

What concerns one section is checked when the section is made, all else when the RunConfig is. What depends on
a model or a task is checked where these are loaded.
"""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from qerl.errors import UserError

_BASE_JUDGE = "task.judge.url base and task.rewards has judge"
CONFLICTS: dict[str, dict[str, str]] = {
    "model.calibrate gptq": {
        "model.format not nvfp4": "{setting} needs model.format nvfp4, got {model.format}; set"
        " model.calibrate none for others",
        "ray.address": "model.calibrate does not work with --ray: run `qerl quantize` first, and set"
        " model.calibrate none",
    },
    "adapter.experts not none": {
        "adapter.dropout": "{setting} needs adapter.dropout 0, got {adapter.dropout}",
        "adapter.kind not lora": "{setting} needs adapter.kind lora, got {adapter.kind}",
    },
    "adapter.train_norms": {
        "adapter.kind not lora": "{setting} needs adapter.kind lora, got {adapter.kind}",
    },
    "adapter.modules_to_save": {
        "adapter.kind not lora": "{setting} needs adapter.kind lora, got {adapter.kind}",
        "model.head_format not bf16": "{setting} needs model.head_format bf16, got {model.head_format}",
        "distil.loss not policy_gradient": "{setting} needs distil.loss policy_gradient: a divergence has no"
        " gradient in the head",
        "ray.address": "{setting} does not work with --ray: every step would send the tables",
    },
    "adapter.init_from": {
        "adapter.kind not lora": "{setting} needs adapter.kind lora, got {adapter.kind}",
    },
    "algo.branching not none": {
        "algo.dynamic_sampling": "algo.dynamic_sampling drops the groups that algo.branching needs: set only"
        " one of them",
        "noise.scope sample and noise.noise_in both": "noise.scope sample with noise_in both needs"
        " algo.branching none: the learner treats a branch's prefix as prompt, without the sample's noise",
        "ray.address and noise.scope not step": "noise.scope {noise.scope} does not work with algo.branching"
        " deep and ray.address, where a branch's prompt has the tokens before its pivot: set it to step",
    },
    "algo.advantage beta": {
        "algo.overlong shape": "{setting} needs rewards in [0, 1], but {other} subtracts up to 1",
    },
    "noise.control.measure kl and noise.noise_in both": {
        "noise.schedule adaptive or noise.schedule plappert": "noise.control.measure kl needs noise.noise_in"
        " sampler: with noise in both there is no KL",
    },
    "distil.off_policy_share": {
        "distil.loss policy_gradient": "{setting} needs distil.loss forward_kl, reverse_kl or jsd: the policy"
        " gradient is one of the student's own samples",
        "no distil.data": "{setting} needs distil.data",
    },
    "distil.teacher": {
        "agent.function": "{setting} does not work with an agent",
        "noise.schedule not none": "{setting} needs noise.schedule none, got {noise.schedule}: noise would"
        " reach it",
        "algo.branching not none or algo.dynamic_sampling": "{setting} does not work with algo.branching or"
        " dynamic_sampling, which select by reward",
        "distil.loss policy_gradient and algo.loss_type gspo": "distil.loss policy_gradient has an advantage"
        " for each token: set algo.loss_type gspo_token",
        "distil.is_endpoint and sample.temperature not 1": "an endpoint's logprobs are at temperature 1: set"
        " sample.temperature 1, got {sample.temperature}",
    },
    "engine.exact": {
        "sample.top_k or sample.top_p or sample.min_p": "{setting} does not support truncated sampling:"
        " unset {other}",
    },
    "evaluate.float": {
        "no evaluate.num_prompts": "{setting} needs evaluate.num_prompts above 0",
        "model.format bf16": "{setting} needs a quantized model.format, got bf16",
        "agent.function or ray.address or sft.data": "{setting} does not work with an agent, ray.address or"
        " sft.data",
    },
    "ray.max_staleness": {
        "no ray.address or algo.importance none": "{setting} needs ray.address and an algo.importance other"
        " than none",
    },
    "adapter.kind full": {
        "algo.beta": "algo.beta needs a frozen reference policy; adapter.kind full has none: set it to 0",
    },
    "dpo.loss_type": {
        "no sft.data": "{setting} needs sft.data: use `qerl dpo`",
        "adapter.kind not lora": "{setting} needs adapter.kind lora: the reference is the policy without"
        " adapter",
        "adapter.dropout": "{setting} needs adapter.dropout 0, got {adapter.dropout}",
        "sft.packing": "{setting} does not work with packing: a batch counts rows, and nothing is padded",
        "no sft.assistant_only_loss": "{setting} learns completions only: leave assistant_only_loss on",
    },
    "model.sampler_format not None": {
        "adapter.kind not lora or engine.exact": "{setting} needs adapter.kind lora and engine.exact off",
    },
    "learn.backward int8": {
        "model.format fp8-flow": "{other} has its own backward pass: set learn.backward to bf16",
        "adapter.kind not lora or adapter.dropout": "{setting} needs adapter.kind lora and adapter.dropout 0:"
        " set it to bf16",
    },
    "agent.function": {
        "noise.scope not step": "an agent does not work with {other}: set it to step",
        "algo.overlong shape": "an agent does not work with {other}: set it to keep or mask",
    },
    "rollout.keep_kv_cache": {
        "no rollout.partial": "{setting} needs rollout.partial",
        "engine.exact": "{setting} does not work with {other}",
    },
    "rollout.partial": {
        "algo.importance none": "{setting} does not work with {other}: older tokens need a correction",
        "algo.branching not none": "{setting} does not work with {other}",
        "algo.dynamic_sampling": "{setting} does not work with {other}",
        "agent.function": "{setting} does not work with an agent",
        "distil.teacher": "{setting} does not work with {other}",
        "ray.address": "{setting} does not work with {other}",
        "noise.scope not step": "{setting} does not work with {other}",
    },
    _BASE_JUDGE: {
        "ray.address": "task.judge.url base does not work with --ray: give the URL of an endpoint",
        "algo.branching not none": "task.judge.url base does not work with {other}: its KV cache stays open",
        "adapter.kind not lora": "task.judge.url base does not work with {other}: the base model changes",
    },
    "rollout.prompt_order longest_first": {
        "rollout.partial or algo.branching not none or distil.teacher or ray.address": "{setting} does not"
        " work with rollout.partial, algo.branching, distil.teacher or ray.address",
    },
}
"""By setting and by what it does not work with: the message. {setting} and {other} are what holds of both,
{noise.scope} is the field's value."""
NEEDS_OUR_DECODER = (
    "model.calibrate gptq or model.sampler_format not None or model.head_format not bf16 or engine.exact"
    " or engine.kv_cache_dtype not auto or engine.decode_steps_per_sync or rollout.keep_kv_cache"
    " or algo.branching not none or noise.scope not step or learn.gradient_checkpointing offload"
    " or learn.backward not bf16 or adapter.router or adapter.experts not none or adapter.train_norms"
    " or adapter.modules_to_save or distil.teacher or ray.address"
)
"""Settings that a model which transformers' code runs does not work with: training/policy.py."""


def check_conflicts(settings: Any, section: str = "") -> None:
    """Raise UserError if the settings of this section, or of a RunConfig, do not go together."""
    for setting, others in _conflicts(section).items():
        first = holding(settings, setting, section)
        for other, message in others if first else ():
            if second := holding(settings, other, section):
                raise UserError(_filled(message, settings, section, setting=first, other=second))


def holding(settings: Any, condition: str, section: str = "") -> str:
    """Return what holds of the condition, "noise.scope sample" of "noise.scope not step"; "" for nothing."""
    texts = ([test(settings) for test in tests] for tests in _tests(condition, section))
    return ", ".join(" and ".join(each) for each in texts if all(each))


def _filled(message: str, settings: Any, section: str, **known: str) -> str:
    """Return the message with what the names in braces stand for."""
    return re.sub(
        r"{([\w.]+)}",
        lambda name: known[name[1]] if name[1] in known else str(_reader(name[1], section)(settings)),
        message,
    )


@functools.cache
def _conflicts(section: str) -> dict[str, list[tuple[str, str]]]:
    """Return the conflicts whose fields all lie in the section; without one, those between sections."""
    conflicts: dict[str, list[tuple[str, str]]] = {}
    for setting, others in CONFLICTS.items():
        for other, message in others.items():
            sections = set(re.findall(r"(?<![\w.])([a-z_]+)\.", f"{setting} {other}"))
            if sections == {section} or (not section and len(sections) > 1):
                conflicts.setdefault(setting, []).append((other, message))
    return conflicts


def _reader(field: str, section: str) -> Callable[[Any], Any]:
    return operator.attrgetter(field.removeprefix(f"{section}."))


@functools.cache
def _tests(condition: str, section: str) -> list[list[Callable[[Any], str]]]:
    """Return, for each alternative, functions that return a term as it holds, or "" if it does not."""
    return [[_test(term, section) for term in each.split(" and ")] for each in condition.split(" or ")]


def _test(term: str, section: str) -> Callable[[Any], str]:
    expects = not term.startswith("no ")
    field, *rest = term.removeprefix("no ").split()
    value, literals = _reader(field, section), {"None": None, "1": 1.0}
    match rest:
        case []:
            return lambda settings: term if bool(value(settings)) is expects else ""
        case ["not", text]:
            unless: Any = literals.get(text, text)
            return lambda settings: "" if (now := value(settings)) == unless else f"{field} {now}"
        case ["has", text]:
            return lambda settings: term if text in value(settings) else ""
        case [text]:
            return lambda settings: term if value(settings) == text else ""
    raise AssertionError(term)
