"""Write the verdicts on the claims of QeRL side by side: the embedded model of 135M, and real models.

    | claim | SmolLM2-135M | Qwen2.5-Coder-0.5B | Qwen2.5-Coder-1.5B | both sizes |
    | NVFP4 + AQN ends above BF16 LoRA | **not shown** -0.01 [-0.03, 0.01], p = 0.4, n = 20 | not run | | |

A study without lines of a claim's arms has "not run"; an empty cell says that no study asks it. The last
column tests the pairs of both sizes together. Below the table stands what the arms of real models cost, and
the verdict on every other claim of a real model. Each verdict is corrected over the claims of its own study,
those of the last column over the claims that both sizes ask (analysis.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from qerl.tracking.atomic_file import write_atomic
from studies import costs
from studies.analysis import SECONDS, SIGNIFICANCE, Judged, judge
from studies.catalog import SMALL_STUDIES, STUDIES
from studies.findings import Result, read_lines, results_in, with_results
from studies.results import Line
from studies.study import Claim, Study
from studies.verdict import evidence_text, markdown, p_text, signed, word, word_of_others

MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B")
Place = tuple[str, str, str, str]
"""Study, arm, against, metric: where a claim is."""
_GSM8K = ("gsm8k_small", "gsm8k")


def _both(arm: str, against: str, metric: str) -> tuple[Place, ...]:
    return tuple((study, arm, against, metric) for study in _GSM8K)


ROWS: tuple[tuple[str, tuple[Place | None, ...]], ...] = (
    (
        "NVFP4 has a higher entropy than BF16",
        (("entropy", "nvfp4", "bf16", "entropy"), *_both("nvfp4", "bf16", "entropy_first")),
    ),
    (
        "NVFP4's reward grows faster than BF16 LoRA's (mean over the run)",
        (("growth", "nvfp4", "bf16", "reward_mean"), *_both("nvfp4", "bf16", "reward_mean")),
    ),
    (
        "NVFP4 + AQN's reward grows faster than BF16 LoRA's (mean over the run)",
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
    ("AQN raises what BF16 LoRA ends at", (None, *_both("bf16+aqn", "bf16", "greedy"))),
    (
        "A step of NVFP4 + AQN takes less time than one of BF16 LoRA",
        (None, *_both("nvfp4+aqn", "bf16", "step_s")),
    ),
    (
        "NVFP4 + AQN ends above NF4 (QLoRA); at 135M without AQN",
        (
            ("growth", "nvfp4", "nf4", "accuracy_after"),
            None,
            ("gsm8k", "nvfp4+aqn", "nf4", "greedy"),
        ),
    ),
    (
        "NVFP4 + AQN ends above full fine-tuning",
        (
            ("growth", "nvfp4+aqn", "full", "accuracy_after"),
            None,
            ("gsm8k", "nvfp4+aqn", "full", "greedy"),
        ),
    ),
    (
        "Noise that decays exponentially ends above constant noise",
        (
            ("noise", "exponential", "constant", "accuracy_after"),
            ("gsm8k_noise", "sigma-x1", "constant", "greedy"),
        ),
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
_LEAD = "The claims of QeRL (arXiv 2510.11696), and what our runs say of them, model by model."
_RULE = (
    "Each cell: verdict, mean difference with its own 95 % interval, p of the exact sign-flip test over n"
    " pairs (task and seed), corrected by Holm's method over the claims of its family, which its study's"
    f" page names. Reproduced, refuted: p < {SIGNIFICANCE}, and the difference has the claimed or the"
    " opposite sign. Not shown: p is larger, as it always is with n below 6, whatever the interval, which is"
    " of one claim alone and assumes normal differences; those inside it are open. Depends: the tasks"
    " differ. Not run: a study asks it, and has no lines of its arms yet. Empty: no study asks it. Both"
    " sizes: one test of the pairs of the 0.5B and of the 1.5B, which are in the columns before it too. The"
    " models are GGUF files (135M: Q4_1, else Q4_K_M); their weights, decoded, are the BF16 of these runs."
)


def real_findings(results: Sequence[Result], lines: Mapping[str, Sequence[Line]]) -> str:
    """Return Markdown: the table, what the arms of real models cost, then the claims that the table does not
    have. lines: of each study of a real model, by its name."""
    judged = {place_of(study.name, one): one for study, claims in results for one in claims}
    both = {_asks(one.claim): one for one in _judged_together(lines)}
    rows = []
    for text, places in ROWS:
        cells = [_cell(place, judged) for place in places]
        cells += [""] * (len(MODELS) - len(cells))
        rows.append((text, *cells, _cell_of_both(places[-1], both)))
    studies = {study.name: study for study, _ in results if study.name not in SMALL_STUDIES}
    parts = [_LEAD, "\n".join(markdown(("claim", *MODELS, "both sizes"), rows)), _RULE]
    parts += [text for name, study in studies.items() if (text := _costs(study, lines[name]))]
    shown = {place for _, places in ROWS for place in places}
    others = [
        f"- {study.name}: {word(study, one)}: {one.claim.says} ({evidence_text(study, one)})."
        for study, claims in results
        for one in claims
        if study.name in studies and place_of(study.name, one) not in shown and one.evidence is not None
    ]
    return "\n\n".join([*parts, *(["\n".join(others)] if others else [])])


def _judged_together(lines: Mapping[str, Sequence[Line]]) -> list[Judged]:
    """Return the claims that both studies of GSM8K make, judged over the lines of both; those on seconds,
    which differ with the size, are left out."""
    small, large = (STUDIES[name]() for name in _GSM8K)
    asked = {_asks(claim) for claim in large.claims}
    claims = [c for c in small.claims if _asks(c) in asked and not c.metric.endswith(SECONDS)]
    study = dataclasses.replace(
        large,
        tasks=(*small.tasks, *large.tasks),
        claims=tuple(dataclasses.replace(claim, side_results=()) for claim in claims),
    )
    return judge(study, [line for name in _GSM8K for line in lines.get(name, ())])


def place_of(study: str, judged: Judged) -> Place:
    return study, *_asks(judged.claim)


def _asks(claim: Claim) -> tuple[str, str, str]:
    return claim.arm, claim.against, claim.metric


def lines_of_real_models(folder: Path) -> dict[str, list[Line]]:
    names = [name for name in with_results(folder) if name not in SMALL_STUDIES]
    return {name: read_lines(folder / name) for name in names}


def write_real_findings(folder: Path) -> Path:
    """Write FOLDER/real.md, which docs/studies.md names; return its path."""
    path = folder / "real.md"
    text = real_findings(results_in(folder, STUDIES), lines_of_real_models(folder))
    write_atomic(path, f"{text}\n".encode())
    return path


def _cell(place: Place | None, judged: Mapping[Place, Judged]) -> str:
    """Return a cell; of a study without lines, or a claim without pairs, "not run"."""
    if place is None:
        return ""
    one = judged.get(place)
    if one is None or one.evidence is None or one.p is None:
        return word_of_others("not run")
    difference, n = one.evidence.over_all.difference, one.evidence.num_units
    return f"**{word_of_others(one.verdict)}** {signed(difference)}, {p_text(one.p)}, n = {n}"


def _cell_of_both(place: Place | None, both: Mapping[tuple[str, str, str], Judged]) -> str:
    """Return a cell with the pairs of each size; empty where one size has none."""
    one = both.get(place[1:]) if place is not None and place[0] in _GSM8K else None
    if one is None or one.evidence is None or len(one.evidence.by_task) < len(_GSM8K):
        return ""
    pairs = " + ".join(str(paired.difference.n) for paired in one.evidence.by_task.values())
    return f"**{word_of_others(one.verdict)}** {p_text(one.p)}, n = {pairs}"


def _costs(study: Study, lines: Sequence[Line]) -> str:
    table = costs.markdown(study, lines)
    return f"**{study.name}.** " + "\n".join(table).strip() if table else ""
