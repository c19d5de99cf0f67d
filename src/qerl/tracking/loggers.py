"""Loggers: TensorBoard, Weights & Biases, MLflow and trackio.

A logger raises whatever its package raises; async_logger.py calls it in a thread and handles failures.

The packages read their own environment variables: WANDB_API_KEY, WANDB_PROJECT, MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT, TRACKIO_SPACE_ID and so on. wandb buffers metrics for 15 s and
trackio for 0.5 s; kill -9 loses what is buffered. wandb online reports at the next start what it has and is
sent the rest.
"""

import importlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from qerl.errors import UserError
from qerl.tracking.provenance import flatten

_PROJECT = "qerl"
_LOGIN_TIMEOUT_S = 5.0  # wandb asks for a missing key on a terminal while the run continues


class Logger(Protocol):
    can_rewind: bool
    """True if steps from first_step on that an earlier process sent are discarded and must be sent again."""
    run_id: str
    """Identifies the remote run, so that a resumed run continues it."""
    first_step: int
    """The first step that the remote run does not have."""

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        """Open the remote run, or a new one if run_id is None; first_step is the first step to send."""

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        """Send the finite metrics of a step, named metric/NAME or timing/NAME."""

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Send what is buffered, and the result of a complete run; None if the run may be resumed."""


class TensorBoardLogger:
    can_rewind = True

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.run_id, self.first_step = "tensorboard", first_step
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        if run_id is None:
            self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=wall_time)
        self._writer.flush()

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._writer.close()


class WandbLogger:
    can_rewind = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        wandb = _package("wandb")
        self.run_id = run_id or secrets.token_hex(4)
        # Do not upload the console output, source code, or the repository's address and diff.
        private = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self.run_id,
            name=config.get("run_name") or folder.name,
            dir=folder,
            config=config,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(**private, login_timeout=_LOGIN_TIMEOUT_S),
        )

        is_known = run_id is not None and not self._run.offline
        self.first_step = min(first_step, self._run.starting_step) if is_known else first_step

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        self._run.log({**metrics, "_timestamp": wall_time}, step=step, commit=True)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=1 if result is None else 0)


class MlflowLogger:
    can_rewind = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        self._client, self.first_step = _package("mlflow").MlflowClient(), first_step
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if known is None else known.experiment_id
        run = self._client.create_run(experiment_id, run_name=config.get("run_name") or folder.name)
        self.run_id = run.info.run_id
        for key, value in flatten(config).items():
            self._client.log_param(self.run_id, key, value)

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        metric, wall_ms = _package("mlflow").entities.Metric, int(wall_time * 1000)
        batch = [metric(name, value, wall_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, batch)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        for key, value in (result or {}).items():
            self._client.set_tag(self.run_id, f"result.{key}", value)
        self._client.set_terminated(self.run_id, "KILLED" if result is None else "FINISHED")


class TrackioLogger:
    can_rewind = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        name = config.get("run_name") or folder.name
        # trackio identifies a run by its name.
        self.run_id, self.first_step = run_id or f"{name}-{secrets.token_hex(4)}", first_step
        project = os.environ.get("TRACKIO_PROJECT", _PROJECT)
        quiet = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = _package("trackio").init(project=project, name=self.run_id, config=config, **quiet)

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.finish()


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}


def check_loggers(names: tuple[str, ...]) -> None:
    """Raise UserError for an unknown logger or one whose package cannot be imported."""
    for name in names:
        if name not in LOGGERS:
            raise UserError(f"loggers: unknown logger {name!r}, choose from {', '.join(LOGGERS)}")
        _package(name)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"loggers: {name} cannot be imported ({error}); pip install {name}") from None
