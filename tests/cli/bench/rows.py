"""Rows that a benchmark writes, gathered from its file."""

import torch

from cli.bench.test_record import ORIGIN
from qerl.cli.bench.record import Rows, read

CPU = torch.device("cpu")


def rows_of(folder, work):
    """work(rows) -> the rows it wrote."""
    work(Rows(folder / "rows.jsonl", ORIGIN))
    return read(folder)
