"""Serve a model or a run over an OpenAI-compatible HTTP API."""

import sys

from qerl.cli.arguments import announce, check_server_packages, names_or_help, parse_options
from qerl.config import ModelConfig
from qerl.config.options import ServeOptions
from qerl.config.stored import read_run_config
from qerl.errors import UserError
from qerl.models.checkpoint.model_place import check_place


def run(arguments: list[str]) -> None:
    names, arguments = names_or_help(ServeOptions, arguments, "serve MODEL_OR_RUN", __doc__)
    if len(names) != 1:
        raise UserError("serve needs one model or the folder of one run: qerl serve MODEL_OR_RUN")
    source, config = names[0], read_run_config(names[0])
    default = ServeOptions(model=ModelConfig(path=source))
    if config is not None:
        default = ServeOptions(model=config.model, system_prompt=config.task.system_prompt)
    options = parse_options(ServeOptions, arguments, f"serve {source}", default, __doc__)
    check_server_packages("serve")
    announce(f"serve {source}: {options.model.format}, loading", sys.stdout)
    check_place(options.model.path)
    from qerl.serve.server import serve

    serve(source, config, options)
