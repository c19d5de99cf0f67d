"""Layers of a real model, SmolLM2-135M-Instruct; skipped until `make model` has fetched it."""

import gguf
import pytest
import torch

from formats.oracles import bitsandbytes_nf4, compressed_mxfp4, compressed_nvfp4
from qerl.formats import MXFP4, NF4, NVFP4

NAMES = ("blk.0.attn_q.weight", "blk.7.attn_v.weight", "blk.15.ffn_down.weight", "blk.29.ffn_gate.weight")


@pytest.fixture(scope="module")
def layers(smollm2):
    tensors = {t.name: t for t in gguf.GGUFReader(smollm2).tensors}
    return [torch.from_numpy(gguf.dequantize(tensors[n].data, tensors[n].tensor_type)) for n in NAMES]


def test_nvfp4_gives_the_bits_of_compressed_tensors(layers):
    for weight_NK in layers:
        codes, scales, global_scale = compressed_nvfp4(weight_NK)
        ours = NVFP4.encode(weight_NK)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.global_scale, global_scale)
        assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))


def test_mxfp4_gives_the_bits_of_compressed_tensors(layers):
    for weight_NK in layers:
        codes, scales = compressed_mxfp4(weight_NK)
        ours = MXFP4.encode(weight_NK)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.scales, scales)


def test_nf4_gives_the_bits_of_bitsandbytes(layers):
    for weight_NK in layers:
        codes, absmax_codes, absmax_scales, offset, decoded = bitsandbytes_nf4(weight_NK)
        ours = NF4.encode(weight_NK)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.absmax_codes, absmax_codes)
        assert torch.equal(ours.absmax_scales, absmax_scales) and torch.equal(ours.absmax_offset, offset)
        assert torch.equal(ours.decode(), decoded)


def test_nvfp4_loses_as_much_of_a_real_layer_as_of_a_normal_one(layers):
    for weight_NK in layers:
        error = (NVFP4.encode(weight_NK).decode() - weight_NK).norm() / weight_NK.norm()
        assert 0.085 < error < 0.105
