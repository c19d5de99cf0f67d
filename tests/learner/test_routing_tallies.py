"""Metrics of a mixture's routing."""

import pytest
import torch

from qerl.learner.metrics import _routing, to_host
from qerl.learner.router_replay import RoutingReading


@pytest.mark.parametrize("is_recorded", [False, True])
def test_routes_are_compared_only_where_the_sampler_recorded_them(is_recorded):
    counts_LE, differs_TL = torch.tensor([[2, 6], [4, 4]]), torch.tensor([[True, False], [False, False]])
    tallies = to_host(_routing([RoutingReading(counts_LE, differs_TL if is_recorded else None)]))
    assert tallies["expert_load"].max == 1.5 and -tallies["expert_idle"].max == 0.5
    assert ("route_changes" in tallies) == is_recorded
    if is_recorded:
        assert tallies["route_changes"].mean == 0.25 and tallies["route_change_rows"].mean == 0.5
