"""Rows that a benchmark writes, gathered from its file."""

import torch

from bench.test_record import ORIGIN
from benchmarks.rows import read_rows
from qerl.bench.record import RowWriter

CPU = torch.device("cpu")


def rows_of(folder, work):
    """work(rows) -> the rows it wrote."""
    work(RowWriter(folder / "rows.jsonl", ORIGIN))
    return read_rows(folder)
