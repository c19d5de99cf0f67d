"""Nothing is collected while a graph is recorded, and whatever the caller had chosen holds afterwards."""

import contextlib
import gc

import pytest
import torch

from qerl.kernels.runtime.cuda_graph import record_graph


@pytest.fixture
def asked(monkeypatch):
    """Return torch's arguments for recording; a stand-in records nothing."""
    asked = []

    @contextlib.contextmanager
    def graph(*args, **kwargs):
        asked.append((args, kwargs))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    yield asked
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_meanwhile(asked, was_enabled):
    if not was_enabled:
        gc.disable()
    with record_graph("graph", pool=(1, 2)):
        assert not gc.isenabled()
    assert gc.isenabled() == was_enabled
    assert asked == [(("graph",), {"pool": (1, 2), "stream": None})]


def test_it_goes_on_after_an_error(asked):
    with pytest.raises(ZeroDivisionError), record_graph("graph"):
        raise ZeroDivisionError
    assert gc.isenabled()


class Held:
    """Frees device memory when it is collected; only the collector finds it."""

    def __init__(self):
        self.itself = self
        self.data = torch.ones(1 << 22, device="cuda")

    def __del__(self):
        self.data = None
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_what_a_collected_object_frees_does_not_end_a_recording():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.ones(1 << 10, device="cuda")
    graph, before = torch.cuda.CUDAGraph(), gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        with record_graph(graph):
            Held()
            kept = [[] for _ in range(10_000)]  # would set the collector off
            y = x + 1
    finally:
        gc.set_threshold(*before)
    graph.replay()
    assert (y == 2).all() and len(kept) == 10_000
