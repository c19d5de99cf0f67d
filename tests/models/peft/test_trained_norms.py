"""adapter.train_norms: the norms of every layer learn beside LoRA, and go wherever the adapter goes."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_run
from export.test_export import exported, run_of, theirs
from export.test_export import logits_of as exported_logits
from learner.samples import random_groups
from learner.saver import save as save_checkpoint
from learner.tiny import ADAPTER, VOCAB, run_config, tiny_decoder
from models.family_rows import load, oracle, save
from models.test_sampler_copy import TOKENS_T
from models.tiny import logits_of, tiny
from peft_adapters import write_learned
from qerl.aqn.norm_noise import noised
from qerl.cli.export import usage_lines
from qerl.config import AdapterConfig, ModelConfig, RunConfig
from qerl.config.options import ExportOptions
from qerl.errors import UserError
from qerl.kernels.pointwise import matmul_fp32
from qerl.learner import Learner
from qerl.learner.checkpoint import load_latest
from qerl.models.peft.adapter import (
    OtherAdapter,
    adapter_off,
    adapter_tensors,
    add_adapter,
    load_adapter,
    publish,
)
from qerl.models.peft.peft_reader import adapter_config, read_adapter
from qerl.models.sampler_copy import make_sampler_copy
from qerl.models.trained_weight import layer_norms
from qerl.serve.adapters import ServedAdapters
from qerl.tracking.json_lines import read_lines
from qerl.training.policy import check_backend
from qerl.trl.lora import adapter_config as of_lora_config

NORMS = AdapterConfig(rank=4, alpha=8.0, train_norms=True)
BOTH = ["input_layernorm", "post_attention_layernorm"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def learner_of(adapter=NORMS, **learn):
    config = replace(run_config(learn=learn), adapter=adapter)
    return Learner(tiny_decoder(adapter=adapter), config)


def groups_of(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


def norms_of(decoder):
    return {name: norm.weight.clone() for name, norm, _ in layer_norms(decoder)}


def moved(family="Qwen2", *, seed=1, adapter=NORMS):
    decoder = tiny(family)
    add_adapter(decoder, adapter, seed=0)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.add_(torch.randn(master.shape, generator=rng) * 0.1)
    publish(decoder)
    return decoder


def test_both_norms_of_every_layer_learn_and_their_shift_is_a_metric(rng):
    groups, learner, frozen = groups_of(rng), learner_of(), learner_of(ADAPTER)
    before, others = norms_of(learner.decoder), norms_of(frozen.decoder)
    metrics = learner.step(groups)
    after = norms_of(learner.decoder)
    assert set(after) == {f"layers.{i}.{name}" for i in (0, 1) for name in BOTH}
    assert all((after[name] != before[name]).all() for name in after)
    moved = torch.cat([after[name] - before[name] for name in after]).norm()
    assert metrics["norms_shift"] == pytest.approx((moved / torch.cat([*before.values()]).norm()).item())
    assert "norms_shift" not in frozen.step(groups)
    assert all(torch.equal(norm, others[name]) for name, norm in norms_of(frozen.decoder).items())


def test_the_last_norm_and_those_of_heads_stay():
    decoder = moved("Qwen3")
    masters = {name for name in adapter_tensors(decoder) if "norm" in name}
    assert masters == {f"base_model.model.model.layers.{i}.{name}.weight" for i in range(3) for name in BOTH}


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("family", ("Qwen2", "Gemma2"))
def test_a_new_one_changes_no_bit_and_off_is_the_model_as_it_was(compute, family, tmp_path):
    base = save(oracle(family), tmp_path)
    decoder, before = load(base), logits_of(load(base), TOKENS_T)
    add_adapter(decoder, NORMS, seed=0)
    publish(decoder)
    assert torch.equal(logits_of(decoder, TOKENS_T), before)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            master.add_(0.2 * ("norm" in name))
    publish(decoder)
    learned = logits_of(decoder, TOKENS_T)
    assert (learned - before).abs().max() > 0.1
    with adapter_off(decoder):
        assert torch.equal(logits_of(decoder, TOKENS_T), before)
    assert torch.equal(logits_of(decoder, TOKENS_T), learned)


def test_noise_is_added_to_the_trained_weight_and_relative_noise_has_its_size():
    decoder, plain = moved(), moved()
    for _, norm, _ in layer_norms(plain):
        norm.weight.mul_(3)
    sizes = []
    for each in (decoder, plain):
        with noised(each.noise_table, sigma=0.1, unit="relative", seed=0, step=0):
            sizes.append([norm.noise.clone() for norm in each.noise_table.norms])
    for one, three in zip(*sizes, strict=True):
        torch.testing.assert_close(three, 3 * one)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=0):
        noisy = logits_of(decoder, TOKENS_T)
        for norm in decoder.noise_table.norms:
            norm.weight.add_(norm.noise)
    torch.testing.assert_close(noisy, logits_of(decoder, TOKENS_T))


@pytest.mark.parametrize("recompute", ["layer", "offload"])
@pytest.mark.parametrize("chunk_rows", [8, 10_000])
def test_recomputed_layers_and_mlps_in_chunks_learn_the_same(recompute, chunk_rows, rng, monkeypatch):
    groups, states = groups_of(rng), []
    for mode, rows in (("none", 10_000), (recompute, chunk_rows)):
        monkeypatch.setattr(matmul_fp32, "CHUNK_ROWS", rows)
        learner = learner_of(gradient_checkpointing=mode, max_tokens_per_microbatch=60)
        learner.step(groups)
        states.append(learner.adapter_state() | learner.optimizer_state())
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)


def test_norms_have_no_weight_decay_and_matrices_have(rng):
    groups = groups_of(rng)
    plain, decayed = learner_of(), learner_of(weight_decay=0.5)
    for learner in (plain, decayed):
        learner.step(groups)
    for name, master in plain.adapter_state().items():
        assert torch.equal(master, decayed.adapter_state()[name]) == ("norm" in name)


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path, rng):
    steps = [groups_of(rng) for _ in range(3)]
    through, before, after = (learner_of() for _ in range(3))
    want = [through.step(groups) for groups in steps]
    before.step(steps[0])
    path = save_checkpoint(tmp_path, before, next_step=1, keep=1)
    assert json.loads((path / "adapter_config.json").read_text())["modules_to_save"] == BOTH
    assert load_latest(tmp_path, after)
    assert [after.step(groups) for groups in steps[1:]] == want[1:]
    states = [x.adapter_state() | x.optimizer_state() for x in (after, through)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


@pytest.mark.parametrize("trains", [True, False])
def test_a_teacher_that_is_an_adapter_has_its_own_norms_or_the_models(trains):
    student = moved()
    settings = replace(NORMS, train_norms=trains)
    teacher = moved(seed=5, adapter=settings)
    own, want = logits_of(student, TOKENS_T), logits_of(teacher, TOKENS_T)
    with OtherAdapter(student, settings, adapter_tensors(teacher)).active():
        torch.testing.assert_close(logits_of(student, TOKENS_T), want)
    assert torch.equal(logits_of(student, TOKENS_T), own)


def test_a_sampler_in_another_format_reads_the_trained_norms():
    decoder = moved()
    twin = make_sampler_copy(decoder, "int8")
    before = logits_of(twin, TOKENS_T)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            master.add_(0.2 * ("norm" in name))
    publish(decoder)
    assert (logits_of(twin, TOKENS_T) - before).abs().max() > 0.1


@pytest.mark.parametrize("family", ("Llama", "Gemma2"))
def test_norms_that_peft_trained_have_its_logits_here(family, tmp_path):
    base = save(oracle(family), tmp_path / "base")
    norms = list(load(base).architecture.norms.names)
    model = write_learned(base, tmp_path / "adapter", seed=3, scale=0.2, r=4, modules_to_save=norms)
    config = adapter_config(str(tmp_path / "adapter"))
    decoder = load(base)
    add_adapter(decoder, config, seed=0)
    load_adapter(decoder, read_adapter(str(tmp_path / "adapter"), config))
    with torch.no_grad():
        theirs_TV = model(TOKENS_T[None]).logits[0]
    assert config.train_norms
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs_TV, rtol=1e-4, atol=1e-4)
    with adapter_off(decoder):
        assert (logits_of(decoder, TOKENS_T) - theirs_TV).abs().max() > 0.1


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["norm"], "modules_to_save: the file has model.norm"),
        (BOTH[:1], r"lacks tensor base_model.model.model.layers.0.post_attention_layernorm"),
    ],
)
def test_other_modules_of_peft_are_refused_by_name(modules, message, tmp_path):
    base = save(oracle("Llama", tie_word_embeddings=False), tmp_path / "base")
    write_learned(base, tmp_path / "adapter", seed=3, scale=0.2, r=4, modules_to_save=modules)
    with pytest.raises(UserError, match=message):
        config = adapter_config(str(tmp_path / "adapter"))
        decoder = load(base)
        add_adapter(decoder, config, seed=0)
        load_adapter(decoder, read_adapter(str(tmp_path / "adapter"), config))


@pytest.mark.parametrize(
    ("modules", "said"),
    [(BOTH, None), (BOTH[:1], "lacks post_attention_layernorm"), (["score", *BOTH], "has 'score'")],
)
def test_a_lora_config_of_trl_takes_all_norms_or_refuses_by_name(modules, said, tmp_path):
    model = ModelConfig(path=str(save(oracle("Llama"), tmp_path)))
    given = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=modules)
    if said is None:
        assert of_lora_config(given, AdapterConfig(), model).train_norms
        return
    with pytest.raises(UserError, match=rf"^peft_config\.modules_to_save {said}"):
        of_lora_config(given, AdapterConfig(), model)


def test_an_adapter_with_norms_does_not_continue_without_them(tmp_path):
    base = save(oracle("Llama"), tmp_path / "base")
    write_learned(base, tmp_path / "adapter", seed=3, scale=0.2, r=4, modules_to_save=BOTH)
    config = adapter_config(str(tmp_path / "adapter"))
    with pytest.raises(UserError, match=r"has trained norms, adapter\.train_norms is False"):
        read_adapter(str(tmp_path / "adapter"), replace(config, train_norms=False))


def test_a_run_samples_with_what_its_norms_learned(tmp_path):
    files, out = tiny_run.write_files(tmp_path / "files"), tmp_path / "run"
    more = "--noise.schedule", "none", "--adapter.train-norms", "--learn.learning-rate", "0.05"
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *tiny_run.options(files, out), *more)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    lines = list(read_lines(out / "metrics.jsonl"))
    shifts = [line["norms_shift"] for line in lines]
    assert len(lines) == 6 and shifts[0] > 0.01 and shifts[-1] > shifts[0]
    assert all(line["mismatch_abs"] < 1e-4 for line in lines)


def test_an_exported_model_has_the_trained_norms_and_vllm_is_told_to_take_it(tmp_path, capsys):
    run, config, decoder = run_of(tmp_path, "qwen2", adapter=NORMS)
    merged = exported(tmp_path, config, "merged", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(theirs(model), exported_logits(decoder), rtol=1e-4, atol=1e-4)
    out = exported(tmp_path, config, "peft")
    assert "vllm serve" not in (out / "README.md").read_text()
    lines = usage_lines(ExportOptions(run=run, out=out, form="peft"), "base")
    assert any("vLLM   vLLM has no modules_to_save" in line for line in lines)


def test_where_norms_cannot_be_trained_they_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"adapter\.train_norms needs adapter\.kind lora, got full"):
        AdapterConfig(kind="full", train_norms=True)
    base = save(oracle("Llama"), tmp_path / "base")
    write_learned(base, tmp_path / "adapter", seed=3, scale=0.2, r=4, modules_to_save=BOTH)
    served = ServedAdapters(load(base), tmp_path, 2)
    with pytest.raises(UserError, match="modules_to_save: they cannot be loaded by request"):
        served.load("one", "adapter")
    config = RunConfig(adapter=NORMS, model=ModelConfig(path=str(base), backend="transformers"))
    with pytest.raises(UserError, match=r"adapter\.train_norms needs the package's own decoder"):
        check_backend(config)
