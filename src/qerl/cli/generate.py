"""Generate an answer to a prompt, or chat with a model or a run in the terminal."""

import dataclasses
import sys

from qerl.cli.arguments import announce, names_or_help, parse_options
from qerl.config import ModelConfig
from qerl.config.options import GenerateOptions
from qerl.config.stored import read_run_config
from qerl.errors import UserError
from qerl.models.checkpoint.model_place import check_place

DESCRIPTION = f"""{__doc__}

Answer PROMPT, or the text on stdin; without either, start a chat in the terminal."""


def run(arguments: list[str]) -> None:
    names, arguments = names_or_help(
        GenerateOptions, arguments, "generate MODEL_OR_RUN [PROMPT]", DESCRIPTION
    )
    if not 1 <= len(names) <= 2:
        raise UserError(
            "generate needs a model or the folder of a run, and at most one prompt, in quotes:"
            " qerl generate MODEL_OR_RUN [PROMPT]"
        )
    source, config = names[0], read_run_config(names[0])
    default = GenerateOptions(model=ModelConfig(path=source))
    if config is not None:
        default = GenerateOptions(
            model=config.model,
            system_prompt=config.task.system_prompt,
            **dataclasses.asdict(config.sample),
            chat=config.task.chat == "all",
        )
    options = parse_options(GenerateOptions, arguments, f"generate {source}", default, DESCRIPTION)
    if not sys.stderr.isatty():
        announce(f"generate {source}: {options.model.format}, loading", sys.stderr)
    check_place(options.model.path)
    from qerl.serve.chat import generate

    generate(source, config, names[1] if len(names) == 2 else None, options)
