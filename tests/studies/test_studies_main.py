"""`python -m studies`: what it refuses, and what it runs."""

import pytest

from qerl.errors import UserError
from studies import __main__ as cli


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rnu"], "no command rnu"),
        (["run"], "run needs the name of a study, one of entropy, growth"),
        (["run", "grwth"], "no study grwth; did you mean growth"),
        (["run", "growth", "--arms", "nvfp5"], "study growth has no arm nvfp5; there are bf16, nvfp4"),
        (["run", "growth", "--seeds", "0"], "seeds"),
    ],
)
def test_a_mistake_is_named(arguments, part):
    with pytest.raises(UserError, match=part):
        cli.main(arguments)


def test_a_part_of_a_study_runs_on_request(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(cli, "run_study", lambda *a, **k: asked.append((a, k)) or tmp_path / "index.html")
    options = ["--seeds", "7", "--arms", "nf4", "--tasks", "add", "--workers", "3", "--out", str(tmp_path)]
    cli.main(["run", "growth", *options])
    ((study, folder), settings) = asked[0]
    assert (folder, settings) == (tmp_path / "growth", {"workers": 3})
    assert len(study.seeds) == 7 and len(study.arms) == 9
    runs = [(t.name, a.name) for t in study.tasks for a in study.arms if study.is_run(t.name, a.name)]
    assert runs == [("add", "bf16"), ("add", "nf4")]
    assert capsys.readouterr().out.endswith("index.html\n")
