"""A run recorded before there was model.scales keeps plain scales."""

import dataclasses
import json

import pytest

from qerl.config import ModelConfig, RunConfig
from qerl.config.stored import former_values, read_config_file
from qerl.errors import UserError
from qerl.tracking.provenance import check_same_run


def recorded(**model):
    config = json.loads(json.dumps(dataclasses.asdict(RunConfig(model=ModelConfig(**model)))))
    return config


def without_scales(config):
    return config | {"model": {k: v for k, v in config["model"].items() if k != "scales"}}


@pytest.mark.parametrize("scales", ["plain", "mse"])
def test_a_record_s_own_value_stays(tmp_path, scales):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": recorded(scales=scales)}))
    assert read_config_file(file).model.scales == scales


def test_a_record_without_the_field_is_plain(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": without_scales(recorded(scales="mse"))}))
    assert read_config_file(file).model.scales == "plain"


def test_an_older_run_goes_on_with_plain_scales_and_no_others(tmp_path):
    old = former_values(without_scales(recorded(scales="mse")))
    assert check_same_run(tmp_path / "run.json", old, recorded(scales="plain")) == {}
    with pytest.raises(UserError, match=r'model.scales = "plain", not "mse"'):
        check_same_run(tmp_path / "run.json", old, recorded(scales="mse"))


@pytest.mark.parametrize("damaged", [None, 3, [], "text", {}, {"model": None}, {"model": 3}])
def test_a_damaged_record_is_left_to_those_who_name_the_damage(damaged):
    assert former_values(damaged) == damaged
