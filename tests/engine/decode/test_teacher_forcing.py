"""Teacher forcing with a graph, whose recording and replay are imitated on a CPU."""

import contextlib

import torch

from qerl.engine.decode import teacher_forcing
from qerl.engine.decode.teacher_forcing import TeacherForcing
from qerl.engine.prefill.chunk import PrefillChunk

ROWS = 4


class Sums:
    """A forward with recurrent states: the sum of the tokens that a slot has seen. Recording runs nothing."""

    is_capturable = True

    def __init__(self):
        self.sums, self.is_recording = torch.zeros(3, dtype=torch.int64), False
        self.recorded = torch.zeros(ROWS, 1)

    def together(self, state, num_rows):
        if self.is_recording:
            return self.recorded
        hidden_B1 = torch.zeros(num_rows, 1)
        for row in range(num_rows):
            if state.positions_B[row] >= 0:
                self.sums[int(state.states_B[row])] += int(state.tokens_B[row])
            hidden_B1[row] = self.sums[int(state.states_B[row])]
        return hidden_B1


def replayed_by(forward, monkeypatch):
    """Make teacher forcing's graphs call the forward with the state that it was recorded with."""

    class Graph:
        def replay(self):
            forward.recorded.copy_(forward.together(replay._state, ROWS))

    @contextlib.contextmanager
    def record(graph, pool):
        forward.is_recording = True
        yield
        forward.is_recording = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(teacher_forcing, "record_graph", record)
    sizes = {"rows": ROWS, "max_pages": 2, "page_tokens": 16, "device": torch.device("cpu")}
    replay = TeacherForcing(forward, **sizes, pool=(0, 0))
    return replay


def test_states_take_every_token_once_also_where_the_graph_is_recorded(monkeypatch):
    forward = Sums()
    replay = replayed_by(forward, monkeypatch)
    chunks = [
        PrefillChunk([5, 6, 7], 2, [0, 1], state=[0]),  # from the middle of a sequence on
        PrefillChunk([10, 20, 30, 40], 0, [1, 0], state=[2]),
    ]
    assert replay(chunks).flatten().tolist() == [18, 100]
    assert forward.sums.tolist() == [18, 0, 100] and replay.num_forwards == 2
    assert replay([PrefillChunk([1], 5, [0, 1], state=[0])]).tolist() == [[19]]
