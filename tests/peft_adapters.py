"""Adapters that PEFT itself makes and writes."""

import peft
import torch
from transformers import AutoModelForCausalLM


def write_learned(model_path, folder, *, seed, scale, **settings):
    """Write an adapter with something learned; return PEFT's model. settings: of LoraConfig."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=rng) * scale)
            elif "modules_to_save" in name:
                value.add_(torch.randn(value.shape, generator=rng) * scale)
    model.save_pretrained(folder)
    return model
