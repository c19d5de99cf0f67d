"""The table that `python -m benchmarks tile` writes is the one that kernels read."""

import dataclasses
import json

from benchmarks.tile import ROOT, TABLE, merged
from qerl.kernels.tiles.nvfp4_tile import Choice, read

CHOICE = Choice(N=64, K=128, most_tokens=32, token_tiles=1, warpgroups=1, k_block=128, ctas_per_sm=2, us=1.5)


def test_measured_choices_are_replaced_and_others_stay():
    wide = dataclasses.replace(CHOICE, most_tokens=48)
    first = merged("[]", {"gpu": "one", "commit": "1"}, [CHOICE, wide])
    both = merged(first, {"gpu": "two", "commit": "2"}, [CHOICE])
    again = json.loads(merged(both, {"gpu": "one", "commit": "3"}, [dataclasses.replace(CHOICE, us=2.0)]))
    measured = dataclasses.asdict(CHOICE) | {"us": 2.0}
    assert again[0] == {"gpu": "one", "commit": "3", "choices": [measured, dataclasses.asdict(wide)]}
    assert again[1] == json.loads(both)[1]
    assert [line.strip().startswith('{"N"') for line in both.splitlines()].count(True) == 3


def test_the_committed_table_says_what_it_was_measured_on():
    table = (ROOT / TABLE).read_text()
    for entry in json.loads(table):
        assert {"gpu", "commit", "date"} <= entry.keys() and len(read()[entry["gpu"]]) == len(
            entry["choices"]
        )
        assert (
            merged(table, {k: v for k, v in entry.items() if k != "choices"}, list(read()[entry["gpu"]]))
            == table
        )
