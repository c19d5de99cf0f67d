"""The packages whose checkpoints we read and write, called the way their own compressors call them."""

import bitsandbytes.functional
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.nvfp4 import quantize_and_pack_fp4
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam


def compressed_nvfp4(weight_NK):
    """weight_packed, weight_scale, weight_global_scale of `nvfp4-pack-quantized`."""
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        symmetric=True,
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    global_scale = generate_gparam(weight_NK.amin(), weight_NK.amax())
    blocks = weight_NK.unflatten(1, (-1, 16))
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale)
    codes = quantize_and_pack_fp4(weight_NK, scales, global_scale=global_scale, group_size=16)
    return codes, scales.to(torch.float8_e4m3fn), global_scale


def compressed_mxfp4(weight_NK):
    """weight_packed, weight_scale of `mxfp4-pack-quantized`."""
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="group",
        symmetric=True,
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    )
    blocks = weight_NK.unflatten(1, (-1, 32))
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return quantize_and_pack_fp4(weight_NK, scales, group_size=32), compress_mx_scale(scales, torch.uint8)


def bitsandbytes_nf4(weight_NK):
    """The four tensors that QLoRA keeps, and what they decode to."""
    codes, state = bitsandbytes.functional.quantize_4bit(
        weight_NK, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    decoded = bitsandbytes.functional.dequantize_4bit(codes, state)
    return codes.view(len(weight_NK), -1), state.absmax.flatten(), state.state2.absmax, state.offset, decoded
