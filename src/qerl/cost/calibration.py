"""The bytes of `model.calibrate gptq` on a GPU: both models, and what the widest linear needs.

    models    BF16 and quantized linears; embedding and head twice, of the model that samples and of the other
    row       a 16-bit number of each token
    inputs    two of the widest linear, of the float model and the quantized one, and six hidden states
    work      five float64 [K, K] of the inputs' products, or three results of the layer as wide as the inputs

The last two counts were fitted to peaks of a 7B, a 1.5B and a 0.5B (benchmarks/results/calibration).
"""

from qerl.cost.weights import embedding_bytes, weight_bytes
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import counted_specs
from qerl.models.quantize.calibration import planned_tokens

_BF16 = 2


def calibration_bytes(a: Architecture, format: str, gpu_bytes: float) -> float:
    """Return the peak on a GPU with this memory, without CUDA's own."""
    widest = max(linear.in_width for spec, _ in counted_specs(a) for linear in spec.linears)
    row = _BF16 * planned_tokens(a, gpu_bytes)
    models = weight_bytes(a, "bf16") + weight_bytes(a, format) + 2 * embedding_bytes(a, element_bytes=_BF16)
    return models + row * (2 * widest + 6 * a.width) + max(5 * 8 * widest**2, 3 * row * widest)
