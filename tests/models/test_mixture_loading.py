"""Experts of checkpoints: codes as they are, one expert in memory at a time; what is written is read."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.family_rows import load, oracle, save
from models.tiny import logits_of
from qerl.errors import UserError
from qerl.formats import FORMATS
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized

TOKENS_T = torch.arange(40) * 7 % 61
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
CHANGES = {"GptOss": SIZES, "Qwen3Moe": SIZES | {"moe_intermediate_size": 64}, "Olmoe": SIZES}
CHANGES["GraniteMoe"] = SIZES


def of(path, format):
    cpu = torch.device("cpu")
    return build_decoder(
        locate(str(path)).open(), format=format, compute=torch.float32, device=cpu, resident=False
    )


def saved(family, folder):
    return save(oracle(family, **CHANGES[family]), folder)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_is_quantized_at_load_is_what_quantize_writes(family, format, tmp_path):
    folder = saved(family, tmp_path / "float")
    write_quantized(str(folder), tmp_path / "packed", format=format)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "re:.*mlp[.]gate$"]
    names = load_file(tmp_path / "packed" / "model.safetensors")
    assert "model.layers.0.mlp.experts.4.up_proj.weight_packed" in names
    assert names["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    here, there = of(folder, format), of(tmp_path / "packed", format)
    assert torch.equal(logits_of(here, TOKENS_T), logits_of(there, TOKENS_T))
    for (name, mine), (_, other) in zip(here.expert_linears(), there.expert_linears(), strict=True):
        assert mine.weight.kind is other.weight.kind is FORMATS[format]
        assert all(torch.equal(mine.weight.parts[p], other.weight.parts[p]) for p in mine.weight.parts), name


def test_gpt_oss_is_written_as_it_is_published_and_its_codes_are_read_unchanged(tmp_path):
    folder = saved("GptOss", tmp_path / "float")
    write_quantized(str(folder), tmp_path / "packed", format="mxfp4")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    blocks = tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert blocks.shape == (5, 128, 2, 16) and "model.layers.0.mlp.experts.gate_up_proj" not in tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].is_floating_point()
    decoder = of(tmp_path / "packed", "mxfp4")
    assert decoder.architecture.mixture.stored == "blocks"
    stacks = dict(decoder.expert_linears())
    codes = stacks["layers.0.mlp.experts.gate_up_proj"].weight.parts["codes"]
    assert torch.equal(codes, blocks.flatten(2))
    float_stacks = dict(of(folder, "mxfp4").expert_linears())
    for name, stack in stacks.items():
        parts = float_stacks[name].weight.parts
        assert all(torch.equal(stack.weight.parts[p], parts[p]) for p in parts), name


def test_experts_of_another_format_are_decoded_and_quantized_again(tmp_path):
    folder = saved("GptOss", tmp_path / "float")
    write_quantized(str(folder), tmp_path / "packed", format="mxfp4")
    exact, again = of(tmp_path / "packed", "mxfp4"), of(tmp_path / "packed", "bf16")
    pairs = zip(exact.expert_linears(), again.expert_linears(), strict=True)
    for (name, mine), (_, other) in pairs:
        for e in range(5):  # bf16 has every number of MXFP4
            assert torch.equal(mine.weight[e].decode(), other.weight[e].decode()), name


@pytest.mark.parametrize(
    ("family", "format"), [("GptOss", "nvfp4"), ("GraniteMoe", "nvfp4"), ("GraniteMoe", "mxfp4")]
)
def test_a_form_that_no_layout_has_is_refused(family, format, tmp_path):
    folder = saved(family, tmp_path / "float")
    with pytest.raises(UserError, match=r"experts of .* can be written in"):
        write_quantized(str(folder), tmp_path / "packed", format=format)


def test_gate_and_up_with_different_global_scales_are_quantized_together(tmp_path):
    folder = saved("Qwen3Moe", tmp_path / "float")
    write_quantized(str(folder), tmp_path / "packed", format="nvfp4")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    scale = tensors["model.layers.0.mlp.experts.1.gate_proj.weight_global_scale"]
    before = of(tmp_path / "packed", "nvfp4")
    scale.mul_(4)
    save_file(tensors, file, metadata={"format": "pt"})
    after = of(tmp_path / "packed", "nvfp4")
    mine, other = (next(decoder.expert_linears())[1].weight[1].decode() for decoder in (before, after))
    assert torch.allclose(other[:64] * 4, mine[:64], rtol=0.2, atol=0.1 * mine.abs().max().item())
    assert torch.allclose(other[64:], mine[64:], rtol=0.2, atol=0.1 * mine.abs().max().item())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that some tensor holds, made since it began."""

    def __init__(self):
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                at = storage.data_ptr(), storage.nbytes()  # a freed address may be given to another size
                holders = self._live.setdefault(at, (storage.nbytes(), []))[1]
                holders.append(weakref.ref(tensor))
        for at, (_, holders) in list(self._live.items()):
            holders[:] = [holder for holder in holders if holder() is not None]
            if not holders:
                del self._live[at]
        self.peak = max(self.peak, sum(num_bytes for num_bytes, _ in self._live.values()))
        return out


@pytest.mark.parametrize("family", ["GptOss", "Qwen3Moe", "GraniteMoe"])
def test_the_peak_is_the_packed_model_and_one_expert(family, tmp_path):
    """32 experts of 0.6 million weights in one layer: 75 MB in float32, 11 MB packed; an expert 2.4 MB."""
    key = "num_local_experts" if family == "GraniteMoe" else "num_experts"
    sizes = {"hidden_size": 512, "intermediate_size": 384, "num_hidden_layers": 1, key: 32}
    sizes |= {"layer_types": ["full_attention"]} if family == "GptOss" else {}
    sizes |= {"moe_intermediate_size": 384, "mlp_only_layers": []} if family == "Qwen3Moe" else {}
    model = oracle(family, num_attention_heads=4, **sizes)
    folder = save(model, tmp_path)
    float_bytes = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    del model
    expert_bytes = float_bytes // 32
    with LiveBytes() as counted:
        decoder = of(folder, "nvfp4")
    assert 0.9 * decoder.num_bytes < counted.peak  # it counts
    assert counted.peak < decoder.num_bytes + 4 * expert_bytes + 4_000_000
    assert counted.peak < float_bytes // 2


def test_a_wrong_shape_of_an_expert_is_named(tmp_path):
    folder = saved("Qwen3Moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    save_file(tensors | {name: torch.ones(3, 4)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"experts.3.down_proj.weight is \[3, 4\]"):
        load(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"has no tensor model.layers.1.mlp.experts.3.down_proj.weight"):
        load(folder)
