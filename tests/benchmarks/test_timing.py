import pytest
import torch

from qerl.bench.timing import graph_times, summary


def test_a_summary_is_the_median_and_the_fifths():
    times = summary([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (times.ms, times.p20_ms, times.p80_ms, times.runs) == (3.5, 2.0, 5.0, 6)
    assert summary([7.0]).p20_ms == 7.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_timed_as_often_as_asked():
    x = torch.zeros(1 << 20, device="cuda")
    times = graph_times(lambda: x.add_(1), runs=5)
    assert times.runs == 5 and 0 < times.p20_ms <= times.ms <= times.p80_ms
    assert x[0].item() == 1 + 3 + 5  # called once, recorded, replayed to warm up, replayed to be timed
