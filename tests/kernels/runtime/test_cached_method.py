import gc
import weakref

from qerl.kernels.runtime.nvrtc import cached_method


class Squares:
    def __init__(self):
        self.made = []
        self.of = cached_method(self._of)

    def _of(self, x, y=1):
        self.made.append((x, y))
        return x * x * y


def test_each_result_is_made_once():
    squares = Squares()
    assert [squares.of(3), squares.of(3), squares.of(3, 2), squares.of(4)] == [9, 9, 18, 16]
    assert squares.made == [(3, 1), (3, 2), (4, 1)]


def test_its_object_ends_with_its_last_reference():
    squares = Squares()
    squares.of(3)
    gc.disable()
    try:
        weak = weakref.ref(squares)
        del squares
        assert weak() is None
    finally:
        gc.enable()
