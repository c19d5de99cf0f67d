"""`qerl data` shows what the model sees, and finds duplicates, long rows and leaks."""

import json

import pytest

import tiny_run
from qerl.cli.main import command
from qerl.config.recipes import plain
from qerl.errors import UserError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def found(capsys, *arguments):
    command(["data", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_prompts_are_shown_with_template_and_checked(files, tmp_path, capsys):
    rows = [
        {"prompt": "1 + 1 ="},
        {"prompt": "2 + 2 ="},
        {"prompt": "1 + 1 ="},
        "{broken",
        {"prompt": "x" * 50},
    ]
    data, held_out = (
        write(tmp_path / "train.jsonl", rows),
        write(tmp_path / "test.jsonl", [{"prompt": "2 +  2  ="}]),
    )
    given = "--model", str(files), "--max-tokens", "40", "--task.template", "Q: {prompt}"
    report = found(capsys, data, *given, "--task.held-out-split", held_out)
    assert report["kind"] == "prompt" and report["train"]["duplicates"] == [["line 1", "line 3"]]
    assert report["train"]["too_long"] == ["line 5"] and report["leaks"] == [["line 2", "line 1"]]
    assert [line.partition(":")[0] for line in report["train"]["bad"]] == ["line 4"]
    (part,) = report["shown"][0]["parts"]
    assert part == {"text": "<|im_start|>Q: 1 + 1 =<|im_end|><|im_start|>", "learned": False}
    assert report["train"]["tokens"]["most"] == 56


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_control_tokens_in_messages_are_text_unless_they_are_allowed(files, tmp_path, capsys, kind):
    text = "a<|im_end|><|im_start|>b"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "c"}]
    data = write(tmp_path / "rows.jsonl", [{kind: text if kind == "prompt" else messages}])
    given = (
        data,
        "--model",
        str(files),
        "--task.num-held-out",
        "0",
        "--kind",
        "sft" if kind == "messages" else "prompt",
    )
    kept, allowed = found(capsys, *given), found(capsys, *given, "--task.allow-special-tokens")
    lengths = [report["train"]["tokens"]["most"] for report in (kept, allowed)]
    assert lengths[0] - lengths[1] == len("<|im_end|><|im_start|>") - 2
    assert kept["shown"][0]["parts"] == allowed["shown"][0]["parts"]


def test_without_a_split_the_last_rows_are_held_out(files, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [{"prompt": text} for text in ("a", "b", "c", "a")])
    report = found(capsys, data, "--model", str(files), "--task.num-held-out", "1")
    assert report["leaks"] == [["line 1", "line 4"]] and report["train"]["usable"] == 3


def test_as_many_rows_are_held_out_as_in_training(files, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [{"prompt": f"{i % 20} + 1 ="} for i in range(40)])
    report = found(capsys, data, "--model", str(files))
    assert report["held_out"]["usable"] == plain().task.num_held_out_of(40) == 32
    assert len(report["leaks"]) == 8


def test_white_space_makes_no_other_row_and_no_prompt(files, tmp_path, capsys):
    """A space before the template's next token is a token of its own; one between words tells them apart."""
    texts = ("a b", "a b ", " a  b", "ab", " ", "")
    data = write(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    report = found(capsys, data, "--model", str(files), "--task.num-held-out", "0")["train"]
    assert report["duplicates"] == [["line 1", "line 2", "line 3"]] and report["usable"] == 4
    assert [bad.partition(",")[0] for bad in report["bad"]] == [
        f"line {i}: its prompt is empty" for i in (5, 6)
    ]
    other = write(tmp_path / "other.jsonl", [{"prompt": "", "text": "a"}, {"prompt": "b", "text": "c"}])
    assert not found(capsys, other, "--model", str(files), "--task.template", "{text}")["train"]["bad"]
    chats = [{"prompt": "a", "completion": text} for text in ("b", "b ", "c")]
    report = found(capsys, write(tmp_path / "chats.jsonl", chats), "--model", str(files))["train"]
    assert report["duplicates"] == [["line 1", "line 2"]]


def test_what_is_learned_of_a_chat_is_marked(files, tmp_path, capsys):
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "ok?"},
        {"role": "assistant", "content": "yes"},
    ]
    data = write(tmp_path / "chats.jsonl", [{"messages": chat}])
    report = found(capsys, data, "--model", str(files))
    learned = [part["text"] for part in report["shown"][0]["parts"] if part["learned"]]
    assert report["kind"] == "sft" and learned == ["yo<|im_end|>", "yes<|im_end|>"]
    assert report["train"]["learned_tokens"] == 7
    command(["data", data, "--model", str(files)])
    text = capsys.readouterr().out
    assert "hi<|im_end|><|im_start|>[[yo<|im_end|>]]" in text and "1 usable of 1 row" in text
    whole = found(capsys, data, "--model", str(files), "--no-assistant-only-loss")
    assert whole["train"]["learned_tokens"] > 7


def test_a_recipe_is_no_data():
    with pytest.raises(UserError, match="demo is a recipe: qerl data reads a file of rows"):
        command(["data", "demo"])


def test_rows_that_training_would_all_hold_out_are_told_to_be_too_few(files, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [{"prompt": text} for text in "abc"])
    given = [data, "--model", str(files)]
    for num, is_too_few in ((4, True), (3, True), (2, False)):
        option = f"--task.num-held-out={num}"
        assert found(capsys, *given, option)["too_few"] == is_too_few
        command(["data", *given, option])
        told = f"qerl train refuses so few rows: task.num_held_out {num} leaves none to train on\n"
        assert capsys.readouterr().out.endswith(told) == is_too_few
    with pytest.raises(UserError, match=r"task\.num_held_out is 3: .* leaves none to train on"):
        own = (
            "--task",
            *given,
            "--task.num-held-out=3",
            "--reward",
            "tags",
            "--sample.max-tokens=4",
            "--out",
            str(tmp_path / "run"),
        )
        command(["train", *own])


def test_control_characters_do_not_reach_the_terminal(files, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [{"prompt": "a\x1b[2Jb"}])
    command(["data", data, "--model", str(files)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_file_that_is_missing_is_refused(files):
    with pytest.raises(UserError, match="no such file"):
        command(["data", "nowhere.jsonl", "--model", str(files)])
    with pytest.raises(UserError, match="needs one file"):
        command(["data"])


def test_both_completions_of_a_pair_are_shown_and_a_pair_that_is_none_is_named(tmp_path, capsys):
    model = tiny_run.write_model(tmp_path / "model")
    user = {"role": "user", "content": "hi"}
    rows = [{"prompt": [user], "chosen": [{"role": "assistant", "content": "yo"}], "rejected": "no"}]
    rows += [{"prompt": "a", "chosen": "b", "rejected": "b"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(["data", str(path), "--model", str(model)])
    text = capsys.readouterr().out
    assert "dpo rows; what is learned is in [[ ]]" in text and "1 usable of 2 rows" in text
    for part, answer in (("chosen", "yo"), ("rejected", "no")):
        assert f"--- line 1, {part}" in text and f"hi<|im_end|><|im_start|>[[{answer}<|im_end|>]]" in text
    assert "unusable: 1 (line 2: chosen and rejected are the same)" in text
