"""Write the verdicts on the claims of QeRL side by side: the embedded model of 135M, and real models.

    | claim | SmolLM2-135M | Qwen2.5-Coder-0.5B | Qwen2.5-Coder-1.5B |
    | NVFP4 + AQN ends above BF16 LoRA | not shown, -0.01 [-0.03, 0.01] | | supported, +0.02 [0.01, 0.03] |

A cell is empty until its study has lines. Below the table stands the verdict on every other claim of a real
model. Each verdict is corrected over the claims of its own study (analysis.py).
"""

from collections.abc import Sequence
from pathlib import Path

from qerl.tracking.atomic_file import write_atomic
from studies.analysis import Judged
from studies.catalog import SMALL_STUDIES, STUDIES
from studies.findings import Result, results_in
from studies.verdict import evidence_text, interval, sentence

MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B")
Place = tuple[str, str, str, str]
"""Study, arm, against, metric: where a claim is."""
_GSM8K = ("gsm8k_small", "gsm8k")


def _both(arm: str, against: str, metric: str) -> tuple[Place, ...]:
    return tuple((study, arm, against, metric) for study in _GSM8K)


ROWS: tuple[tuple[str, tuple[Place, ...]], ...] = (
    (
        "NVFP4 has a higher entropy than BF16",
        (("entropy", "nvfp4", "bf16", "entropy"), *_both("nvfp4", "bf16", "entropy_first")),
    ),
    (
        "NVFP4's reward grows faster than BF16 LoRA's",
        (("growth", "nvfp4", "bf16", "reward_mean"), *_both("nvfp4", "bf16", "reward_mean")),
    ),
    (
        "NVFP4 + AQN's reward grows faster than BF16 LoRA's",
        (("growth", "nvfp4+aqn", "bf16", "reward_mean"), *_both("nvfp4+aqn", "bf16", "reward_mean")),
    ),
    (
        "NVFP4 + AQN ends above BF16 LoRA",
        (("growth", "nvfp4+aqn", "bf16", "accuracy_after"), *_both("nvfp4+aqn", "bf16", "greedy")),
    ),
    (
        "AQN raises what NVFP4 ends at",
        (("noise", "exponential", "none", "accuracy_after"), *_both("nvfp4+aqn", "nvfp4", "greedy")),
    ),
    (
        "BF16 LoRA collapses more than NVFP4 at ten times the rate",
        (
            ("rank", "bf16-r32-lr0.003", "nvfp4-r32-lr0.003", "reward_drop"),
            ("gsm8k_rank", "bf16-r32-x10", "nvfp4-r32-x10", "reward_drop"),
        ),
    ),
    (
        "A small rank learns faster than rank 128 (16 at 135M, 8 else)",
        (
            ("rank", "nvfp4-r16-lr0.0003", "nvfp4-r128-lr0.0003", "reward_mean"),
            ("gsm8k_rank", "nvfp4-r8-x1", "nvfp4-r128-x1", "reward_mean"),
        ),
    ),
)
"""The claim, and where each model's verdict is, in the order of MODELS."""


def real_findings(results: Sequence[Result]) -> str:
    """Return Markdown: the table, then the claims of real models that it does not have."""
    judged = {place_of(study.name, one): (study, one) for study, claims in results for one in claims}
    lines = ["Verdict and difference with its 95 % interval; an empty cell was not measured.", ""]
    lines += [_row(("claim", *MODELS)), _row(("---",) * (1 + len(MODELS)))]
    for text, places in ROWS:
        cells = [_cell(judged[place][1]) if place in judged else "" for place in places]
        lines.append(_row((text, *cells, *[""] * (len(MODELS) - len(cells)))))
    shown = {place for _, places in ROWS for place in places}
    others = [
        f"- {study.name}: {one.verdict}: {sentence(one)} ({evidence_text(study, one)})."
        for place, (study, one) in judged.items()
        if place not in shown and study.name not in SMALL_STUDIES and one.evidence is not None
    ]
    return "\n".join([*lines, *(["", *others] if others else [])])


def place_of(study: str, judged: Judged) -> Place:
    claim = judged.claim
    return study, claim.arm, claim.against, claim.metric


def write_real_findings(folder: Path) -> Path:
    """Write FOLDER/real.md, which docs/studies.md names; return its path."""
    path = folder / "real.md"
    write_atomic(path, f"{real_findings(results_in(folder, STUDIES))}\n".encode())
    return path


def _cell(judged: Judged) -> str:
    if judged.evidence is None:
        return ""
    difference = judged.evidence.over_all.difference
    sign = "+" if difference.mean >= 0 else ""
    return f"{judged.verdict}, {sign}{interval(difference)}"


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
