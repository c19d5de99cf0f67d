"""A run recorded before there was a field goes on with what it did then: the field's default."""

import dataclasses
import json

import pytest

from qerl.config import ModelConfig, RunConfig
from qerl.config.stored import read_config_file, with_defaults
from qerl.errors import UserError
from qerl.tracking.journal import Journal
from qerl.tracking.provenance import changes, check_same_run


def recorded(**model):
    return json.loads(json.dumps(dataclasses.asdict(RunConfig(model=ModelConfig(**model)))))


def without(config, name):
    """The record without one field or section: "noise.control.measure"."""
    first, _, rest = name.partition(".")
    if not rest:
        return {key: value for key, value in config.items() if key != first}
    return config | {first: without(config[first], rest)}


LATER = [
    "seed",
    "samples",
    "noise.control",
    "noise.control.measure",
    "algo.sapo.temperature_positive",
]
LATER += ["learn.max_tokens_per_microbatch", "evaluate.num_prompts"]


@pytest.mark.parametrize("scales", ["plain", "mse"])
def test_a_record_s_own_value_stays(tmp_path, scales):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": recorded(scales=scales)}))
    assert read_config_file(file).model.scales == scales


@pytest.mark.parametrize("name", LATER)
def test_a_record_without_a_field_has_its_default(tmp_path, name):
    file, old = tmp_path / "run.json", without(recorded(), name)
    assert old != recorded()
    file.write_text(json.dumps({"config": old}))
    assert read_config_file(file) == RunConfig()
    assert not changes(with_defaults(old), recorded()) and list(with_defaults(old))[: len(old)] == list(old)


def test_a_record_without_scales_has_plain_ones(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config": without(recorded(), "model.scales")}))
    assert read_config_file(tmp_path / "run.json").model.scales == "plain"


def test_an_older_run_goes_on_with_the_default_and_nothing_else(tmp_path):
    old = with_defaults(without(recorded(scales="mse"), "model.scales"))
    assert check_same_run(tmp_path / "run.json", old, recorded(scales="plain")) == {}
    with pytest.raises(UserError, match=r'model.scales = "plain", not "mse"'):
        check_same_run(tmp_path / "run.json", old, recorded(scales="mse"))


@pytest.mark.parametrize("damaged", [None, 3, [], "text", {}, {"model": None}, {"model": 3}])
def test_a_damaged_record_is_left_to_those_who_name_the_damage(damaged):
    assert with_defaults(damaged) == damaged


def started(folder, config, has_step):
    with Journal(folder, num_steps=config.num_steps) as journal:
        journal.start(config)
        if has_step:
            with journal.step(0) as log:
                log.add(nll=1.0)


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("name", [*LATER, "rank_timeout_s"])
def test_a_journal_knows_the_run_of_an_older_record(tmp_path, name, has_step):
    started(tmp_path, RunConfig(), has_step)
    path = tmp_path / "run.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"config": without(facts["config"], name)}))
    with Journal(tmp_path, num_steps=RunConfig().num_steps) as journal:
        journal.start(RunConfig())
        assert journal.is_same_run
    assert "absent" not in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("changed", [{"seed": 1}, {"num_steps": 7}])
def test_a_journal_without_a_step_knows_another_run(tmp_path, changed):
    started(tmp_path, RunConfig(), has_step=False)
    with Journal(tmp_path, num_steps=7) as journal:
        journal.start(dataclasses.replace(RunConfig(), **changed))
        assert not journal.is_same_run
