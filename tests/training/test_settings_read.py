"""Every setting of a run is read by what it is for, refused, or has a condition in config/effects.py."""

import dataclasses
import json
import sys
import typing
from pathlib import Path

import pytest

import qerl
import tiny_run
from qerl.cli.main import command
from qerl.cli.sft import SftOptions
from qerl.config import RunConfig, SftConfig
from qerl.config.conflicts import CONFLICTS
from qerl.config.effects import NEEDS

SRC = Path(qerl.__file__).parent
_SAMPLING = "training/rollouts/rollout.py"
ELSEWHERE = {
    "loggers": "tracking/journal.py",
    "samples.keep_steps": "tracking/sample_files.py",
    "samples.keep_mb": "tracking/sample_files.py",
    "learn.max_tokens_per_microbatch": "config/learn.py",
    "model.scales": "config/model.py",
    "adapter.train_norms": "models/trained_weight.py",
    "adapter.modules_to_save": "models/trained_weight.py",
    **dict.fromkeys([f"sample.{name}" for name in ("top_k", "top_p", "min_p", "stop")], _SAMPLING),
}
"""By setting: the file that reads it, out of sight of `reads`."""
REFUSED = {"rollout.keep_kv_cache", "ray.max_staleness"}
"""Without another setting they are refused."""
CLASSES = {RunConfig}


def sections(kind, before=""):
    """(class, the dotted name of its field) of each field that is no section."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            CLASSES.add(hint)
            yield from sections(hint, f"{before}{name}.")
        else:
            yield kind, before + name


FIELDS = list(sections(RunConfig))
OUTSIDE = ("config/", "tracking/", "cli/")


def conditions(name):
    """The names in NEEDS of the field or of a section that it is in."""
    parts = name.split(".")
    return {".".join(parts[: end + 1]) for end in range(len(parts))} & NEEDS.keys()


def is_effect(path):
    """True for a file that does something with a setting, besides checking, storing and showing it."""
    return path.startswith(str(SRC)) and not path.removeprefix(f"{SRC}/").startswith(OUTSIDE)


@pytest.fixture
def reads(monkeypatch):
    """{(class, field)} of what the package reads of configs, outside of config and tracking."""
    seen = set()

    def recording(kind):
        names = {field.name for field in dataclasses.fields(kind)}

        def get(self, name):
            if name in names and is_effect(sys._getframe(1).f_code.co_filename):
                seen.add((kind, name))
            return object.__getattribute__(self, name)

        return get

    for kind in CLASSES:
        monkeypatch.setattr(kind, "__getattribute__", recording(kind))
    return seen


def unread(reads):
    """Settings without a condition that were not read."""
    names = (name for kind, name in FIELDS if (kind, name.rpartition(".")[2]) not in reads)
    return {name for name in names if not conditions(name)}


def test_a_tiny_run_reads_every_setting_that_has_no_condition(tmp_path, reads):
    files = tiny_run.write_files(tmp_path)
    command(["train", "demo_long", *tiny_run.options(files, tmp_path / "run"), "--num-steps", "2"])
    assert unread(reads) == ELSEWHERE.keys() | REFUSED


def test_a_tiny_fine_tuning_reads_every_setting_of_its_own(tmp_path, reads):
    files = tiny_run.write_files(tmp_path)
    turns = {"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{**turns[0], "content": f"{i} ?"}, turns[1]]} for i in range(40)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data": files / "rows.jsonl", "model.path": files, "out": tmp_path / "run"}
    options |= {"batch-size": 8, "max-steps": 1, "eval-max-tokens": 4, "adapter.rank": 4}
    command(["sft", *(f"--{name}={value}" for name, value in options.items())])
    own = {field.name for field in dataclasses.fields(SftOptions)}
    not_read = {name for name in unread(reads) if name.partition(".")[0] in own}
    not_read |= {name for kind, name in FIELDS if kind is SftConfig and (kind, name[4:]) not in reads}
    elsewhere = {"loggers", "learn.max_tokens_per_microbatch", "model.scales"}
    elsewhere |= {"adapter.train_norms", "adapter.modules_to_save"}
    assert elsewhere <= ELSEWHERE.keys() and not_read == elsewhere | {"evaluate.float"}  # which sft refuses


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_setting_that_is_read_elsewhere_is_named_there(name):
    text = (SRC / ELSEWHERE[name]).read_text()
    assert name.rpartition(".")[2] in text or "asdict(config.sample)" in text


def test_what_is_refused_alone_is_in_the_table_of_conflicts():
    assert all(any(key.startswith(name) for key in CONFLICTS) for name in REFUSED)
