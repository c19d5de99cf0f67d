"""Say what the runs are, by their run.json: model, task, method, sizes, device and versions."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from qerl.tracking.provenance import flatten
from qerl.tracking.report.read import RecordedRun

_NAME = re.compile(r"\{([\w.]+)\}")
_RATE = "learning rate {learn.learning_rate}"


def facts_list(runs: Sequence[RecordedRun]) -> str:
    """List the facts; what all runs share is said once, without a run's number."""
    rows = [run_summary(run.facts) for run in runs]
    entries = []
    for label in dict.fromkeys(label for row in rows for label in row):
        texts = [row.get(label, "unknown") for row in rows]
        lines = [f"<dd>{escape(texts[0])}</dd>"]
        if len(set(texts)) > 1:
            lines = [
                f'<dd class="s{i % 8}" data-run="{i}">{swatch(i, len(runs))}{escape(text)}</dd>'
                for i, text in enumerate(texts)
            ]
        entries.append(f"<div><dt>{label}</dt>{''.join(lines)}</div>")
    return f'<dl class="facts">{"".join(entries)}</dl>' if entries else ""


def swatch(index: int, num_runs: int) -> str:
    """Return a run's color with its number, so that color alone never tells runs apart."""
    return f"<i>{index + 1 if num_runs > 1 else ''}</i>"


def run_summary(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return {label: text} of what this content of run.json has."""
    config = facts.get("config")
    fields = flatten(config) if isinstance(config, dict) else {}
    known = {name: value for name, value in {**facts, **fields}.items() if value not in (None, "", [])}
    if commit := str(known.pop("commit", ""))[:7]:
        known["commit"] = commit + " with changes" * bool(facts.get("is_dirty"))
    if adapter := known.get("adapter.kind"):
        rank = known.get("adapter.rank")
        known["tuning"] = f"LoRA rank {rank}" if adapter == "lora" else "full fine-tuning"
    known["started"] = str(known.get("start_time", ""))[:16].replace("T", " ")
    summary = {
        "Model": ("{model.path}", "{model.format}", "sampler {model.sampler_format}", "{tuning}"),
        **(_stored_rows(known) if known.get("sft.data") else _reinforcement(known)),
        "Teacher": _teacher(known),
        "Device": ("{device}",),
        "Versions": ("qerl {qerl}", "torch {torch}", "commit {commit}"),
        "Started": ("{started}",),
    }
    parts = {label: [_filled(part, known) for part in row] for label, row in summary.items()}
    return {label: ", ".join(filter(None, texts)) for label, texts in parts.items() if any(texts)}


def _reinforcement(known: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    is_gym = known.get("task.name") == "reasoning-gym" and "task.gym" in known
    graded = "{noise.schedule} noise {noise.sigma_start} to {noise.sigma_end}"
    noises = {"none": "no noise", "constant": "constant noise {noise.sigma_start}"}
    noise = noises.get(str(known.get("noise.schedule")), graded)
    return {
        "Task": ("{task.name} {task.gym}" if is_gym else "{task.name}", "rewards {task.rewards}"),
        "Method": ("{algo.loss_type} loss", "{algo.advantage} advantage", noise),
        "Step": ("{num_prompts} prompts x {num_generations} samples", _RATE),
    }


def _stored_rows(known: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    learns = "what the assistant says" if known.get("sft.assistant_only_loss") else "every token"
    method = "supervised fine-tuning", f"loss on {learns}"
    if known.get("dpo.loss_type"):
        method = "preferences", "{dpo.loss_type} loss", "beta {dpo.beta}"
    return {"Task": ("{sft.data}",), "Method": method, "Step": ("{num_prompts} rows", _RATE)}


def _teacher(known: Mapping[str, Any]) -> tuple[str, ...]:
    if not known.get("distil.teacher"):
        return ()
    loss = "{distil.loss} over its {distil.top_k} most likely tokens"
    loss = "policy_gradient" if known.get("distil.loss") == "policy_gradient" else loss
    return "{distil.teacher}", "{distil.format}", loss


def _filled(template: str, known: Mapping[str, Any]) -> str:
    """Fill in the values of {names}; return "" if one of them is not known."""
    if not known.keys() >= set(_NAME.findall(template)):
        return ""
    return _NAME.sub(lambda match: _text(known[match[1]]), template)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
