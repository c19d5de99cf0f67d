"""Say what the runs are, by their run.json: model, task, method, sizes, device and versions."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from qerl.tracking.provenance import flatten
from qerl.tracking.report.read import RecordedRun


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
    sampler, adapter = known.get("model.sampler_format"), known.get("adapter.kind")
    commit, changed = str(known.get("commit", ""))[:7], " with changes" if facts.get("is_dirty") else ""
    summary = {
        "Model": _joined(
            known.get("model.path"),
            known.get("model.format"),
            sampler and f"sampler {sampler}",
            f"LoRA rank {known.get('adapter.rank')}" if adapter == "lora" else adapter and "full fine-tuning",
        ),
        **(_imitation(known) if known.get("sft.data") else _reinforcement(known)),
        **({"Teacher": _teacher(known)} if known.get("distil.teacher") else {}),
        "Device": _joined(known.get("device")),
        "Versions": _joined(
            *(_named(known, name + " {}", name) for name in ("qerl", "torch")),
            commit and f"commit {commit}{changed}",
        ),
        "Started": _joined(str(known.get("start_time", ""))[:16].replace("T", " ")),
    }
    return {label: text for label, text in summary.items() if text}


def _reinforcement(known: Mapping[str, Any]) -> dict[str, str]:
    noise = known.get("noise.schedule")
    gym = known.get("task.gym") if known.get("task.name") == "reasoning-gym" else None
    return {
        "Task": _joined(
            known.get("task.name") if gym is None else f"reasoning-gym {gym}",
            _named(known, "rewards {}", "task.rewards"),
        ),
        "Method": _joined(
            _named(known, "{} loss", "algo.loss_type"),
            _named(known, "{} advantage", "algo.advantage"),
            "no noise"
            if noise == "none"
            else _named(known, "{} noise {} to {}", "noise.schedule", "noise.sigma_start", "noise.sigma_end")
            if noise != "constant"
            else _named(known, "constant noise {}", "noise.sigma_start"),
        ),
        "Step": _step(known, "{} prompts x {} samples", "num_prompts", "num_generations"),
    }


def _imitation(known: Mapping[str, Any]) -> dict[str, str]:
    learns = "what the assistant says" if known.get("sft.assistant_only_loss") else "every token"
    return {
        "Task": _joined(known["sft.data"]),
        "Method": _joined("supervised fine-tuning", f"loss on {learns}"),
        "Step": _step(known, "{} rows", "num_prompts"),
    }


def _step(known: Mapping[str, Any], template: str, *names: str) -> str:
    rate = _named(known, "learning rate {}", "learn.learning_rate")
    return _joined(_named(known, template, *names), rate)


def _teacher(known: Mapping[str, Any]) -> str:
    loss = known.get("distil.loss")
    return _joined(
        known["distil.teacher"],
        known.get("distil.format"),
        _named(known, "{} over its {} most likely tokens", "distil.loss", "distil.top_k")
        if loss != "policy_gradient"
        else loss,
    )


def _named(known: Mapping[str, Any], template: str, *names: str) -> str:
    """Fill in the values; "" if one of them is not known."""
    values = [known.get(name) for name in names]
    texts = [
        ", ".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}" for value in values
    ]
    return "" if None in values else template.format(*texts)


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)
