"""Mistakes in files, columns and options are found before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

import tiny_run

CODE = """
import json, os, sys

class Stops:
    def find_spec(self, name, *more):
        if name in ("torch", "transformers"):
            os._exit(7)

os.chdir(sys.argv[1])
sys.meta_path.insert(0, Stops())
from qerl.cli import data, distil, evaluate, generate, main, quantize, sft, train

for line in sys.stdin:
    arguments, out, err = json.loads(line)
    if (pid := os.fork()) == 0:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["qerl", *arguments]
        code = 0
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("early")
    tiny_run.write_task(place)
    (place / "gold.py").write_text("async def score(completions, gold, *, weight=1.0, **more): ...\n")
    (place / "broken.py").write_text("def score(completions:\n")
    (place / "made.py").write_text("globals()['score'] = print\n")
    (place / "code.csv").write_text("question,solution_code\nx,y\n")
    (place / "blank.jsonl").touch()
    (place / "empty").mkdir()
    return place


@pytest.fixture(scope="module")
def qerl(folder, tmp_path_factory):
    """run(command) -> (stdout, stderr, exit code); 7 where torch would be imported. The runs are forked from
    one process, which has imported what commands import before that."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | tiny_run.child_variables(),
    )
    files = [tmp_path_factory.mktemp("said") / name for name in ("stdout", "stderr")]

    def run(command):
        print(json.dumps([command, *map(str, files)]), file=process.stdin, flush=True)
        code = int(process.stdout.readline())
        return (*(file.read_text() for file in files), code)

    with process:
        yield run
        process.stdin.close()
        assert process.wait(30) == 0


SUMS = "train", "--task", "sums.jsonl", "--reward=numeric"
MISTAKES = [
    (("train", "--task", "none.jsonl"), "task.name none.jsonl: no such file"),
    ((*SUMS, "--task.held-out-split", "none.csv"), "task.held_out_split none.csv: no such file"),
    ((*SUMS[:3], "--reward", "none.py:score"), "task.rewards none.py:score: no such file"),
    ((*SUMS[:3], "--reward", "even.py:evne"), "even.py has no 'evne'; did you mean even"),
    ((*SUMS[:3], "--reward", "gold.py:score"), "score needs gold, but the data has no such column"),
    ((*SUMS[:3], "--reward", "broken.py:score"), "cannot import broken.py: SyntaxError"),
    ((*SUMS[:3], "--reward", "numerc"), "did you mean numeric?"),
    ((*SUMS[:3], "--reward", "even.py"), "task.rewards even.py: name its function too, as even.py:FUNCTION"),
    ((*SUMS[:3], "--agent", "even.py"), "agent.function even.py: name its function too"),
    ((*SUMS[:3], "--agent", "even"), "agent.function: 'even' is neither module:function"),
    ((*SUMS[:3], "--agent", "even.py:agent"), "agent.function even.py:agent: even.py has no 'agent'"),
    ((*SUMS, "--task.prompt-column", "ask"), "has no column 'ask' (there are: prompt, answer)"),
    ((*SUMS, "--task.template", "{promt}"), "has no column 'promt', which task.template names"),
    ((*SUMS, "--task.answer-column", "gold"), "task.answer_column: no column 'gold'"),
    ((*SUMS, "--model", "empty"), "empty is not a model: the folder is empty"),
    ((*SUMS, "--model", "./none"), "./none: no such folder or file"),
    ((*SUMS, "--init-adapter", "none"), "--init-adapter none: no such folder"),
    (("distil", "--task", "none.csv", "--teacher", "x/y"), "task.name none.csv: no such file"),
    (("sft", "--data", "none.jsonl"), "data none.jsonl: no such file"),
    (("sft", "--data", "code.csv"), "rows to imitate need a column"),
    (("eval", "./none", "gsm8k"), "./none: no such folder or file"),
    (("eval", "none"), "none: no such folder or file"),
    (("eval", "owner/name", "none.jsonl"), "none.jsonl: no such file"),
    (("eval", "owner/name", "gsm8k=none.csv"), "none.csv: no such file"),
    (("eval", "owner/name", "sums.jsonl", "--reward", "numerc"), "did you mean numeric?"),
    (("eval", "owner/name", "sums.jsonl", "--reward", "evn.py:even"), "no such file; did you mean even.py?"),
    (("generate", "./none", "hello"), "./none: no such folder or file"),
    (("quantize", "./none", "out"), "./none: no such folder or file"),
    (("data", "none.jsonl"), "none.jsonl: no such file"),
    (("data", "sums.jsnl"), "sums.jsnl: no such file; a file of rows ends in .jsonl, .json, .parquet, .csv"),
    (("data", "blank.jsonl"), "blank.jsonl: has no rows"),
    (("train", "--task", "sum.jsonl", "--reward=numeric"), "no such file; did you mean sums.jsonl?"),
    (
        ("sft", "--data", "code.csv"),
        "solution_code. Rename two of them, for example to question and",
    ),
    (("sft", "sums.jsonl"), "sft takes its rows by --data: qerl sft --data sums.jsonl"),
    (("dpo", "sums.jsonl"), "dpo takes its rows by --data: qerl dpo --data sums.jsonl"),
]


@pytest.mark.parametrize(("command", "error"), MISTAKES, ids=str)
def test_a_mistake_is_found_before_torch_is_imported(qerl, command, error):
    _, said, code = qerl(command)
    last = said.splitlines()[-1]
    assert code == 2 and last.startswith("qerl: ") and error in last, said


ASKED = [
    (("train", "--task", "sums.jsonl"), "train --task sums.jsonl needs a reward: --reward FILE.py:FUNCTION"),
    (("train", "--task.name=sums.jsonl", "--model", "owner/name"), "needs a reward"),
    (("check", "--task", "sums.jsonl"), "check --task sums.jsonl needs a reward"),
    (("eval", "owner/name"), "eval owner/name needs what to evaluate it on: one of gsm8k"),
    (("eval", "owner/name", "--num-prompts", "4"), "or a FILE of rows"),
]


@pytest.mark.parametrize(("command", "error"), ASKED, ids=str)
def test_what_is_missing_is_asked_for(qerl, command, error):
    _, said, code = qerl(command)
    assert code == 2 and said.startswith("qerl: ") and error in said, said


def test_the_model_that_is_assumed_is_said(qerl):
    out, _, _ = qerl(("train", "--task", "sums.jsonl", "--reward", "exact"))
    assert "assumed: the built-in model smollm2-135m-instruct; --model MODEL takes another one" in out
    assert "assumed: learn.learning_rate 0.0005, as LoRA of 0.14 billion weights" in out
    out, _, code = qerl((*SUMS, "--model=o/n-1B", "--learn.learning-rate=1e-4"))
    assert "assumed" not in out and code == 7


@pytest.mark.parametrize("reward", ["even.py:even", "made.py:score", "numeric", "missing_module:score"])
def test_what_the_first_checks_cannot_see_is_left_to_the_run(qerl, reward):
    assert qerl((*SUMS[:3], "--reward", reward))[2] == 7


def test_rows_of_a_known_set_have_its_columns_already_then(folder, qerl):
    row = {"question": "1 + 1?", "answer": "so #### 2"}
    (folder / "set.jsonl").write_text(json.dumps(row) + "\n")
    assert qerl(("train", "--task", "set.jsonl", "--reward", "numeric"))[2] == 7
