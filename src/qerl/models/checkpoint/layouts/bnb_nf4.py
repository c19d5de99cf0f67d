"""bitsandbytes: NF4 and FP4 with or without double quantization, and LLM.int8().

    {module}.weight                                   uint8 [N K / 2, 1]        high nibble = even k
    {module}.weight.absmax                            uint8 [N K / 64]; float32 without double quantization
    {module}.weight.quant_map                         float32 [16]              value of each code
    {module}.weight.nested_absmax                     float32 [.. / 256]
    {module}.weight.nested_quant_map                  float32 [256]
    {module}.weight.quant_state.bitsandbytes__nf4     uint8: JSON with shape, blocksize, nested_offset, ...

    {module}.weight  int8 [N, K]     {module}.SCB  float32 [N]: largest magnitude of a row; W = q SCB / 127

With double quantization, blocks of 64 and 256 and the usual maps, the four tensors are those of our NF4
(formats/nf4.py), and LLM.int8's are those of our INT8. Others are decoded. Source: bitsandbytes' QuantState.
"""

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.formats import INT8, NF4, PackedWeight
from qerl.formats.nf4 import BLOCK_WEIGHTS, GROUP_BLOCKS, LEVELS, dynamic_map
from qerl.models.checkpoint.layouts.layout import (
    Layout,
    LayoutError,
    StoredWeight,
    TensorFolder,
    check_finite,
    modules_with,
    read_part,
)

NAME = "bitsandbytes"
_STATES = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
_INT8_DROPS = "quantization of activations to 8 bits"
_MAX_STATE_BYTES = 1 << 16


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    four = {m: _four_bit(folder, m, state) for state in _STATES for m in modules_with(folder, state)}
    eight = {module: _eight_bit(folder, module) for module in modules_with(folder, "SCB")}
    unused = frozenset(f"{module}.weight_format" for module in eight)
    return Layout(NAME, four | eight, unused, (_INT8_DROPS,) * bool(eight))


def _four_bit(folder: TensorFolder, module: str, state_name: str) -> StoredWeight:
    name = f"{module}.{state_name}"
    state = _state(folder, name)
    shape, block, quant_type = state.get("shape"), state.get("blocksize"), state.get("quant_type")
    sizes = [*shape, block] if isinstance(shape, list) else []
    if len(sizes) != 3 or any(type(x) is not int or x <= 0 for x in sizes) or sizes[0] * sizes[1] % 2:
        raise LayoutError(f"{name} has no shape of two numbers, or no blocksize: {state!r:.200}")
    n, k, block = sizes
    parts = {part: f"{module}.weight.{part}" for part in ("absmax", "quant_map")}
    if is_nested := "nested_blocksize" in state:
        nested = state["nested_blocksize"], state.get("nested_offset")
        if type(nested[0]) is not int or nested[0] <= 0 or not isinstance(nested[1], int | float):
            raise LayoutError(f"{name} has no nested_blocksize and nested_offset: {state!r:.200}")
        parts |= {part: f"{module}.weight.{part}" for part in ("nested_absmax", "nested_quant_map")}
    fits = (
        (is_nested, quant_type, block, state.get("nested_blocksize"))
        == (True, "nf4", BLOCK_WEIGHTS, GROUP_BLOCKS)
        and k % BLOCK_WEIGHTS == 0
        and _is_map(folder, parts["quant_map"], torch.tensor(LEVELS))
        and _is_map(folder, parts["nested_quant_map"], dynamic_map(torch.device("cpu")))
    )
    read = partial(_read_four_bit, folder, f"{module}.weight", parts, state, fits)
    kind = f"{str(quant_type).upper()} per {block}{' with double quantization' * is_nested}"
    names = (f"{module}.weight", *parts.values(), name)
    return StoredWeight((n, k), kind, NF4.name if fits else None, names, read)


def _state(folder: TensorFolder, name: str) -> dict[str, Any]:
    num_bytes = folder.shapes[name]
    if len(num_bytes) != 1 or num_bytes[0] > _MAX_STATE_BYTES:
        raise LayoutError(f"{name} is {list(num_bytes)}, must be one line of JSON")
    text = read_part(folder, name, torch.uint8, num_bytes)
    try:
        state = json.loads(bytes(text.tolist()))
    except ValueError as error:
        raise LayoutError(f"{name} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise LayoutError(f"{name} must hold a JSON object")
    return state


def _is_map(folder: TensorFolder, name: str, values: Tensor) -> bool:
    return torch.equal(read_part(folder, name, torch.float32, tuple(values.shape)), values)


def _read_four_bit(
    folder: TensorFolder, weight: str, parts: dict[str, str], state: dict[str, Any], fits: bool
) -> PackedWeight | Tensor:
    (n, k), block = state["shape"], state["blocksize"]
    codes = _bytes(folder, weight, n * k // 2)
    num_blocks = -(-n * k // block)
    if "nested_absmax" not in parts:
        absmax = read_part(folder, parts["absmax"], torch.float32, (num_blocks,))
        check_finite(parts["absmax"], absmax)
    else:
        groups = -(-num_blocks // state["nested_blocksize"])
        absmax_codes = read_part(folder, parts["absmax"], torch.uint8, (num_blocks,))
        scales = read_part(folder, parts["nested_absmax"], torch.float32, (groups,))
        check_finite(parts["nested_absmax"], scales)
        offset = check_finite(parts["absmax"], torch.tensor(float(state["nested_offset"])))
        if fits:
            return NF4(codes.view(n, k // 2), absmax_codes, scales, offset)
        nested_map = read_part(folder, parts["nested_quant_map"], torch.float32, (256,))
        by_block = scales.repeat_interleave(state["nested_blocksize"])[:num_blocks]
        absmax = nested_map[absmax_codes.int()] * by_block + offset
    values = read_part(folder, parts["quant_map"], torch.float32, (16,))
    check_finite(parts["quant_map"], values)
    flat = values[torch.stack((codes >> 4, codes & 15), dim=-1).flatten().int()]
    return (flat * absmax.repeat_interleave(block)[: n * k]).view(n, k)


def _bytes(folder: TensorFolder, name: str, num_bytes: int) -> Tensor:
    """Return the codes, whatever dtype they are stored as (bnb_4bit_quant_storage)."""
    if name not in folder.shapes:
        raise LayoutError(f"has no tensor {name}")
    dtype = folder.dtypes[name]
    return read_part(folder, name, dtype, (num_bytes // dtype.itemsize, 1)).view(torch.uint8).flatten()


def _eight_bit(folder: TensorFolder, module: str) -> StoredWeight:
    name, scale = f"{module}.weight", f"{module}.SCB"
    shape = folder.shapes.get(name, ())
    if len(shape) != 2:
        raise LayoutError(f"{name} is {list(shape)}, must have two dimensions")
    read = partial(_read_eight_bit, folder, module, shape)
    return StoredWeight((shape[0], shape[1]), "INT8 per channel", INT8.name, (name, scale), read)


def _read_eight_bit(folder: TensorFolder, module: str, shape: tuple[int, int]) -> INT8:
    layout = f"{module}.weight_format"
    if layout in folder.shapes and folder.read(layout).any():
        raise LayoutError(f"{layout} must be 0: rows one after the other")
    codes = read_part(folder, f"{module}.weight", torch.int8, shape)
    largest = read_part(folder, f"{module}.SCB", torch.float32, shape[:1])
    check_finite(f"{module}.SCB", largest)
    return INT8(codes, largest / torch.full_like(largest, 127.0))
