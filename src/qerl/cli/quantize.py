"""Quantize a model to 4 bits and write it as a checkpoint."""

import sys

from qerl.cli.arguments import announce, parse_options
from qerl.config.options import QuantizeOptions


def run(arguments: list[str]) -> None:
    options = parse_options(QuantizeOptions, arguments, "quantize", description=__doc__)
    announce(f"quantize {options.model}: {options.format}, {options.out}", sys.stderr)
    from qerl.models.quantize.quantize import quantize

    quantize(options)
    print(options.out)
