"""Export what a run learned: a PEFT adapter, or a merged model."""

import sys

from qerl.cli.arguments import announce, parse_options
from qerl.config.options import ExportOptions
from qerl.config.stored import read_config_file
from qerl.errors import UserError, did_you_mean_folder


def run(arguments: list[str]) -> None:
    options = parse_options(ExportOptions, arguments, "export", description=__doc__)
    run_json = options.run / "run.json"
    if not run_json.is_file():
        near = "" if options.run.exists() else did_you_mean_folder(options.run)
        raise UserError(f"{options.run}: not the folder of a run (it has no run.json){near}")
    announce(f"export {options.run}: {options.form}, {options.out}", sys.stderr)
    from qerl.export import export

    export(read_config_file(run_json), options)
    print(options.out)
