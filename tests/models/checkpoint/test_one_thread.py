"""What reads many small tensors waits for no other thread (a GGUF: test_gguf_file.py)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import stored_layouts
from models.family_rows import oracle, save
from models.tiny import tiny
from qerl.config import AdapterConfig
from qerl.models.checkpoint.source import fitting_weight, locate
from qerl.models.peft.adapter import add_adapter


class Threads(TorchDispatchMode):
    """Writes down the number of threads of each operation, by its name."""

    def __init__(self):
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of.setdefault(func.__name__.split(".")[0], set()).add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_codes_that_are_taken_as_they_are_are_checked_in_one_thread(tmp_path, format):
    model = oracle("Llama", hidden_size=64, intermediate_size=128, num_attention_heads=8, num_hidden_layers=1)
    row, source = stored_layouts.ROWS[f"ct-{format}"], save(model, tmp_path / "float")
    stored_layouts.write(row, model, source, tmp_path / "packed")
    checkpoint = locate(str(tmp_path / "packed")).open()
    with Threads() as threads:
        assert fitting_weight(checkpoint, "model.layers.0.mlp.up_proj", format) is not None
    assert threads.of["max"] == {1} and torch.get_num_threads() == 2


def test_a_new_adapter_is_drawn_in_one_thread():
    decoder = tiny("Qwen2")
    with Threads() as threads:
        add_adapter(decoder, AdapterConfig(rank=4), seed=0)
    assert threads.of["sub_"] == {1} and torch.get_num_threads() == 2
