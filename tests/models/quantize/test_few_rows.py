"""Experts of a mixture that too few rows of the calibration reach get the nearest codes, and are counted."""

import pytest
import torch

from models.family_rows import oracle
from models.family_rows import save as save_oracle
from qerl.formats import NVFP4
from qerl.formats.block_scale import least_squares
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.quantize.calibration import pack_groups
from qerl.models.quantize.gptq import MIN_EXPERT_ROWS, GptqSettings, requantize

CPU = torch.device("cpu")


def decoder_of(folder, format):
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=CPU, resident=False)


def rows_by_expert(decoder, rows):
    """{(layer, expert): rows} of the first grouped product of each layer, and the experts' weights."""
    counts, handles = {}, []

    def count(layer):
        def hook(module, arguments):
            ends = arguments[2]
            counts.update({(layer, e): ends[e + 1] - ends[e] for e in range(module.spec.num_experts)})

        return hook

    for layer_index, layer in enumerate(decoder.layers):
        if layer.experts:
            handles.append(layer.experts[0].register_forward_pre_hook(count(layer_index)))
    with torch.no_grad():
        decoder(rows.tokens_T, rows.positions_T, rows.attend, recur=rows.recur)
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("num_tokens", [3, 12, 60])
@pytest.mark.parametrize("family", ["Olmoe", "Qwen3Moe"])
def test_experts_that_few_rows_reach_get_the_nearest_codes_and_are_counted(tmp_path, family, num_tokens):
    save_oracle(oracle(family, vocab_size=320).bfloat16(), tmp_path)
    decoder, notices = decoder_of(tmp_path, "bf16"), []
    tokens = [(7 * i) % 250 for i in range(num_tokens)]
    rows = pack_groups([(tokens, [])], max_tokens=num_tokens, device=CPU)
    targets = [experts.weight for experts in decoder.layers[0].experts]
    counts = rows_by_expert(decoder, rows)  # of layer 0 those of the quantized model too: q and k alone move
    requantize(decoder, rows, GptqSettings(), notice=notices.append)
    is_nearest = {}
    for experts, target in zip(decoder.layers[0].experts, targets, strict=True):
        for e in range(experts.spec.num_experts):
            weight_NK = target[e].decode().float()
            plain = least_squares(NVFP4.encode(weight_NK), weight_NK, torch.ones(weight_NK.shape[1]))
            is_same = torch.equal(experts.weight[e].decode(), plain.decode())
            is_nearest[e] = is_nearest.get(e, True) and is_same
    num_rows = {e: rows for (layer, e), rows in counts.items() if layer == 0}
    sure = {e: n for e, n in num_rows.items() if n == 0 or n > MIN_EXPERT_ROWS + 4}
    assert all(is_nearest[e] == (n == 0) for e, n in sure.items()), (is_nearest, num_rows)
    if num_tokens < MIN_EXPERT_ROWS:
        assert all(is_nearest.values())
        total = len(counts)
        assert notices[-1] == f"{total} of {total} experts saw too few tokens and have the nearest codes"
    elif num_tokens == 60:
        assert not all(is_nearest.values())


def test_on_a_grid_of_its_own_an_expert_needs_one_row(tmp_path):
    save_oracle(oracle("Olmoe", vocab_size=320).bfloat16(), tmp_path)
    decoder, notices = decoder_of(tmp_path, "nvfp4"), []
    rows = pack_groups([([3, 4, 5], [])], max_tokens=3, device=CPU)
    num_without = sum(n == 0 for n in rows_by_expert(decoder, rows).values())
    requantize(decoder, rows, GptqSettings(), notice=notices.append)
    told = int(notices[-1].split()[0]) if notices else 0
    assert told == num_without
