import collections

import gguf
import torch

from models.checkpoints import tiny, write_gguf
from qerl.formats import MXFP4, NVFP4, PackedWeight
from qerl.models.checkpoint import encoding
from qerl.models.checkpoint.encoding import encode_group
from qerl.models.checkpoint.gguf_file import GgufFile

GROUP = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


class Counted:
    """A checkpoint that counts how often each tensor is read."""

    def __init__(self, checkpoint):
        self.path, self.config, self.shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
        self.counts, self._checkpoint = collections.Counter(), checkpoint

    def read(self, name):
        self.counts[name] += 1
        return self._checkpoint.read(name)

    def read_rows(self, name, rows):
        return self._checkpoint.read_rows(name, rows)


def opened(tmp_path, device):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(), kinds={"_proj": gguf.GGMLQuantizationType.Q5_0})
    return Counted(GgufFile(file, device))


def tensors(checkpoint, device, kind: type[PackedWeight] = NVFP4):
    encoded = encode_group(checkpoint, GROUP, kind, device)
    return {
        f"{name}.{part}": tensor.cpu().view(torch.uint8)
        for name, weight in encoded
        for part, tensor in weight.tensors().items()
    }


def test_codes_are_the_same_wherever_the_file_is_decoded(tmp_path, device):
    cpu = torch.device("cpu")
    want = tensors(opened(tmp_path, cpu), cpu)
    for checkpoint in (opened(tmp_path, cpu), opened(tmp_path, device)):
        got = tensors(checkpoint, device)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_gpu_reads_a_small_group_once_and_a_cpu_saves_the_memory(tmp_path, device, monkeypatch):
    shared = 1 if device.type == "cuda" else 2
    for limit, times in ((1 << 28, shared), (0, 2)):
        monkeypatch.setattr(encoding, "_GROUP_BYTES", limit)
        checkpoint = opened(tmp_path, device)
        tensors(checkpoint, device)
        assert set(checkpoint.counts.values()) == {times}


def test_weights_that_share_no_scale_are_read_once(tmp_path, device):
    checkpoint = opened(tmp_path, device)
    tensors(checkpoint, device, MXFP4)
    assert set(checkpoint.counts.values()) == {1}
