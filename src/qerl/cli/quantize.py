"""Quantize a model to 4 bits and write it as a checkpoint."""

import sys

from qerl.cli.arguments import announce, parse_options
from qerl.config.options import QuantizeOptions
from qerl.models.checkpoint.model_place import check_place


def run(arguments: list[str]) -> None:
    options = parse_options(QuantizeOptions, arguments, "quantize", help=__doc__)
    announce(f"quantize {options.model}: {options.format}, {options.out}", sys.stderr)
    check_place(options.model)
    from qerl.models.quantize.quantize import quantize

    quantize(options)
    print(options.out)
