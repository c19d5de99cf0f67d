"""Silent effects of rows on a run are counted and reported in one line a table."""

import pytest

from material import SUMS, jsonl, tokenizer
from qerl.config import TaskConfig
from qerl.tasks import Task
from qerl.tasks.task import Renderer

LIMIT = 120


def notices(tmp_path, rows, *, reads_answer=True, **changes):
    config = TaskConfig(**{"name": jsonl(tmp_path / "x.jsonl", rows), "num_held_out": 1, **changes})
    task = Task(config, tokenizer(), seed=0, max_prompt_tokens=LIMIT)
    return task.notices(config, reads_answer=reads_answer)


def row(i, **more):
    return {"prompt": f"{i} + 1 =", "answer": str(i + 1), **more}


def chat(*roles):
    return [{"role": role, "content": "2"} for role in roles]


def test_rows_that_are_used_as_they_are_say_nothing(tmp_path):
    assert notices(tmp_path, [row(i) for i in range(8)]) == []
    assert notices(tmp_path, [row(i, prompt=chat("system", "user")) for i in range(8)]) == []


def test_long_rows_are_counted_before_any_is_drawn(tmp_path):
    rows = [row(i, prompt="long " * 30 if i in (2, 3, 5) else "short") for i in range(12)]
    (line,) = notices(tmp_path, rows)
    assert line.endswith(
        f"x.jsonl: of 12 rows 3 longer than {LIMIT} tokens, which sample.max_tokens leaves, and skipped"
    )


def test_a_row_of_exactly_the_limit_is_not_long(tmp_path):
    def lengths(text):
        config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [row(0, prompt=text)] * 2), num_held_out=1)
        return len(Task(config, tokenizer(), seed=0, max_prompt_tokens=999).held_out(1)[0].tokens_T)

    fitting = "y" * (LIMIT - lengths(""))
    assert notices(tmp_path, [row(0), row(1, prompt=fitting), row(2)]) == []
    assert len(notices(tmp_path, [row(0), row(1, prompt=fitting + "y"), row(2)])) == 1


def test_only_rows_that_may_be_long_are_rendered(tmp_path, monkeypatch):
    rendered = []
    original = Renderer.usable_prompt
    monkeypatch.setattr(
        Renderer,
        "usable_prompt",
        lambda self, i, *, index: rendered.append(i) or original(self, i, index=index),
    )
    notices(tmp_path, [row(i, prompt="z" * 200 if i == 7 else f"{i:05}") for i in range(50)])
    assert set(rendered) == {49, 0, 7}  # held out, the first, the long one


@pytest.mark.parametrize("empty", [None, "", "  "])
def test_rows_without_an_answer_are_counted_if_a_reward_reads_it(tmp_path, empty):
    rows = [row(i, answer=empty if i < 2 else "1") for i in range(8)]
    assert [
        "2 without answer, so that a sample gets no reward" in line for line in notices(tmp_path, rows)
    ] == [True]
    assert notices(tmp_path, rows, reads_answer=False) == []


def test_rows_whose_tests_cannot_run_are_counted_if_the_reward_is_code(tmp_path):
    tests = [
        "assert f(2) == 4",
        "# a comment",
        "def check(candidate): assert candidate(2) == 4",
        "[",
        "f(2)",
        "",
    ]
    rows = [row(i, tests=text, entry_point="f") for i, text in enumerate(tests * 2)]
    (line,) = notices(tmp_path, rows, answer_column="tests", rewards=("code",))
    assert "2 without tests, so that a sample gets no reward; " in line
    assert (
        "6 whose tests cannot be run, so that a sample gets no reward (line 2: the test names nothing of the"
        " program)" in line
    )
    assert "cannot be run" not in "".join(notices(tmp_path, rows, answer_column="tests", rewards=("exact",)))


def test_chats_that_end_with_an_assistants_turn_are_counted(tmp_path):
    rows = [row(i, prompt=chat("user", "assistant") if i % 2 else chat("user")) for i in range(8)]
    (line,) = notices(tmp_path, rows)
    assert "of 8 rows 4 a chat that ends with an assistant's turn" in line


def test_of_generated_rows_the_first_are_looked_at(tmp_path):
    given = {
        "name": "reasoning-gym",
        "num_rows": 1000,
        "num_held_out": 4,
        "template": "{question}" + "w" * 60,
    }
    given["gym_options"] = (*SUMS, ("max_terms", 30))
    (line,) = notices(tmp_path, [row(0)], **given)
    assert line.startswith("reasoning-gym basic_arithmetic: of 128 rows ")
