"""A folder from elsewhere names code in its run.json: no command imports it unless it is told to."""

import shutil

import pytest

import tiny_run
from qerl.cli import main
from qerl.errors import UserError
from qerl.tracking.trust import check_started, remember_started


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_known_in_its_place_with_its_rewards(tmp_path):
    here, rewards = tmp_path / "run", ("my.py:f", "numeric")
    remember_started(here, rewards)
    check_started(here, rewards)
    for folder, names in ((tmp_path / "other", rewards), (here, ("evil.py:f", "numeric"))):
        with pytest.raises(UserError, match=r"names code to import, \w+\.py:f, .*--trust"):
            check_started(folder, names)


def test_built_in_rewards_need_no_trust(tmp_path, cache):
    check_started(tmp_path, ("numeric", "code"))
    remember_started(tmp_path, ("numeric",))
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_stops_no_run(tmp_path, cache):
    cache.write_text("")
    remember_started(tmp_path, ("my.py:f",))


def test_eval_imports_no_code_that_a_strangers_run_names(tmp_path, capsys):
    files = tiny_run.write_files(tmp_path / "files")
    run, options = tmp_path / "run", tiny_run.options(files, tmp_path / "run")
    main.command(
        [
            "train",
            "demo_long",
            *options,
            "--num-steps",
            "1",
            "--noise.num-stages",
            "2",
            "--evaluate.num-prompts",
            "0",
            "--task.code.unsafe",
        ]
    )
    stranger, trace = tmp_path / "stranger", tmp_path / "imported"
    shutil.copytree(run, stranger)
    with (files / "even.py").open("a") as code:
        code.write(f"\nopen({str(trace)!r}, 'w').close()\n")
    evaluate = ["--num-prompts", "2", "--num-samples", "1"]
    with pytest.raises(UserError, match="you did not start this run here"):
        main.command(["eval", str(stranger), *evaluate])
    with pytest.raises(UserError, match="you did not start this run here"):
        main.command(
            ["eval", str(stranger), str(files / "sums.jsonl"), "--answer-column", "answer", *evaluate]
        )
    assert not trace.exists()
    capsys.readouterr()
    for more in (["--trust"], ["--reward", "numeric", "--answer-column", "answer"]):
        main.command(["eval", str(stranger), *evaluate, *more])
    main.command(["eval", str(run), *evaluate])
    assert len(capsys.readouterr().out.splitlines()) == 3 and trace.exists()
    kept = [path.read_text() for path in (run / "eval").rglob("*.json*")]
    assert '"unsafe": true' in (run / "run.json").read_text()
    assert kept and not any('"unsafe": true' in text for text in kept)
