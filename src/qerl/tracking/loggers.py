"""Where a run's metrics are shown beside its files: TensorBoard, Weights & Biases, MLflow, trackio.

A logger raises what its package raises: mirror.py is who calls it, in a thread that may fail.

Where the metrics go, and with which key, is the package's own business: WANDB_API_KEY, WANDB_PROJECT,
MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT, TRACKIO_SPACE_ID and the like are read where
they always are. A package that keeps what it was given for a while before it sends or writes it (wandb 15 s,
trackio 0.5 s) loses that by kill -9; wandb online says at the next start what it has, and gets the rest.
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
_ASKING_S = 5.0  # wandb asks for a missing key on a terminal; the run goes on meanwhile


class Logger(Protocol):
    takes_back: bool
    """Whether steps from first_step on that an earlier process sent are forgotten, to be sent again."""
    run_id: str
    """By which a later process goes on in the same remote run."""
    first_step: int
    """The first step that the remote run lacks."""

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        """run_id None: a new remote run. first_step: the first that it lacks, as far as is known."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        """The finite metrics of a step, each as metric/NAME or timing/NAME."""
        ...

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Sends what is left. The result of a run that has ended; None if it may go on."""
        ...


class TensorBoardLogger:
    takes_back = True

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
    takes_back = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        wandb = _package("wandb")
        self.run_id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self.run_id,
            name=folder.name,
            dir=folder,
            config=config,
            resume="allow",
            reinit="create_new",
            # No copy of the console, of source code or of the repository's address and changes leaves.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, login_timeout=_ASKING_S
            ),
        )

        is_known = run_id is not None and not self._run.offline
        self.first_step = min(first_step, self._run.starting_step) if is_known else first_step

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        self._run.log({**metrics, "_timestamp": wall_time}, step=step, commit=True)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._run.summary.update(dict(result or {}))
        self._run.finish(exit_code=1 if result is None else 0)


class MlflowLogger:
    takes_back = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        self._client, self.first_step = _package("mlflow").MlflowClient(), first_step
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if found is None else found.experiment_id
        self.run_id = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
        for key, value in flatten(config).items():
            self._client.log_param(self.run_id, key, value)

    def log(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        point, at = _package("mlflow").entities.Metric, int(wall_time * 1000)
        self._client.log_batch(self.run_id, [point(name, value, at, step) for name, value in metrics.items()])

    def finish(self, result: Mapping[str, Any] | None) -> None:
        for key, value in (result or {}).items():
            self._client.set_tag(self.run_id, f"result.{key}", value)
        self._client.set_terminated(self.run_id, "KILLED" if result is None else "FINISHED")


class TrackioLogger:
    takes_back = False

    def __init__(self, folder: Path, config: dict[str, Any], *, run_id: str | None, first_step: int):
        # trackio goes on with a run by its name.
        self.run_id, self.first_step = run_id or f"{folder.name}-{secrets.token_hex(4)}", first_step
        self._run = _package("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=self.run_id,
            config=config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

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
    """UserError for a logger that is unknown or whose package cannot be imported, before the run begins."""
    for name in names:
        if name not in LOGGERS:
            raise UserError(f"loggers: {name!r} is none of {', '.join(LOGGERS)}")
        _package(name)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"loggers: {name} cannot be imported ({error}); pip install {name}") from None
