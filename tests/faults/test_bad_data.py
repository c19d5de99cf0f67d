"""Rows that no prompt can be made of, in the middle of a run's data: the run goes on without them."""

import json

import tiny_run
from faults import runs

BAD = (
    '{"prompt": "1 \\ud83d 2 =", "answer": "3"}',
    '{"prompt": "1 + 2 =", "answer": ' + "[" * 900 + "]" * 900 + "}",
    '{"prompt": [{"content": "1 + 2 ="}], "answer": "3"}',
    '{"prompt": "1 + 2 =", "prompt": "1 + 3 ="}',
    '{"prompt": "1 + 2',
)


def with_bad_rows(folder):
    files = tiny_run.write_files(folder)
    good = [json.dumps({"prompt": f"{i} + {i} =", "answer": str(2 * i)}) for i in range(20)]
    (files / "sums.jsonl").write_text("\n".join([*good[:8], *BAD, *good[8:]]) + "\n")
    return files


def test_a_run_leaves_out_bad_rows_and_says_so(tmp_path):
    said = runs.finish(with_bad_rows(tmp_path), tmp_path / "run", "--num-steps", "4")
    assert "sums.jsonl: of 25 rows 5 unusable and left out (line 9: 'prompt' is not valid Unicode;" in said
    records = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    drawn = {record["prompt_index"] for record in records}
    assert len(drawn) == 12 and drawn.isdisjoint(range(8, 13))  # all rows but the held-out and the bad ones


def test_strict_refuses_bad_rows_by_line_before_the_first_step(tmp_path):
    run = runs.start(with_bad_rows(tmp_path), tmp_path / "run", "--strict")
    assert run.wait() == 2, run.said
    assert "5 of 25 rows cannot be used: line 9: 'prompt' is not valid Unicode; line 10: 'answer'" in run.said
    assert runs.num_steps(tmp_path / "run") == 0
