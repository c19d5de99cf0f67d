"""The tables of qerl beside other programs, of made rows."""

from benchmarks.peer_table import PEERS, peer_table, vllm_table
from benchmarks.rows import read_rows

STEP = {
    "bench": "peer",
    "model": "m",
    "generate_s": 2.0,
    "learn_s": 1.0,
    "tokens_per_s": 1234.5,
    "memory_gb": 40.4,
}
VLLM = {
    "bench": "vllm-decode",
    "shape": "qwen2.5-0.5b",
    "format": "nvfp4",
    "gpu": "NVIDIA H200",
    "batch": 8,
    "lora_rank": 32,
    "prompt_tokens": 256,
    "max_tokens": 512,
    "tok_per_s": 2781.4,
}


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "| " in line]


def peer(by, step_s, **fields):
    return STEP | {"by": by, "format": "bf16", "step_s": step_s} | fields


def test_a_run_shows_its_medians_and_one_that_was_cut_its_last_step():
    trl = {"trl": "1.16.0"}
    rows = [
        peer("trl", 80.0, step=0, **trl),
        peer("trl", 57.0, step=1, **trl),
        peer("qerl", 9.0, step=0),
        peer("qerl", 5.04, num_steps=8),
        peer("trl-vllm", 20.26, num_steps=5, vllm="0.26.0", **trl),
        VLLM,
    ]
    _, _, *lines = cells(peer_table(rows))
    assert [line[:3] for line in lines] == [
        ["qerl", "BF16", "5.0"],
        ["TRL 1.16, vLLM 0.26", "BF16", "20.3"],
        ["TRL 1.16, transformers", "BF16", "57.0"],
    ]
    assert [line[-1] for line in lines] == ["7", "4", "step 2, no median"]
    assert lines[0][3:7] == ["2.0", "1.0", "1,234", "40"]


def test_vllm_stands_beside_our_row_of_the_same_case_alone():
    ours = VLLM | {
        "bench": "decode",
        "provider": "qerl-nvfp4",
        "tok_per_s": 8897.0,
        "kv": "bf16",
        "runs": 3,
    }
    others = [{**ours, "batch": 64}, {**ours, "max_tokens": 1024}, {**ours, "kernels": "portable"}]
    others = [{**row, "tok_per_s": 1.0} for row in others]
    (*_, line) = cells(vllm_table([VLLM], [ours, *others]))
    assert line == ["qwen2.5-0.5b", "NVFP4", "2,781 / 8,897"]
    (*_, line) = cells(vllm_table([VLLM], others))
    assert line[-1] == "2,781 / not measured"


def test_the_stored_rows_name_what_ran_beside_them():
    rows = read_rows(PEERS)
    assert rows and all(row["beside"] and row["gpu"] for row in rows)
