"""The tables of qerl beside other programs: of results/peers, the rows of `python -m benchmarks peer`, and
vLLM's sampling on the shapes of `qerl bench decode`.

A line of the run has the medians; where it was cut short, its last step is shown, marked.
"""

from benchmarks.rows import NOT_MEASURED, Row, latest, markdown
from qerl.bench.record import RESULTS, ROOT

PEERS = ROOT / RESULTS / "peers"
_COLUMNS = {
    "s a step": ("step_s", ".1f"),
    "sampling": ("generate_s", ".1f"),
    "learning": ("learn_s", ".1f"),
    "sampled tokens/s": ("tokens_per_s", ",.0f"),
    "peak GB": ("memory_gb", ".0f"),
}
_FIRST = 1  # the step that compiles is left out


def peer_table(rows: list[Row]) -> str:
    """Return a line for each program and format, fastest first."""
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["bench"] == "peer":
            runs.setdefault((row["by"], row["format"]), []).append(row)
    shown = sorted((_shown(lines) for lines in runs.values()), key=lambda row: row["step_s"])
    title = (
        "**The same job on an H200**: Qwen2.5-Coder-1.5B-Instruct, GSM8K, 64 x 8 samples of at most 512"
        " tokens, LoRA of rank 32; medians after the first step. The second GPU ran TRL beside qerl, three"
        " runs of qerl beside TRL with vLLM. TRL learns without FlashAttention, 16 padded samples at a time."
    )
    head = ["", "weights", *_COLUMNS, "steps"]
    return markdown(title, head, [_line(row) for row in shown], [])


def _shown(lines: list[Row]) -> Row:
    """Return the medians of a run, or of a run without them its last step."""
    whole = [row for row in lines if "num_steps" in row]
    return whole[-1] if whole else lines[-1]


def _line(row: Row) -> list[str]:
    figures = [format(row[key], form) for key, form in _COLUMNS.values()]
    steps = f"{row['num_steps'] - _FIRST}" if "num_steps" in row else f"step {row['step'] + 1}, no median"
    return [_program(row), row["format"].upper(), *figures, steps]


def _program(row: Row) -> str:
    sampler = f"vLLM {_short(row['vllm'])}" if "vllm" in row else "transformers"
    return "qerl" if row["by"] == "qerl" else f"TRL {_short(row['trl'])}, {sampler}"


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def vllm_table(peers: list[Row], rows: list[Row]) -> str:
    """Return vLLM's tokens/s beside ours, a line for each shape and format, a column for each batch."""
    theirs = [row for row in peers if row["bench"] == "vllm-decode"]
    batches = sorted({row["batch"] for row in theirs})
    lines: dict[tuple[str, str], list[str]] = {}
    for row in theirs:
        cells = lines.setdefault((row["shape"], row["format"]), [""] * len(batches))
        cells[batches.index(row["batch"])] = f"{row['tok_per_s']:,.0f} / {_ours(row, rows)}"
    title = (
        "**vLLM 0.26 / qerl, sampling, H200**: tokens/s, LoRA of rank 32, random weights, prompts of 256 and"
        " samples of 512 tokens. vLLM's are one run each while the host's second GPU had other work, qerl's"
        " medians of 3 without."
    )
    head = ["shape", "weights", *(f"{batch} samples" for batch in batches)]
    cells = [[shape, weights.upper(), *cells] for (shape, weights), cells in sorted(lines.items())]
    return markdown(title, head, cells, [])


def _ours(theirs: Row, rows: list[Row]) -> str:
    same = ("shape", "batch", "lora_rank", "prompt_tokens", "max_tokens", "gpu")
    wanted = {name: theirs[name] for name in same} | {"provider": f"qerl-{theirs['format']}", "kv": "bf16"}
    found = [
        row
        for row in latest(rows)
        if row["bench"] == "decode"
        and row.get("kernels", "hopper") == "hopper"
        and wanted == {name: row[name] for name in wanted}
    ]
    return f"{found[-1]['tok_per_s']:,.0f}" if found else NOT_MEASURED
