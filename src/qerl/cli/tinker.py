"""Serve a model to programs written for Tinker's API."""

import sys

from qerl.cli.arguments import announce, check_server_packages, names_or_help, parse_options
from qerl.config import ModelConfig
from qerl.config.options import TinkerOptions
from qerl.errors import UserError


def run(arguments: list[str]) -> None:
    names, arguments = names_or_help(TinkerOptions, arguments, "tinker MODEL", __doc__)
    if len(names) != 1:
        raise UserError("tinker needs one model: qerl tinker MODEL")
    default = TinkerOptions(model=ModelConfig(path=names[0]))
    options = parse_options(TinkerOptions, arguments, f"tinker {names[0]}", default, __doc__)
    check_server_packages("tinker")
    announce(f"tinker {names[0]}: {options.model.format}, loading", sys.stdout)
    from qerl.tinker.server import serve

    serve(names[0], options)
