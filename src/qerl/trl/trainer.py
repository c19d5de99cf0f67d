"""GRPOTrainer of TRL over `qerl.train`."""

import dataclasses
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from qerl.config import NoiseConfig, RunConfig
from qerl.config.stored import with_stored_base
from qerl.errors import UserError, require
from qerl.export.write import write_merged_model, write_peft
from qerl.learner import checkpoint
from qerl.models.device import resolve_device
from qerl.models.hf_writer import write_tokenizer
from qerl.models.source import locate
from qerl.tasks.scoring import name_of
from qerl.training.session import train
from qerl.trl.callbacks import CallbackObserver
from qerl.trl.config import GRPOConfig
from qerl.trl.data import write_rows
from qerl.trl.evaluation import evaluate
from qerl.trl.hub import model_card, push_folder
from qerl.trl.ignored import ignored
from qerl.trl.lora import adapter_config
from qerl.trl.model import model_config, model_path
from qerl.trl.refused import check_refused
from qerl.trl.tools import make_environment, of_conversations, takes_environments
from qerl.trl.translate import Batch, batch_of, length, plain, run_config

_logger = logging.getLogger("qerl.trl")
Rows = Iterable[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class MainProcess:
    """The part of TRL's trainer.accelerator that scripts use."""

    is_main_process: bool = True
    num_processes: int = 1
    process_index: int = 0

    def print(self, *values: Any, **options: Any) -> None:
        print(*values, **options)


class GRPOTrainer:
    def __init__(
        self,
        model: Any,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        base: RunConfig | None = None,
    ):
        """`model` is a folder, a hub id, a PreTrainedModel or a PeftModel. `train_dataset` is a
        datasets.Dataset or a list of rows with a column `prompt`: messages, or a text that is given to the
        model unchanged. `base` has the fields that TRL does not, such as model.format, noise and engine; the
        default has NVFP4 weights and no noise."""
        self.args = args or GRPOConfig()
        check_refused(self.args)
        require(
            all(part is None for part in optimizers or ()),
            "optimizers is not supported: set optim, learning_rate and lr_scheduler_type in GRPOConfig",
        )
        self.model, self.processing_class = model, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        require(rollout_func is None, "rollout_func is not supported: write an environment_factory")
        self.reward_funcs = _functions(reward_funcs)
        self._rewards, self._weights, self._schemas = _with_tools(
            self.reward_funcs, self.args, tools or (), environment_factory
        )
        folder = Path(str(self.args.output_dir))
        base = base or RunConfig(noise=NoiseConfig(schedule="none"))
        path, adapter = model_path(model, processing_class, folder)
        base = dataclasses.replace(
            base,
            model=model_config(path, quantization_config or _own_quantization(model), self.args, base.model),
            adapter=adapter or adapter_config(peft_config, base.adapter),
        )
        self._batch = batch_of(self.args, length(train_dataset))
        self.config = self._run_config(base, folder)
        if names := ignored(self.args):
            _logger.warning("GRPOConfig: no effect here: %s", ", ".join(names))
        self.accelerator, self.hub_model_id = MainProcess(), self.args.hub_model_id or folder.resolve().name
        self._observer = CallbackObserver(
            callbacks or (), self.args, self._batch, folder, model=model, processing_class=processing_class
        )
        self._observer.call("on_init_end")

    def _run_config(self, base: RunConfig, folder: Path) -> RunConfig:
        args, rows = self.args, self.train_dataset
        eval_rows = None if plain(args.eval_strategy) == "no" else _all_rows(self.eval_dataset)
        held_out = None if eval_rows is None else write_rows("eval_dataset", eval_rows, folder)
        num_held_out = 0 if held_out is None else _num_rows(held_out)
        if rows is None and self._schemas:  # the environment gives the prompts
            rows = itertools.repeat({"prompt": [{"role": "user", "content": ""}]})
        path = write_rows("train_dataset", rows or (), folder, most=_most_rows(rows, self._batch))
        return dataclasses.replace(
            run_config(args, base, self._batch, num_held_out=num_held_out),
            task=dataclasses.replace(
                base.task,
                name=str(path),
                held_out_split=None if held_out is None else str(held_out),
                num_held_out=num_held_out,
                template="{prompt}",
                chat="messages",
                chat_template_kwargs=json.dumps(_template_variables(args, self._schemas)),
                rewards=tuple(map(name_of, self._rewards)),
                reward_weights=self._weights,
                environment=dataclasses.replace(base.task.environment, max_turns=_max_turns(args, base)),
            ),
        )

    @property
    def state(self) -> Any:
        """transformers' TrainerState: log_history, global_step, epoch, max_steps."""
        return self._observer.state

    def add_callback(self, callback: Any) -> None:
        self._observer.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: Any) -> None:
        kept = [c for c in self._observer.callbacks if c is not callback and type(c) is not callback]
        self._observer.callbacks = kept

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, or resume the run in output_dir, whatever resume_from_checkpoint says; a path must be one of
        its checkpoints, or, where there are none yet, one of another run, with which this one begins."""
        begin_s = time.perf_counter()
        _take_checkpoint(resume_from_checkpoint, Path(self.config.out) / "checkpoints")
        result = train(self.config, rewards=self._rewards, observer=self._observer)
        self._observer.restore()
        self._observer.call("on_train_end")
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {"train_runtime": round(time.perf_counter() - begin_s, 3), "train_loss": loss, **result}
        return TrainOutput(self.state.global_step, loss, metrics)

    def evaluate(
        self,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the mean reward and length of samples of the newest checkpoint, or of the model before
        training, on eval_dataset; log them."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        require(given is not None, "evaluate needs an eval_dataset")
        if isinstance(given, Mapping):
            each = [
                self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
                for name, rows in given.items()
            ]
            return {name: value for metrics in each for name, value in metrics.items()}
        path = write_rows("eval_dataset", given or (), Path(self.config.out))
        task = dataclasses.replace(self.config.task, held_out_split=str(path), num_held_out=_num_rows(path))
        config = dataclasses.replace(self.config, task=task, model=resolve_device(self.config.model))
        config = with_stored_base(config, Path(config.out))
        num_samples = self.args.num_generations_eval or self.config.num_generations
        found = evaluate(config, self._rewards, num_samples=num_samples)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        entry = metrics | {"epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        self._observer.call("on_evaluate", metrics=metrics)
        self._observer.call("on_log", logs=entry)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained adapter in PEFT's format, and the tokenizer, into a folder, by default
        output_dir; with adapter.kind full, the model."""
        out = Path(output_dir or self.config.out)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as temporary:
            folder = Path(temporary) / "model"
            write = write_peft if self.config.adapter.kind == "lora" else write_merged_model
            config = with_stored_base(self.config, Path(self.config.out))
            write(Path(config.out), config, folder)
            write_tokenizer(folder, locate(config.model.path))
            for file in folder.iterdir():
                os.replace(file, out / file.name)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        dataset_name: str | None = None,
        model_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> Any:
        """Upload what save_model writes, with a model card, to hub_model_id; return the hub's answer."""
        named = [tags] if isinstance(tags, str) else list(tags or ())
        card = model_card(
            model_name or self.hub_model_id.rpartition("/")[2],
            base_model=self.config.model.path,
            dataset=dataset_name,
            tags=[*named, "grpo", "qerl"],
        )
        with tempfile.TemporaryDirectory() as temporary:
            self.save_model(temporary, _internal_call=True)
            return push_folder(
                Path(temporary),
                self.hub_model_id,
                card=card,
                token=token or self.args.hub_token,
                private=self.args.hub_private_repo,
                revision=revision or self.args.hub_revision,
                commit_message=commit_message,
            )

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        print(f"{split} metrics: " + ", ".join(f"{name} {value}" for name, value in metrics.items()))

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write <split>_results.json into output_dir."""
        path = Path(self.config.out) / f"{split}_results.json"
        path.write_text(json.dumps(dict(metrics), indent=2) + "\n")

    def save_state(self) -> None:
        """Write trainer_state.json into output_dir."""
        self.state.save_to_json(str(Path(self.config.out) / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        return True

    def end(self) -> None:
        """Nothing is left open after train."""


def _functions(given: Any) -> list[Callable[..., Any]]:
    functions = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for function in functions:
        require(
            callable(function) and not hasattr(function, "get_input_embeddings"),
            f"reward_funcs must be functions, got {function!r}; reward models are not supported:"
            " call one in a function of its own, on a CPU or over HTTP",
        )
    return functions


def _with_tools(
    functions: list[Callable[..., Any]], args: GRPOConfig, tools: Sequence[Callable[..., Any]], factory: Any
) -> tuple[list[Callable[..., Any]], tuple[float, ...], list[dict[str, Any]]]:
    """Return the rewards, an environment among them if there are tools, their weights, the tools' schemas."""
    weights = list(args.reward_weights or [1.0] * len(functions))
    require(
        len(weights) == len(functions),
        f"reward_weights must be one for each of {len(functions)} reward_funcs, got {len(weights)}",
    )
    if not tools and factory is None:
        require(bool(functions), "reward_funcs: there is no reward function")
        return functions, tuple(args.reward_weights or ()), []
    pairs = list(zip(functions, weights, strict=True))
    inside = [pair for pair in pairs if takes_environments(pair[0])]
    environment, schemas = make_environment(tools, factory, inside)
    names = {schema["function"]["name"] for schema in schemas}
    others = [pair for pair in pairs if pair not in inside]
    outside = [(of_conversations(function, names), weight) for function, weight in others]
    has_reward = bool(outside) or callable(environment.score)
    require(has_reward, "reward_funcs: there is none, nor a get_reward")
    return [f for f, _ in outside] + [environment], (*(w for _, w in outside), 1.0), schemas


def _template_variables(args: GRPOConfig, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    assert not isinstance(args.chat_template_kwargs, str)
    return {**(args.chat_template_kwargs or {}), **({"tools": schemas} if schemas else {})}


def _max_turns(args: GRPOConfig, base: RunConfig) -> int:
    """TRL has no limit but the tokens; one turn more than rounds of calls."""
    most = args.max_tool_calling_iterations
    return 1 + most if most is not None else max(base.task.environment.max_turns, base.sample.max_tokens)


def _own_quantization(model: Any) -> Any:
    return None if isinstance(model, str) else getattr(model.config, "quantization_config", None)


def _all_rows(rows: Rows | Mapping[str, Rows] | None) -> list[dict[str, Any]] | None:
    """Return the rows of all evaluation sets."""
    if rows is None:
        return None
    return [row for each in (rows.values() if isinstance(rows, Mapping) else [rows]) for row in each]


def _num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _most_rows(rows: Rows | None, batch: Batch) -> int | None:
    """Return the number of rows that a stream must give; None for a data set."""
    return None if length(rows) is not None else batch.num_steps * batch.num_prompts


def _take_checkpoint(given: bool | str | None, own: Path) -> None:
    """Check that the run will resume the checkpoint that was asked for; copy one of another run."""
    if not given:
        return
    newest, _ = checkpoint.find_latest(own)
    if given is True:
        require(newest is not None, f"resume_from_checkpoint: {own} holds no checkpoint")
        return
    path = Path(str(given))
    if newest is not None and newest.resolve() == path.resolve():
        return
    damage = checkpoint.find_damage(path)
    require(damage is None, f"resume_from_checkpoint {path}: {damage}")
    if newest is not None:
        raise UserError(
            f"resume_from_checkpoint: {own} holds {newest.name}, with which the run goes on;"
            " remove the checkpoints after yours, or set another output_dir"
        )
    checkpoint.copy(path, own)
