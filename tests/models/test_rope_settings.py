"""Every form of rope_parameters and rope_scaling has transformers' logits at three times the original length,
or is refused in one line."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.family_rows import load, oracle, save
from models.tiny import logits_of
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of

ORIGINAL, LONGEST = 64, 192
TOKENS_T = torch.randint(3, 60, (LONGEST,), generator=torch.Generator().manual_seed(0))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": ORIGINAL, **LLAMA3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LINEAR = {"rope_type": "linear", "factor": 4.0}
NEW = {"rope_type": "default", "rope_theta": 500.0}


def both(settings, **outside):
    return {"rope_parameters": NEW, "rope_scaling": settings, **outside}


FLAT = {
    "rope_parameters": {"rope_parameters": LINEAR | {"rope_theta": 300.0}},
    "theta outside": {"rope_parameters": LINEAR, "rope_theta": 300.0},
    "theta inside and outside": {"rope_parameters": NEW, "rope_theta": 300.0},
    "theta alone": {"rope_parameters": None, "rope_theta": 300.0},
    "nothing": {"rope_parameters": None},
    "rope_scaling": {"rope_parameters": None, "rope_scaling": LINEAR, "rope_theta": 300.0},
    "theta in rope_scaling": {"rope_parameters": None, "rope_scaling": LINEAR | {"rope_theta": 300.0}},
    "type": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "type and rope_type": {"rope_parameters": None, "rope_scaling": LINEAR | {"type": "yarn"}},
    "both": both(LINEAR),
    "both, theta outside": both(LINEAR, rope_theta=300.0),
    "both, type": both({"type": "linear", "factor": 4.0}),
    "both, llama3": both(LLAMA3),
    "both, yarn": both(YARN, rope_theta=300.0),
    "both, rope_scaling null": both(None),
    "both, rope_scaling empty": both({}),
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}},
    "llama3 without an original length": {
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": LONGEST}
    },
    "yarn": {"rope_parameters": YARN | {"rope_theta": 300.0}},
    "yarn, attention_factor": {"rope_parameters": YARN | {"attention_factor": 0.7}},
    "yarn, attention_factor null": {"rope_parameters": YARN | {"attention_factor": None}},
    "yarn, attention_factor 0": {"rope_parameters": YARN | {"attention_factor": 0.0}},
    "yarn, mscale": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn, one mscale": {"rope_parameters": YARN | {"mscale": 0.7}},
    "yarn, mscale 0": {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 0.5}},
    "yarn, both mscales equal": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, betas": {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    "yarn, betas null": {"rope_parameters": YARN | {"beta_fast": None, "beta_slow": None}},
    "yarn, factor null": {"rope_parameters": YARN | {"factor": None}},
    "yarn, original length outside": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn, two original lengths": {"rope_parameters": YARN, "original_max_position_embeddings": 32},
    "yarn, no original length": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "yarn without a factor": {"rope_parameters": {k: v for k, v in YARN.items() if k != "factor"}},
    "llama3 without its limits": {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
    "linear without a factor": {"rope_parameters": {"rope_type": "linear"}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}},
    "dynamic without a factor": {"rope_parameters": {"rope_type": "dynamic"}},
    "longrope": {
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    },
    "mrope": {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "an unknown type": {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
    "a part of each head": {"rope_parameters": NEW | {"partial_rotary_factor": 0.5}},
    "kinds of layers": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEW}},
    "kinds of layers in rope_scaling": both({"full_attention": LINEAR, "sliding_attention": NEW}),
}
COMPUTED = {
    name for name in FLAT if name.split(",")[0] in ("both", "yarn", "llama3", "dynamic", "type", "nothing")
}
COMPUTED |= {"rope_parameters", "rope_scaling", "theta alone", "type and rope_type", "theta in rope_scaling"}
COMPUTED -= {"yarn, attention_factor 0"}
KINDS = {
    "kinds": {
        "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 300.0}, "sliding_attention": NEW}
    },
    "kinds of yarn": {
        "rope_parameters": {"full_attention": YARN | {"rope_theta": 300.0}, "sliding_attention": NEW}
    },
    "kinds, not truncated": {
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 300.0, "truncate": False},
            "sliding_attention": NEW,
        }
    },
    "kinds, original length outside": {
        "rope_parameters": {"full_attention": YARN | {"rope_theta": 300.0}, "sliding_attention": NEW},
        "original_max_position_embeddings": 32,
    },
    "kinds without theta": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}},
    "kinds, theta outside": {
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
        "rope_theta": 300.0,
    },
    "one kind": {"rope_parameters": {"full_attention": LINEAR}},
    "the other kind": {"rope_parameters": {"sliding_attention": NEW}},
    "old": {
        "rope_parameters": None,
        "rope_scaling": LINEAR,
        "rope_theta": 300.0,
        "rope_local_base_freq": 50.0,
    },
    "old, type": {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "old, theta alone": {"rope_parameters": None, "rope_theta": 300.0, "rope_local_base_freq": 50.0},
    "flat": {"rope_parameters": LINEAR | {"rope_theta": 300.0}},
    "kinds and rope_scaling": {
        "rope_parameters": {"full_attention": NEW, "sliding_attention": NEW | {"rope_theta": 50.0}},
        "rope_scaling": LINEAR,
    },
    "kinds and rope_scaling's type": {
        "rope_parameters": {"full_attention": NEW, "sliding_attention": NEW},
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "kinds in rope_scaling": {"rope_parameters": None, "rope_scaling": {"full_attention": LINEAR}},
    "nothing": {"rope_parameters": None},
}
CASES = [
    *(("Llama", name, entries) for name, entries in FLAT.items()),
    *(("Qwen3", name, entries) for name, entries in FLAT.items()),
    *((family, name, entries) for family in ("Gemma3", "Olmo3") for name, entries in KINDS.items()),
    *(("Gemma4", name, entries) for name, entries in KINDS.items()),
    *(("SmolLM3", name, FLAT[name]) for name in ("both", "both, yarn", "theta alone", "rope_scaling")),
    *(("GptOss", name, FLAT[name]) for name in ("both", "both, yarn", "theta alone", "nothing")),
    *(("Ministral3", name, FLAT[name]) for name in ("both, yarn", "yarn", "nothing")),
    *(("Glm4", name, FLAT[name]) for name in ("both", "rope_scaling", "a part of each head")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of models by family, and their configs; made once each."""
    made = {}

    def of(family):
        if family not in made:
            folder = save(oracle(family), tmp_path_factory.mktemp(family))
            made[family] = folder, json.loads((folder / "config.json").read_text())
        return made[family]

    return of


def transformers_logits(folder):
    """Return None if transformers cannot read the config or run the model."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        return model(TOKENS_T[None]).logits[0]
    except Exception:  # of many types: KeyError, ValueError, validation errors
        return None


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "name", "entries"), CASES, ids=[f"{f}: {n}" for f, n, _ in CASES])
def test_the_logits_are_those_of_transformers_or_the_config_is_refused(folders, family, name, entries):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder, config = folders(family)
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST} | entries))
    try:
        decoder = load(folder)
    except UserError as error:
        assert "\n" not in str(error)
        assert family not in ("Llama", "Qwen3") or name not in COMPUTED, error
        return
    theirs_TV = transformers_logits(folder)
    assert theirs_TV is not None, "transformers refuses this config"
    assert (logits_of(decoder, TOKENS_T) - theirs_TV).abs().max() < 2e-4


def test_dynamic_is_plain_up_to_the_longest_sequence(folders):
    folder, config = folders("Llama")
    dynamic = config | FLAT["dynamic"] | {"max_position_embeddings": ORIGINAL}
    (folder / "config.json").write_text(json.dumps(dynamic))
    assert architecture_of(locate(str(folder)).open()).max_positions == ORIGINAL
