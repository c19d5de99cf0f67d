"""GRPOTrainer of TRL over `qerl.train`."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.config import EnvironmentConfig, NoiseConfig, RunConfig, TaskConfig
from qerl.config.stored import with_stored_base
from qerl.errors import require
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.device import resolve_device
from qerl.tasks.call_forms.choice import form_of
from qerl.tasks.environment import COLUMN
from qerl.tasks.scoring import name_of
from qerl.training.session import train
from qerl.trl.config import GRPOConfig
from qerl.trl.data import write_rows
from qerl.trl.evaluation import evaluate
from qerl.trl.ignored import GRPOIgnoredFields, ignored
from qerl.trl.refused import GRPORefusedFields, check_refused
from qerl.trl.run_trainer import Rows, RunTrainer, all_rows, num_rows
from qerl.trl.tools import make_environment, make_environments, of_conversations, takes_environments
from qerl.trl.translate import length, plain
from qerl.trl.translate_grpo import batch_of, run_config, samples_per_generation

Schemas = list[dict[str, Any]] | dict[str, list[dict[str, Any]]]
"""Those of the tools; by the environment's name, if there are several."""
# A call of a reward function is for all samples of a step, so it gets more time than one for a sample.
_BASE = RunConfig(noise=NoiseConfig(schedule="none"), task=TaskConfig(reward_timeout_s=60.0))


class GRPOTrainer(RunTrainer):
    method = "GRPO"

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
        check_refused(self.args, GRPORefusedFields)
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
        base = self._based(base or _BASE, quantization_config, peft_config)
        if tools or environment_factory is not None:
            self._rewards = _with_form(self._rewards, self._schemas, base.model.path)
        self._batch = batch_of(self.args, length(train_dataset))
        self.config = self._run_config(base, Path(str(self.args.output_dir)))
        self._start(self._batch, ignored(self.args, GRPOIgnoredFields), callbacks)

    def _run_config(self, base: RunConfig, folder: Path) -> RunConfig:
        args, rows = self.args, self.train_dataset
        eval_rows = None if plain(args.eval_strategy) == "no" else all_rows(self.eval_dataset)
        held_out = None if eval_rows is None else self._write_eval_rows(eval_rows, folder)
        num_held_out = 0 if held_out is None else num_rows(held_out)
        has_rows = rows is not None or isinstance(self._schemas, list)
        require(has_rows, f"train_dataset is needed: its column {COLUMN} names environments")
        if rows is None and self._schemas:  # the environment gives the prompts
            rows = itertools.repeat({"prompt": [{"role": "user", "content": ""}]})
        # A stream gives the rows of the run's steps, a data set all of its rows.
        limit = None if length(rows) is not None else self._batch.num_steps * self._batch.num_prompts
        path = write_rows("train_dataset", _with_own_tools(rows or (), self._schemas), folder, limit=limit)
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
                reward_scope="batch",
                environment=_environment(args, base),
            ),
        )

    def _write_eval_rows(self, rows: Rows, folder: Path | None = None) -> Path:
        return write_rows(
            "eval_dataset", _with_own_tools(rows, self._schemas), folder or Path(self.config.out)
        )

    def _train(self) -> dict[str, Any]:
        return train(self.config, rewards=self._rewards, observer=self._observer)

    def _held_out(self, path: Path, num_rows: int) -> dict[str, float]:
        task = dataclasses.replace(self.config.task, held_out_split=str(path), num_held_out=num_rows)
        config = dataclasses.replace(self.config, task=task, model=resolve_device(self.config.model))
        config = with_stored_base(config, Path(config.out))
        num_samples = self.args.num_generations_eval or self.config.num_generations
        return evaluate(config, self._rewards, num_samples=num_samples)


def _functions(reward_funcs: Any) -> list[Callable[..., Any]]:
    several = [] if reward_funcs is None else reward_funcs
    functions = list(several) if isinstance(several, list | tuple) else [several]
    for function in functions:
        require(
            callable(function) and not hasattr(function, "get_input_embeddings"),
            f"reward_funcs must be functions, got {function!r}; reward models are not supported:"
            " call one in a function of its own, on a CPU or over HTTP",
        )
    return functions


def _with_tools(
    functions: list[Callable[..., Any]],
    args: GRPOConfig,
    tools: Sequence[Callable[..., Any]],
    factory: Any,
) -> tuple[list[Callable[..., Any]], tuple[float, ...], Schemas]:
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
    if isinstance(factory, Mapping):
        environment, schemas = make_environments(tools, factory, inside)
    else:
        environment, schemas = make_environment(tools, factory, inside)
    outside = [pair for pair in pairs if pair not in inside]
    has_reward = bool(outside) or callable(environment.score)
    require(has_reward, "reward_funcs is empty, and the environment has no get_reward: give one of them")
    return [f for f, _ in outside] + [environment], (*(w for _, w in outside), 1.0), schemas


def _with_form(rewards: list[Any], schemas: Schemas, model: str) -> list[Any]:
    """Return the rewards, of which the environment is the last, for calls in the form of the model's chat
    template."""
    form = form_of(load_tokenizer(model).chat_template)
    several = schemas.values() if isinstance(schemas, dict) else [schemas]
    names = {schema["function"]["name"] for each in several for schema in each}
    *functions, environment = rewards
    for kind, _ in getattr(environment, "kinds", {"": (environment, 1.0)}).values():
        kind.call_form = form
    return [*(of_conversations(function, names, form) for function in functions), environment]


def _template_variables(args: GRPOConfig, schemas: Schemas) -> dict[str, Any]:
    assert not isinstance(args.chat_template_kwargs, str)
    is_shared = bool(schemas) and isinstance(schemas, list)
    return {**(args.chat_template_kwargs or {}), **({"tools": schemas} if is_shared else {})}


def _with_own_tools(rows: Iterable[dict[str, Any]], schemas: Schemas) -> Iterable[dict[str, Any]]:
    """Return the rows with the tools of their environment, where there are several."""
    return (_with_tools_of(row, schemas) for row in rows) if isinstance(schemas, dict) else rows


def _with_tools_of(row: dict[str, Any], schemas: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    name = row.get(COLUMN)
    known = f"environment_factory has {', '.join(schemas)}"
    require(name in schemas, f"{COLUMN} of a row is {name!r}: {known}")
    return {**row, "tools": schemas[str(name)]}


def _environment(args: GRPOConfig, base: RunConfig) -> EnvironmentConfig:
    """TRL has no limit of turns but the tokens; one turn is more than rounds of calls. It has as many
    environments as a generation has samples."""
    limit, environment = args.max_tool_calling_iterations, base.task.environment
    turns = 1 + limit if limit is not None else max(environment.max_turns, base.sample.max_tokens)
    num_environments = environment.max_environments or samples_per_generation(args)
    return dataclasses.replace(environment, max_turns=turns, max_environments=num_environments)
