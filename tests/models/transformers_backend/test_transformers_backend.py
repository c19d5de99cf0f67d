"""Models that transformers' own code runs, with our linears in them."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

import tiny_run
from models.any_family import ROWS, SHAPE, load, oracle
from models.tiny import logits_of
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig, ModelConfig, RunConfig
from qerl.engine.transformers_engine import begin
from qerl.errors import UserError
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.checkpoint.source import ModelSource
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.linear_pass import PLAIN, LinearPass
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import adapted_linears, adapter_tensors, add_adapter, dropout_of
from qerl.models.transformers_backend.backend import backend_of
from qerl.training.policy import load_sampler
from qerl.types import GenerateRequest, Prompt, Sampling

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], list(range(20, 41))]
PLACE = {"device": "cpu", "dtype": "fp32", "operand": "resident"}


@pytest.mark.parametrize("family", ROWS)
def test_logits_are_those_of_transformers(tmp_path, family):
    model = oracle(family)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 270, (2, 20), generator=torch.Generator().manual_seed(1))
    found = load(tmp_path)
    assert len(list(found.linears())) > 0
    torch.testing.assert_close(found.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_of_a_model_for_images_the_language_part_is_packed(tmp_path):
    torch.manual_seed(0)
    text = SHAPE | ROWS["Gemma4Text"]
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    model = Gemma4ForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    model.save_pretrained(tmp_path)
    assert backend_of(ModelConfig(path=str(tmp_path))) == "transformers"
    found, tokens = load(tmp_path), torch.arange(3, 23)[None]
    assert {name.split(".")[1] for name, _ in found.linears()} == {"language_model"}
    torch.testing.assert_close(found.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3_5Moe"])
def test_a_class_for_images_is_trained_on_text(tmp_path, family):
    model, tokens = oracle(family), torch.arange(9, 29)[None]
    model.save_pretrained(tmp_path)
    assert backend_of(ModelConfig(path=str(tmp_path))) == "transformers"
    found = load(tmp_path)
    assert not any("visual" in name for name, _ in found.linears())
    torch.testing.assert_close(found.model(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["MiniMax", "Jamba", "Qwen3Next", "Qwen2_5_VL", "Exaone4"])
def test_rows_that_are_copied_and_dropped_decode_as_whole_sequences(tmp_path, family):
    model, rng = oracle(family), torch.Generator().manual_seed(1)
    model.save_pretrained(tmp_path)
    prompts, more = (torch.randint(9, 270, size, generator=rng) for size in ((3, 7), (5, 4)))
    lockstep, _ = begin(load(tmp_path), prompts, num_logits=1)
    rows = [2, 0, 2, 1, 0]
    own, kept = lockstep.copy_of(rows), [0, 1, 2, 3, 4]
    for step in range(4):
        if step == 2:
            kept = [3, 0]
            own.keep(kept)
        got = own.extend(more[kept, step : step + 1])
        whole = torch.cat((prompts[[rows[i] for i in kept]], more[kept, : step + 1]), 1)
        torch.testing.assert_close(got, model(whole).logits[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "says"), [("PaliGemma", "tokens attend to later ones"), ("GPT2", "no torch.nn.Linear")]
)
def test_a_model_that_cannot_be_trained_is_refused_in_one_line(tmp_path, monkeypatch, family, says):
    monkeypatch.setitem(ROWS, "GPT2", {"n_embd": 64, "n_layer": 1, "n_head": 4})
    oracle(family).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8", "int8", "bf16"])
def test_a_format_is_read_as_our_loader_reads_it(tmp_path, format):
    """Linears that share no scale are compared; q, k and v in NVFP4 share one in our loader."""
    oracle("Llama").save_pretrained(tmp_path)
    linears = dict(load(tmp_path, format=format).linears())
    ours = build_decoder(
        ModelSource(tmp_path).open(),
        format=format,
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=True,
    )
    for name, linear in ours.linears():
        if name.endswith(("o_proj", "down_proj")):
            assert torch.equal(linear.operand(), linears[f"model.{name}"].operand())


def test_both_backends_draw_the_same_tokens_and_logprobs(tmp_path):
    """ProOf prompts of two lengths, several samples each, with truncation."""
    tiny_run.write_files(tmp_path)
    oracle("Llama").save_pretrained(tmp_path)
    tokenizer, found = load_tokenizer(str(tmp_path)), []
    prompts = [Prompt(index=i, text="", tokens_T=t, messages=None, columns={}) for i, t in enumerate(PROMPTS)]
    for backend in ("qerl", "transformers"):
        config = RunConfig(model=ModelConfig(path=str(tmp_path), backend=backend, format="bf16", **PLACE))
        _, engine = load_sampler(config, tokenizer)
        sampling = Sampling(max_tokens=9, top_k=50)
        request = GenerateRequest(prompts, num_samples=3, sampling=sampling, seed=5, step=2)
        groups = engine.generate(request)
        found.append([sample for group in groups for sample in group.samples_G])
    assert [s.tokens_T for s in found[0]] == [s.tokens_T for s in found[1]]
    logprobs = [torch.tensor([x for s in samples for x in s.logprobs_T]) for samples in found]
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-4)


def test_a_sample_does_not_depend_on_those_beside_it(tmp_path):
    tiny_run.write_files(tmp_path)
    oracle("Lfm2").save_pretrained(tmp_path)
    config = RunConfig(model=ModelConfig(path=str(tmp_path), format="bf16", **PLACE))
    _, engine = load_sampler(config, load_tokenizer(str(tmp_path)))
    prompts = [Prompt(index=i, text="", tokens_T=t, messages=None, columns={}) for i, t in enumerate(PROMPTS)]
    sampling = Sampling(max_tokens=7)
    request = GenerateRequest(prompts, num_samples=2, sampling=sampling, seed=0, step=0)
    together = engine.generate(request)
    for prompt, group in zip(prompts, together, strict=True):
        (alone,) = engine.generate(request.with_prompts([prompt]))
        assert [s.tokens_T for s in alone.samples_G] == [s.tokens_T for s in group.samples_G]


@pytest.mark.parametrize(("family", "num"), [("Exaone4", 4), ("RecurrentGemma", 6), ("GPTNeoX", 0)])
def test_noise_acts_on_rms_norms_while_it_is_on(tmp_path, family, num):
    oracle(family).save_pretrained(tmp_path)
    found = load(tmp_path)
    tokens = torch.randint(3, 270, (1, 9), generator=torch.Generator().manual_seed(1))
    before = found.model(tokens).logits
    with noised(found.noise_table, sigma=0.05, unit="absolute", seed=0, step=3) as count:
        during = found.model(tokens).logits
    assert count == num == len(found.norms)
    assert torch.equal(before, during) == (num == 0)
    assert torch.equal(before, found.model(tokens).logits)


def test_noise_is_what_our_decoder_adds_to_its_norms(tmp_path):
    oracle("Llama").save_pretrained(tmp_path)
    found, cpu = load(tmp_path), torch.device("cpu")
    ours = build_decoder(
        ModelSource(tmp_path).open(), format="bf16", compute=torch.float32, device=cpu, resident=True
    )
    tokens = torch.randint(3, 270, (9,), generator=torch.Generator().manual_seed(1))
    settings = {"sigma": 0.05, "unit": "relative", "seed": 0, "step": 3}
    with noised(found.noise_table, **settings), noised(ours.noise_table, **settings):
        theirs = found.model(tokens[None]).logits[0]
        torch.testing.assert_close(theirs, logits_of(ours, tokens), rtol=0, atol=1e-4)


def test_a_pattern_of_ranks_leaves_all_linears_their_adapter(tmp_path):
    oracle("GPTNeoX").save_pretrained(tmp_path)
    found, adapter = load(tmp_path), AdapterConfig(rank=4, rank_pattern=(("attention.dense", 2),))
    ranks = {
        name.partition("layers.")[2]: rank for name, (rank, _) in adapted_linears(found, adapter).items()
    }
    assert len(ranks) == 8 and ranks["0.attention.dense"] == 2 and ranks["1.mlp.dense_h_to_4h"] == 4


def test_gradients_reach_the_adapter_only(tmp_path):
    oracle("GPTNeoX").save_pretrained(tmp_path)
    found = load(tmp_path, format="nvfp4")
    add_adapter(found, AdapterConfig(rank=4), seed=0)
    masters = adapter_tensors(found)
    assert len(masters) == 2 * len(list(found.linears())) == 16
    assert all(name.startswith("base_model.model.gpt_neox.layers.") for name in masters)
    found.model(torch.arange(3, 12)[None]).logits.square().mean().backward()
    trained = [name for name, p in found.model.named_parameters() if p.grad is not None]
    assert trained and all(name.endswith(("lora_A", "lora_B")) for name in trained)
    assert any(master.grad.any() for master in masters.values())


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_checkpointed_layers_give_the_same_gradients(rate, tmp_path):
    """They run again in the pass in which they ran before: with its dropout, and no other pass has it."""
    oracle("Exaone4").save_pretrained(tmp_path)
    gradients, losses = [], []
    for is_checkpointed in (False, True):
        found = load(tmp_path)
        add_adapter(found, AdapterConfig(rank=4), seed=0)
        if is_checkpointed:
            found.checkpoint_layers()
        for linear_pass in (LinearPass(dropout=dropout_of(found, rate, 1)), PLAIN):
            with found.running.within(linear_pass):
                logits = found.model(torch.arange(3, 12)[None], use_cache=False).logits
            losses.append(logits.square().mean())
        losses[-2].backward()
        gradients.append([master.grad.clone() for master in adapter_tensors(found).values()])
        losses[-1].backward()
        later = [master.grad for master in adapter_tensors(found).values()]
        assert all(torch.equal(2 * a, b) for a, b in zip(gradients[-1], later, strict=True)) == (rate == 0)
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_experts_that_are_one_tensor_stay_unpacked_and_are_told(tmp_path):
    oracle("Mixtral").save_pretrained(tmp_path)
    found = load(tmp_path, format="nvfp4")
    (line,) = [line for line in found.notices if "experts" in line]
    size = sum(p.nbytes for name, p in found.model.named_parameters() if ".experts." in name)
    assert line.startswith(f"4 tensors of fused experts stay in float32 ({size / 1e6:.1f} MB)")
    assert {name.rpartition(".")[2] for name, _ in found.linears()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


def test_loading_holds_one_tensor_besides_the_packed_model(tmp_path, monkeypatch):
    """The float tensors that were read and are alive, whenever one is read."""
    oracle("Exaone4").save_pretrained(tmp_path)
    alive, most = [], 0
    read = SafetensorsFolder.read

    def counted(self, name):
        nonlocal most
        tensor = read(self, name)
        if name.endswith("_proj.weight"):
            gc.collect()
            most = max(most, 1 + sum(reference() is not None for reference in alive))
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    found = load(tmp_path, format="nvfp4")
    assert (
        len(alive) == len(list(found.linears())) == 14 and most <= 2
    )  # the one before is still in its place


def test_auto_takes_our_decoder_where_a_family_is_described(tmp_path):
    """One that a family is named for is looked at: of Qwen3-Next only dense models are described."""
    for family, backend in (("Llama", "qerl"), ("GPTNeoX", "transformers"), ("Qwen3Next", "transformers")):
        oracle(family).save_pretrained(tmp_path / family)
        assert backend_of(ModelConfig(path=str(tmp_path / family))) == backend
    (why,) = [line for line in load(tmp_path / family).notices if "our decoder" in line]
    assert why.startswith("our decoder does not run it: num_experts must be 0, got 4")
    config = json.loads((tmp_path / "Llama" / "config.json").read_text()) | {"num_hidden_layers": "two"}
    (tmp_path / "Llama" / "config.json").write_text(json.dumps(config))  # wrong, so that ours says so
    assert backend_of(ModelConfig(path=str(tmp_path / "Llama"))) == "qerl"
    config = json.loads((tmp_path / "GPTNeoX" / "config.json").read_text())
    (tmp_path / "GPTNeoX" / "config.json").write_text(
        json.dumps(config | {"architectures": ["NewForCausalLM"]})
    )
    with pytest.raises(UserError, match="has no language model NewForCausalLM: pip install -U transformers"):
        backend_of(ModelConfig(path=str(tmp_path / "GPTNeoX"), backend="transformers"))


def test_a_missing_tensor_is_named(tmp_path):
    model = oracle("GPTNeoX")
    tensors = {
        name: t
        for name, t in model.state_dict().items()
        if name != "gpt_neox.layers.1.mlp.dense_h_to_4h.bias"
    }
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has no tensor gpt_neox.layers.1.mlp.dense_h_to_4h.bias"):
        load(tmp_path)
