"""Quantize a model to 4 bits and write it as a checkpoint."""

from qerl.cli.arguments import parse_options
from qerl.config.options import QuantizeOptions


def run(arguments: list[str]) -> None:
    options = parse_options(QuantizeOptions, arguments, "quantize", description=__doc__)
    from qerl.models.quantize import quantize

    quantize(options)
    print(options.out)
