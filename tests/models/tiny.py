"""Tiny random models of each family, in transformers and in ours, with the same weights.

Matrices hold numbers that bf16 has exactly, so the BF16 format loses nothing and float32 results must agree.
"""

import torch
import transformers
from torch import Tensor

from qerl.formats import BF16
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import TreeLayout, tree_attention
from qerl.models.decoder import Decoder
from qerl.models.delta_net import recur_over
from qerl.models.families import from_hf_config
from qerl.types import Tree

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
}


def oracle(family="Llama", *, seed=0, **settings):
    """transformers' model, eager attention, float32, with biases and norm weights that are not trivial."""
    config = getattr(transformers, f"{family}Config")(**(SHAPE | settings), attn_implementation="eager")
    config.architectures = [f"{family}ForCausalLM"]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = 0.6 if p.dim() == 2 and "embed" not in name else 0.5
        p.copy_(torch.randn(p.shape, generator=rng) * spread / (p.shape[-1] ** 0.5 if p.dim() == 2 else 1))
        if p.dim() == 1 and "norm" in name:
            p.add_(1.0)
        if "embed_tokens" in name or "lm_head" in name:
            p.mul_(4)
        p.copy_(p.bfloat16())
    return model


def ported(model, *, compute=torch.float32, weight_format=BF16) -> Decoder:
    """Our decoder with the weights of transformers' model."""
    config = model.config.to_dict()
    decoder = Decoder(from_hf_config(config), compute=compute, device=torch.device("cpu"))
    tensors = model.state_dict()
    linears = dict(decoder.linears())
    for name, linear in linears.items():
        linear.load_weight(weight_format.encode(tensors[f"model.{name}.weight"]))
    for name, buffer in decoder.named_buffers():
        if not name.endswith("noise"):
            full = name if name.startswith("lm_head") else f"model.{name}"
            buffer.copy_(tensors[full])
    return decoder


def tiny(family="Llama", *, compute=torch.float32, **settings) -> Decoder:
    return ported(oracle(family, **settings), compute=compute)


def forest(*shapes: tuple[int, tuple[int, ...]]) -> list[Tree]:
    """Trees of (prompt tokens, branch tokens), one after the other."""
    trees: list[Tree] = []
    for prompt_tokens, branch_tokens in shapes:
        start = trees[-1].start + trees[-1].num_tokens if trees else 0
        trees.append(Tree(start=start, prompt_tokens=prompt_tokens, branch_tokens=branch_tokens))
    return trees


def packed(trees: list[Tree], device: torch.device | str = "cpu"):
    """An attend within the trees, and each row's position in its own sequence."""
    layout = TreeLayout.of(trees, device)
    positions: list[int] = []
    for tree in trees:
        positions += range(tree.prompt_tokens)
        for length in tree.branch_tokens:
            positions += range(tree.prompt_tokens, tree.prompt_tokens + length)

    def attend(
        layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions
    ) -> Tensor:
        return tree_attention(q_TNH, k_TKH, v_TKH, layout, options)

    return torch.tensor(positions, device=device), attend


def logits_of(decoder: Decoder, tokens_T: Tensor, route=None, rows_T: Tensor | None = None) -> Tensor:
    """Return the logits of one sequence; rows_T: of the decoder's tables."""
    trees = forest((len(tokens_T), ()))
    positions_T, attend = packed(trees, decoder.device)
    recur = recur_over(trees, decoder.device)
    tokens_T, how = tokens_T.to(decoder.device), {"recur": recur, "route": route, "noise_rows_T": rows_T}
    return decoder.logits(decoder(tokens_T, positions_T, attend, **how))
