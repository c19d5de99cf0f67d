"""Read the config that a run stored."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any

from qerl.config import RunConfig
from qerl.config.regular_file import parse_json, read_regular
from qerl.errors import UserError

BASE = "base"
"""Folder in a run's with the checkpoint that model.calibrate made of the model."""
CHOICE = "calibrate.json"
"""File in a run's folder with what model.calibrate auto chose."""


def with_stored_base(config: RunConfig, run: Path) -> RunConfig:
    """Return the config with the run's calibrated checkpoint as its model, if the run calibrates it."""
    if chosen_calibration(config, run) in ("none", None):
        return config
    if not (run / BASE).is_dir():
        raise UserError(f"{run}: has no folder {BASE} with the calibrated model; `qerl train` writes it")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(run / BASE)))


def chosen_calibration(config: RunConfig, run: Path) -> str | None:
    """Return model.calibrate, or what auto chose in this run's folder; None before it has."""
    if config.model.calibrate != "auto":
        return config.model.calibrate
    path = run / CHOICE
    if not path.exists():
        return None
    try:
        choice = parse_json(read_regular(path))["calibrate"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); restore it") from None
    if choice not in ("none", "gptq"):
        raise UserError(f"{path}: is damaged (calibrate is {choice!r}); restore it")
    return choice


def with_start_day(config: RunConfig, run: Path) -> RunConfig:
    """Return the config with a task.chat_template_date: the day on which the run in this folder started, or
    today if it has no step yet, where none is set."""
    if config.task.chat_template_date is not None:
        return config
    day, steps, facts = str(datetime.date.today()), run / "metrics.jsonl", run / "run.json"
    if facts.is_file() and steps.is_file() and steps.stat().st_size:
        day = str(parse_json(read_regular(facts)).get("start_time", day))[: len(day)]
    return dataclasses.replace(config, task=dataclasses.replace(config.task, chat_template_date=day))


def with_defaults(config: Any) -> Any:
    """Return a recorded config with the defaults of fields that were added later, which do what a run did
    before there was the field; what is no config stays."""
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        return config
    defaults = dataclasses.asdict(RunConfig())
    defaults["model"]["scales"] = "plain"  # before there was another choice
    return _completed(defaults, config)


def _completed(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values in their order, and after them the defaults that they lack, nested ones too."""
    nested = {
        name: _completed(default, values[name])
        for name, default in defaults.items()
        if isinstance(default, dict) and isinstance(values.get(name), dict)
    }
    return {**values, **{k: v for k, v in defaults.items() if k not in values}, **nested}


def parse_run_config(data: dict[str, Any]) -> RunConfig:
    """Return the RunConfig of plain values (of `asdict` or JSON); an unknown key is an error."""
    return _build(RunConfig, data, "config")


def read_run_config(source: str) -> RunConfig | None:
    """Return the config of the run in this folder; None if the source is a model, not a run."""
    run_json = Path(source) / "run.json"
    return read_config_file(run_json) if run_json.exists() else None


def read_config_file(path: Path) -> RunConfig:
    """Return the config in this run.json; its model is the one that the run trains."""
    try:
        config = parse_run_config(with_defaults(parse_json(read_regular(path))["config"]))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: is damaged ({error})") from None
    return with_stored_base(config, path.parent)


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise UserError(f"{where} must be an object, it is a {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise UserError(f"{where} has no field {', '.join(unknown)}")
    values = {name: _value(fields[name].default, value, f"{where}.{name}") for name, value in data.items()}
    return cls(**values)


def _value(default: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(default):
        return _build(type(default), value, where)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
