"""A decoder of two narrow layers with random weights and an adapter, for every test of the learner."""

from dataclasses import replace

import torch

from qerl.config import AdapterConfig, RunConfig
from qerl.formats import BF16
from qerl.learner import Learner
from qerl.models.architecture import Architecture, Rope
from qerl.models.decoder import Decoder
from qerl.models.peft.adapter import adapter_tensors, add_adapter, publish

VOCAB = 48
ADAPTER = AdapterConfig(rank=4, alpha=8.0)


def tiny_decoder(*, compute=torch.float32, device="cpu", adapter=ADAPTER, fresh=False) -> Decoder:
    """The same weights at each call. `fresh` leaves B at zero; else the adapter is as after some learning."""
    architecture = Architecture(
        family="LlamaForCausalLM",
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        ff_width=48,
        vocab_size=VOCAB,
        norm_eps=1e-5,
        rope=Rope(kind="default", theta=10_000.0),
        max_positions=64,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=False,
    )
    rng = torch.Generator().manual_seed(7)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=rng).mul_(scale).to(device)

    decoder = Decoder(architecture, compute=compute, device=torch.device(device))
    for _, linear in decoder.linears():
        linear.load_weight(
            BF16.encode(normal(linear.out_width, linear.in_width, scale=linear.in_width**-0.5))
        )
    for table, scale in ((decoder.embed_tokens, 0.5), (decoder.lm_head, 0.2)):
        table.weight.copy_(normal(*table.weight.shape, scale=scale))
    for name, norm in decoder.named_buffers():
        if "norm" in name and name.endswith("weight"):
            norm.copy_(1 + normal(*norm.shape, scale=0.1))
    add_adapter(decoder, adapter, seed=3)
    if not fresh:
        for name, master in adapter_tensors(decoder).items():
            if "lora_B" in name:
                master.data.copy_(normal(*master.shape, scale=0.1))
        publish(decoder)
    return decoder


def run_config(algo=None, learn=None, **settings) -> RunConfig:
    """A run of 10 steps over 4 prompts of 3 samples; `algo` and `learn` replace single fields."""
    base = RunConfig(num_steps=10, num_prompts=4, num_generations=3, adapter=ADAPTER)
    return replace(
        base,
        algo=replace(base.algo, **(algo or {})),
        learn=replace(base.learn, **({"learning_rate": 1e-2, "warmup_ratio": 0.0} | (learn or {}))),
        sample=replace(base.sample, max_tokens=8),
        **settings,
    )


def tiny_learner(algo=None, learn=None, **settings) -> Learner:
    return Learner(tiny_decoder(), run_config(algo, learn, **settings))
