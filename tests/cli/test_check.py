"""`qerl check`: what it looks at, what it finds broken, and that it writes nothing."""

import json
import os

import pytest

import tiny_run
from cli.test_main import copied, qerl
from qerl.config import RunConfig
from qerl.training import preflight
from stored_samples import checked_line

MACHINE = ["python", "device", "kernels", "sandbox"]
OF_A_RUN = ["out", "loggers", "functions", "model", "tokenizer", "rows", "reward"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


def run_options(files, out):
    options = {
        "task": files / "sums.jsonl",
        "reward": "exact",
        "model": files,
        "out": out,
        "task.num-held-out": 8,
        "num-prompts": 4,
        "num-generations": 2,
        "sample.max-tokens": 20,
        "model.device": "cpu",
        "model.dtype": "fp32",
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


@pytest.fixture
def check(files, tmp_path, monkeypatch, capsys):
    """(exit code, findings, the last line of stderr)"""

    def run(*options):
        given = run_options(files, tmp_path / "run")
        if "--reward" in options:  # it may be given once
            at = given.index("--reward")
            del given[at : at + 2]
        code = qerl(monkeypatch, "check", *given, "--json", *options)
        out, err = capsys.readouterr()
        return code, json.loads(out)["findings"], err.splitlines()[-1]

    return run


def texts(findings, part):
    return [each["text"] for each in findings if each["part"] == part]


def test_without_a_recipe_it_looks_at_the_machine(monkeypatch, capsys):
    assert qerl(monkeypatch, "check", "--model.device", "cpu") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "check this machine"
    assert list(dict.fromkeys(line.split()[1] for line in lines)) == MACHINE
    assert "Python 3." in lines[0] and "torch 2." in lines[0] and "qerl " in lines[0]
    assert {line.split()[0] for line in lines} <= {"ok", "note"}


def test_a_run_that_can_start_is_found_fine_and_nothing_is_written(check, files, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in files.iterdir()}
    code, findings, _ = check()
    assert code == 0 and list(dict.fromkeys(each["part"] for each in findings)) == MACHINE + OF_A_RUN
    assert {each["status"] for each in findings if each["part"] in OF_A_RUN} == {"ok"}
    assert not (tmp_path / "run").exists()
    assert before == {path: path.stat().st_mtime_ns for path in files.iterdir()}
    assert f"{files}: 2 layers of width 64, 128 positions, in nvfp4" in texts(findings, "model")
    assert [each["part"] for each in findings if "decode steps" in each["text"]] == ["kernels"]
    assert "8 prompts are held out" in texts(findings, "rows")[0]
    (reward,) = [each for each in findings if each["part"] == "reward"]
    assert reward["text"] == "exact: 4 rows with their own answers as the sample: 1, 1, 1, 1"


BROKEN = [
    (["--model", "/no/model"], "model", "/no/model: no such folder", {"tokenizer", "rows", "reward"}),
    (["--task", "/no/rows.jsonl"], "rows", "/no/rows.jsonl", {"reward"}),
    (["--num-prompts", "33"], "rows", "num_prompts is 33, but", {"reward"}),
    (["--sample.max-tokens", "128"], "rows", "sample.max_tokens is 128", {"reward"}),
    (["--reward", "/no/reward.py:f"], "functions", "/no/reward.py:f: no such file", {"reward"}),
    (["--task.answer-column", "none"], "reward", "no column 'none'", set()),
    (["--model.device", "cuda"], "device", "torch finds no CUDA device", {"kernels", "model", "reward"}),
]


@pytest.mark.parametrize(("options", "part", "said", "skipped"), BROKEN)
def test_what_is_broken_is_named_and_the_rest_is_looked_at(check, options, part, said, skipped, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, findings, last = check(*options)
    assert code == 1 and last.startswith(f"qerl: check: {part} is broken: ") and said in last
    assert [each["part"] for each in findings if each["status"] == "broken"] == [part]
    assert skipped <= {each["part"] for each in findings if each["status"] == "skipped"}
    assert set(MACHINE + OF_A_RUN) == {each["part"] for each in findings}


def test_a_reward_that_raises_is_tried_and_told_with_its_line(check, tmp_path):
    (tmp_path / "mine.py").write_text("def mine(completions, **columns):\n    raise ValueError('oh')\n")
    code, _, last = check("--reward", f"{tmp_path}/mine.py:mine")
    assert code == 1 and "reward is broken" in last and "raised ValueError: mine: oh (mine.py:2)" in last


def test_a_run_in_the_folder_goes_on_or_has_other_settings_as_in_training(check, tmp_path, monkeypatch):
    folder, recorded = tmp_path / "run", []
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(checked_line('{"step": 0}'))
    (folder / "run.json").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(preflight, "check_same_run", lambda path, old, new: recorded.append(new))
        assert check()[0] == 0
    (folder / "run.json").write_text(json.dumps({"config": recorded[0]}))
    code, findings, _ = check()
    assert code == 0 and texts(findings, "out")[1].endswith(
        "/run holds a run of these settings, which goes on"
    )
    code, findings, _ = check("--noise.schedule", "constant")
    assert code != 0 and 'noise.schedule = "none", not "constant"; choose' in texts(findings, "out")[-1]


@pytest.mark.parametrize(
    ("reward", "answers", "said"),
    [
        (
            "math",
            ["The answer is 5, because it is so."] * 4,
            "own answer has the reward 0: check task.answer_column",
        ),
        ("numeric", ["none", "5", "6", "7"], "the answer 'none' contains no number"),
    ],
)
def test_an_own_answer_without_reward_is_a_note(check, tmp_path, reward, answers, said):
    rows = [{"prompt": f"{i} + 1 =", "answer": answers[i % 4]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--task", tmp_path / "rows.jsonl", "--reward", reward, "--num-prompts", "32"]
    code, findings, _ = check(*options)
    assert code == 0
    assert any(
        said in each["text"] for each in findings if (each["part"], each["status"]) == ("reward", "note")
    )


def test_a_folder_that_cannot_be_made_is_broken(check, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o755)
    code, _, last = check("--out", tmp_path / "file" / "run")
    assert code == 1 and "out is broken" in last and "choose another folder with --out" in last


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_folder_without_the_right_to_write_is_broken(check, tmp_path):
    (tmp_path / "folder").mkdir(mode=0o555)
    code, _, last = check("--out", tmp_path / "folder" / "run")
    assert code == 1 and "out is broken" in last


def test_a_model_without_tokenizer_or_template_is_told(check, files, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    copied(files, folder)
    (folder / "chat_template.jinja").unlink()
    code, findings, _ = check("--model", folder)
    assert code == 0 and "no chat template: prompts are plain text" in texts(findings, "tokenizer")
    (folder / "tokenizer.json").unlink()
    code, _, last = check("--model", folder)
    assert code == 1 and "tokenizer is broken" in last


def test_the_speed_is_measured_with_the_model(monkeypatch, capsys, check, files):
    monkeypatch.setattr(preflight, "_SPEED_S", 0.3)
    code, findings, _ = check("--speed")
    (speed,) = [each for each in findings if each["part"] == "speed"]
    assert code == 0 and speed["values"]["tokens_per_s"] > 0 and "8 samples in parallel" in speed["text"]
    arguments = ["check", "--model", files, "--speed", "--model.device", "cpu", "--model.dtype", "fp32"]
    assert qerl(monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens/s of sampling" in lines[-1] and lines[0] == "check this machine and a model"
    assert qerl(monkeypatch, "check", "--speed") == 2
    assert "check --speed needs a recipe or --model MODEL" in capsys.readouterr().err


def test_an_environment_begins_an_episode(check):
    environment = ["--reward", "higher_lower", "--task.environment.max-turns", "2"]
    code, findings, _ = check(*environment)
    assert code == 0 and "the environment begins an episode" in texts(findings, "reward")[-1]


def test_an_environment_that_cannot_begin_is_broken(check, tmp_path):
    lines = ["class Maze:", "    def reset(self, row, seed):", "        raise ValueError('no way in')"]
    lines += ["    def step(self, completion):", "        return None"]
    (tmp_path / "maze.py").write_text("\n".join(lines))
    code, _, last = check("--reward", f"{tmp_path}/maze.py:Maze")
    assert code == 1 and "reward is broken" in last and "raised ValueError: Maze.reset: no way in" in last


@pytest.mark.parametrize(("installed", "status"), [(True, "ok"), (False, "broken")])
def test_the_kernels_need_their_compiler(monkeypatch, installed, status):
    monkeypatch.setattr(preflight, "choose_kernels", lambda wanted, device: "portable")
    monkeypatch.setattr(preflight, "_is_installed", lambda module: installed)
    look = preflight.Preflight(RunConfig(), preflight.contextlib.ExitStack())
    *_, kernels = look.findings(["device", "kernels"])
    assert kernels.part == "kernels" and kernels.status == status
    assert ("pip install cuda-bindings" in kernels.text) == (not installed)


def test_a_mistake_in_an_option_is_that_of_train(monkeypatch, capsys):
    assert qerl(monkeypatch, "check", "dem") == 2
    assert "did you mean demo" in capsys.readouterr().err
    assert qerl(monkeypatch, "check", "demo", "--learn.lr", "1") == 2
    assert "--learn.learning-rate" in capsys.readouterr().err
