"""Train tiny random models of many of transformers' classes as a user would, and print what happens to each:

    PYTHONPATH=src:tests python -m models.many_classes [NAME ...]

Each line has the class, whose code ran it (or its one-line refusal), and the largest difference of a token's
logprob between sampler and learner in a run of 6 steps without noise.
"""

import contextlib
import copy
import io
import json
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import tiny_run
from models.any_family import DELTA, IMAGES, ROPE, ROWS, SHAPE, TOWER
from qerl.cli.main import command
from qerl.config import ModelConfig
from qerl.errors import RunError, UserError
from qerl.models.transformers_backend.backend import backend_of

_MOST_PARAMETERS = 50_000_000
EXPERTS = {name: DELTA[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
EXPERTS |= {"num_local_experts": 4}
HEADS = {"head_dim": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
STATES = {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
CONVOLUTIONS = ROWS["Lfm2"]
ALTERNATING = {"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "mamba_num_heads": 8}
ALTERNATING |= {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "head_dim": 16}
PARTS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
}
PARTS |= {"vocab_size_per_layer_input": 272, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}
PARTS |= {"intermediate_size": [96] * 4, "layer_types": WINDOWS["layer_types"] * 2, "head_dim": 16}
SHARED = {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1}
SHARED |= {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "adapter_rank": 8}
CLASSES: dict[str, dict] = {
    **{name: {} for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Granite", "Olmo2", "SmolLM3")},
    **dict.fromkeys(("Gemma2", "Gemma3Text", "Glm4", "Ministral", "Ministral3"), HEADS),
    **dict.fromkeys(("Qwen3Moe", "Olmoe", "GraniteMoe", "Mixtral", "Phimoe", "FlexOlmo", "Afmoe"), EXPERTS),
    **{name: {} for name in ("Phi", "OPT", "Falcon", "StableLm", "Starcoder2", "Olmo", "Cohere", "Cohere2")},
    **{
        name: {}
        for name in ("GPTNeoX", "Apertus", "Arcee", "BitNet", "DiffLlama", "Doge", "Ernie4_5", "Jais2")
    },
    **{name: {} for name in ("Moshi", "Nemotron", "Persimmon")},
    **dict.fromkeys(("Gemma", "Glm", "Helium", "HunYuanDenseV1", "SeedOss", "VaultGemma"), HEADS),
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "Dots1"), LATENT),
    **dict.fromkeys(("GPT2", "GPTBigCode"), GPT),
    **{name: GPT | {"rotary_dim": 8} for name in ("GPTJ", "CodeGen")},
    **{name: ROWS[name] for name in ("Exaone4", "Gemma4Text", "Jamba", "Lfm2", "MiniMax", "Qwen3Next")},
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA,
    "GptOss": EXPERTS | HEADS,
    "Olmo3": WINDOWS,
    "RecurrentGemma": ROWS["RecurrentGemma"],
    "Gemma3nText": PARTS,
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "GraniteMoeShared": EXPERTS | {"shared_intermediate_size": 32},
    "GraniteMoeHybrid": EXPERTS
    | MAMBA
    | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "Glm4Moe": LATENT | HEADS,
    "GlmMoeDsa": LATENT,
    "MiniMaxM2": EXPERTS | HEADS,
    "Lfm2Moe": EXPERTS | CONVOLUTIONS,
    "Ernie4_5_Moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "JetMoe": EXPERTS | {"kv_channels": 16},
    "Llama4Text": EXPERTS | HEADS | {"intermediate_size_mlp": 96},
    "GPTNeo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "XGLM": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8},
    "Mamba2": STATES,
    "FalconH1": MAMBA | HEADS | {"mamba_d_ssm": 128},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "NemotronH": ALTERNATING,
    "Zamba2": SHARED,
    "Rwkv": {"attention_hidden_size": 64},
    "xLSTM": {"embedding_dim": 64, "num_heads": 4, "num_blocks": 2},
}
_CLIP = {"model_type": "clip_vision_model"}
_MROPE = {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
OF_IMAGES: dict[str, tuple[dict, dict]] = {  # settings of the language part, and of the other
    **{name: (settings, {}) for name, settings in IMAGES.items() if name != "PaliGemma"},
    "Qwen2VL": (_MROPE, {"hidden_size": 64, "embed_dim": 32}),
    "Qwen3VL": (_MROPE | HEADS, {}),
    "Qwen3VLMoe": (_MROPE | HEADS | EXPERTS, {}),
    "Glm4v": (_MROPE, {}),
    "Llava": ({"model_type": "llama"}, _CLIP),
    "LlavaNext": ({"model_type": "llama"}, _CLIP),
    "Idefics3": ({"model_type": "llama"}, {}),
    "SmolVLM": ({"model_type": "llama"}, {}),
    "InternVL": ({"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}),
    "Mllama": (
        {"cross_attention_layers": [1]},
        {
            "attention_heads": 2,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "num_global_layers": 1,
        },
    ),
    "Llama4": (
        EXPERTS | HEADS | {"intermediate_size_mlp": 96},
        {"vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "PaliGemma": (IMAGES["PaliGemma"], {"model_type": "siglip_vision_model"}),
}


def model_of(name: str):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    if name not in OF_IMAGES:
        return AutoModelForCausalLM.from_config(kind(**copy.deepcopy(SHAPE | CLASSES[name])))
    text, other = copy.deepcopy(OF_IMAGES[name])
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    config = kind(text_config=SHAPE | text, vision_config=TOWER | other, image_token_index=5, **ids)
    return AutoModelForImageTextToText.from_config(config)


def tried(name: str, folder: Path) -> str:
    """Return what happens to a run with a model of this class."""
    model = model_of(name)
    assert sum(p.numel() for p in model.parameters()) < _MOST_PARAMETERS
    tiny_run.write_files(folder)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).unlink(missing_ok=True)
    model.save_pretrained(folder)
    kept = io.StringIO()
    try:
        with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept):
            command(
                ["train", "demo_long", *tiny_run.options(folder, folder / "run"), "--noise.schedule", "none"]
            )
            backend = backend_of(ModelConfig(path=str(folder)))
    except (UserError, RunError) as error:
        return f"{type(model).__name__}: refused: {error}"
    except BaseException:
        return f"{type(model).__name__}: TRACEBACK\n{traceback.format_exc()}"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    worst = max(row["mismatch_max"] for row in rows)
    return f"{type(model).__name__}: {backend}, mismatch_max {worst:.1e}"


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*CLASSES, *OF_IMAGES]:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(tried(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
