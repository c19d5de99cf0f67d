"""GRPOTrainer of TRL over `qerl.train`."""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qerl.config import NoiseConfig, RunConfig
from qerl.config.options import ExportOptions
from qerl.errors import require
from qerl.export import export
from qerl.tasks.scoring import name_of
from qerl.training.session import train
from qerl.trl.config import GRPOConfig
from qerl.trl.data import write_rows
from qerl.trl.ignored import ignored
from qerl.trl.lora import adapter_config
from qerl.trl.model import model_config
from qerl.trl.refused import check_refused
from qerl.trl.translate import Batch, batch_of, length, run_config

_logger = logging.getLogger("qerl.trl")
Rows = Iterable[dict[str, Any]]


class GRPOTrainer:
    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: GRPOConfig | None = None,
        train_dataset: Rows = (),
        eval_dataset: Rows | None = None,
        *,
        quantization_config: Any = None,
        peft_config: Any = None,
        base: RunConfig | None = None,
    ):
        """`train_dataset` is a datasets.Dataset or a list of rows with a column `prompt`: messages, or a text
        that is given to the model unchanged. `base` has the fields that TRL does not, such as model.format,
        noise and engine; the default has NVFP4 weights and no noise."""
        self.args = args or GRPOConfig()
        check_refused(self.args)
        self.reward_funcs = _functions(reward_funcs)
        base = base or RunConfig(noise=NoiseConfig(schedule="none"))
        base = dataclasses.replace(
            base, model=model_config(model, quantization_config, self.args, base.model)
        )
        self.config = self._config(base, train_dataset, eval_dataset, peft_config)
        if names := ignored(self.args):
            _logger.warning("GRPOConfig: no effect here: %s", ", ".join(names))

    def _config(
        self, base: RunConfig, train_rows: Rows, eval_rows: Rows | None, peft_config: Any
    ) -> RunConfig:
        args, folder = self.args, Path(str(self.args.output_dir))
        batch = batch_of(args, length(train_rows))
        held_out = None if eval_rows is None else write_rows("eval_dataset", eval_rows, folder)
        num_held_out = 0 if held_out is None else held_out.read_bytes().count(b"\n")
        config = run_config(args, base, batch, num_held_out=num_held_out)
        path = write_rows("train_dataset", train_rows, folder, most=_most_rows(train_rows, batch))
        return dataclasses.replace(
            config,
            adapter=adapter_config(peft_config, base.adapter),
            task=dataclasses.replace(
                base.task,
                name=str(path),
                held_out_split=None if held_out is None else str(held_out),
                num_held_out=num_held_out,
                template="{prompt}",
                chat="messages",
                chat_template_kwargs=json.dumps(args.chat_template_kwargs or {}),
                rewards=tuple(map(name_of, self.reward_funcs)),
                reward_weights=tuple(args.reward_weights or ()),
            ),
        )

    def train(self) -> dict[str, Any]:
        """Train, or resume the run in output_dir; return the result as `qerl.train` does."""
        return train(self.config, rewards=self.reward_funcs)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the adapter in PEFT's format, by default to the folder `adapter` of the run."""
        run = Path(self.config.out)
        export(self.config, ExportOptions(run=run, out=Path(output_dir or run / "adapter"), form="peft"))


def _functions(given: Any) -> list[Callable[..., Any]]:
    functions = list(given) if isinstance(given, list | tuple) else [given]
    for function in functions:
        require(
            callable(function) and not hasattr(function, "get_input_embeddings"),
            f"reward_funcs must be functions, got {function!r}; reward models are not supported:"
            " call one in a function of its own, on a CPU or over HTTP",
        )
    return functions


def _most_rows(rows: Rows, batch: Batch) -> int | None:
    """Return the number of rows that a stream must give; None for a data set."""
    return None if length(rows) is not None else batch.num_steps * batch.num_prompts
