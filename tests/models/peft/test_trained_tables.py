"""adapter.modules_to_save: the embedding and the head learn whole beside LoRA, where they are not tied."""

import dataclasses
import json
from dataclasses import replace

import peft
import pytest
import torch

from learner import plain
from learner.samples import random_groups
from learner.saver import save as save_checkpoint
from learner.tiny import ADAPTER, VOCAB, run_config, tiny_decoder
from models.family_rows import load, oracle, save
from models.test_sampler_copy import TOKENS_T
from models.tiny import logits_of
from peft_adapters import write_learned
from qerl.config import AdapterConfig, DistilConfig, ModelConfig, RayConfig, RunConfig
from qerl.cost.weights import base_bytes, num_trained_weights
from qerl.errors import UserError
from qerl.kernels.head import head_operand, logprob
from qerl.kernels.head import trained_embedding as embedding
from qerl.kernels.head.logprob import CASES, Softcap, chunked_logprob, reference
from qerl.kernels.head.token_mask import TokenMask
from qerl.learner import Learner
from qerl.learner.checkpoint import load_latest
from qerl.models.peft.adapter import adapter_off, adapter_tensors, add_adapter, load_adapter, publish
from qerl.models.peft.peft_reader import adapter_config, read_adapter
from qerl.models.trained_weight import trained_weights
from qerl.trl.lora import adapter_config as of_lora_config

TABLES = ("embed_tokens", "lm_head")
WHOLE = AdapterConfig(rank=4, alpha=8.0, modules_to_save=TABLES)
NAMES = {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def learner_of(adapter=WHOLE, **learn):
    config = replace(run_config(learn=learn), adapter=adapter)
    return Learner(tiny_decoder(adapter=adapter), config)


def groups_of(rng):
    return random_groups(4, 3, vocab=VOCAB, rng=rng)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(oracle("Llama", tie_word_embeddings=False), tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("softcap", [None, Softcap(cap=2.0, scale=0.7)])
@pytest.mark.parametrize(("rows", "width", "vocab", "chunk"), CASES)
def test_the_heads_gradient_is_the_definitions(rows, width, vocab, chunk, softcap, rng):
    hidden = torch.randn(rows, width, generator=rng, requires_grad=True)
    head = torch.randn(vocab, width, generator=rng).mul_(0.3)
    targets, grads = torch.randint(vocab, (rows,), generator=rng), torch.randn(rows, generator=rng)
    master, head64 = head.clone().requires_grad_(), head.double().requires_grad_()
    options = {"temperature": 0.7, "softcap": softcap}
    ours, _ = chunked_logprob(hidden, head, targets, chunk_tokens=chunk, master_VD=master, **options)
    theirs, _ = reference(hidden.detach(), head64, targets, **options)
    dhidden, dhead = torch.autograd.grad(ours, [hidden, master], grads)
    (expected,) = torch.autograd.grad(theirs, head64, grads.double())
    assert dhead.dtype == torch.float32
    torch.testing.assert_close(dhead.double(), expected, rtol=1e-4, atol=1e-5)
    frozen, _ = chunked_logprob(hidden, head, targets, chunk_tokens=chunk, **options)
    assert torch.equal(frozen, ours) and torch.equal(dhidden, *torch.autograd.grad(frozen, hidden, grads))


def test_the_heads_gradient_of_a_large_vocabulary_and_of_masked_rows_is_the_definitions(rng, monkeypatch):
    """Slices of the vocabulary forwards, fewer rows at a time backwards."""
    monkeypatch.setattr(head_operand, "MAX_COLUMNS", 128)
    monkeypatch.setattr(logprob, "MAX_COLUMNS", 128)
    hidden, head = (torch.randn(*shape, generator=rng) for shape in ((9, 16), (300, 16)))
    targets, grads = torch.randint(300, (9,), generator=rng), torch.randn(9, generator=rng)
    allowed = torch.ones(9, 300, dtype=torch.bool)
    allowed[4] = torch.rand(300, generator=rng) < 0.5
    allowed[4, targets[4]] = True
    bits = torch.zeros(1, 304, dtype=torch.uint8)
    bits[0, :300] = allowed[4]
    packed = (bits.view(1, -1, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    mask = TokenMask(rows=[4], sets=[0], bits_UX=packed)
    master, head64 = head.clone().requires_grad_(), head.double().requires_grad_()
    ours, _ = chunked_logprob(
        hidden, head, targets, temperature=1.3, chunk_tokens=4, mask=mask, master_VD=master
    )
    theirs, _ = reference(hidden, head64, targets, temperature=1.3, allowed_TV=allowed)
    (got,) = torch.autograd.grad(ours, master, grads)
    (expected,) = torch.autograd.grad(theirs, head64, grads.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_embeddings_gradient_is_the_definitions_also_of_tokens_that_repeat(rng):
    tokens = torch.tensor([3, 1, 3, 3, 0])
    weight, dh = torch.randn(5, 8, generator=rng).bfloat16(), torch.randn(5, 8, generator=rng)
    master, weight64 = weight.float().requires_grad_(), weight.double().requires_grad_()
    h = embedding.trained_embedding(tokens, weight, master)
    assert h.dtype == torch.float32 and torch.equal(h, weight[tokens].float())
    (got,) = torch.autograd.grad(h, master, dh)
    (expected,) = torch.autograd.grad(embedding.reference(tokens, weight64), weight64, dh.double())
    torch.testing.assert_close(got.double(), expected)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_both_learn_what_autograd_of_the_plain_loss_says(recompute, rng, monkeypatch):
    groups, learner, gradients = groups_of(rng), learner_of(gradient_checkpointing=recompute), {}
    collect = learner._gradients

    def watched(masters):
        result = collect(masters)
        gradients.update({name: m.grad.clone() for name, m in learner._masters.items()})
        return result

    monkeypatch.setattr(learner, "_gradients", watched)
    decoder = tiny_decoder(adapter=WHOLE)
    weights = {name: each.module for (name, each) in zip(TABLES, trained_weights(decoder), strict=True)}
    for module in weights.values():
        module.weight = module.weight.clone().requires_grad_()
        module.full = None
    before = plain.logprobs(learner.config, decoder, groups)
    loss = plain.whole_loss(learner.config, decoder, groups, before, {})
    expected = torch.autograd.grad(loss, [module.weight for module in weights.values()])
    metrics = learner.step(groups)
    for name, want in zip(
        ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(gradients[name], want, rtol=1e-3, atol=1e-6)
    assert metrics["embed_tokens_shift"] > 0 and metrics["lm_head_shift"] > 0
    assert "norms_shift" not in metrics


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_what_learned_is_read_by_every_pass_and_off_is_the_model_as_it_was(compute, base):
    decoder = load(base, compute=compute)
    before = logits_of(decoder, TOKENS_T)
    add_adapter(decoder, WHOLE, seed=0)
    publish(decoder)
    assert torch.equal(logits_of(decoder, TOKENS_T), before)
    masters = adapter_tensors(decoder)
    assert set(masters) > NAMES
    logits = [before]
    for name in NAMES:
        masters[name].data.mul_(1.3)
        publish(decoder)
        logits.append(logits_of(decoder, TOKENS_T))
        assert (logits[-1] - logits[-2]).abs().max() > 0.1
    with adapter_off(decoder):
        assert torch.equal(logits_of(decoder, TOKENS_T), before)
    assert torch.equal(logits_of(decoder, TOKENS_T), logits[-1])


def test_peft_and_this_read_each_others(base, tmp_path):
    model = write_learned(base, tmp_path / "theirs", seed=3, scale=0.2, r=4, modules_to_save=list(TABLES))
    config = adapter_config(str(tmp_path / "theirs"))
    assert config.modules_to_save == TABLES and not config.train_norms
    decoder = load(base)
    add_adapter(decoder, config, seed=0)
    load_adapter(decoder, read_adapter(str(tmp_path / "theirs"), config))
    with torch.no_grad():
        theirs = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs, rtol=1e-4, atol=1e-4)
    run = RunConfig(adapter=config, model=ModelConfig(path=str(base)))
    learner = Learner(decoder, run)
    with torch.no_grad():
        for master in learner._masters.values():
            master.mul_(1.1)
    publish(decoder)
    folder = save_checkpoint(tmp_path / "ours", learner, next_step=1, keep=1)
    assert json.loads((folder / "adapter_config.json").read_text())["modules_to_save"] == list(TABLES)
    again = peft.PeftModel.from_pretrained(model.unload(), folder)
    with torch.no_grad():
        torch.testing.assert_close(
            again(TOKENS_T[None]).logits[0], logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4
        )
    trained = sum(master.numel() for master in learner._masters.values())
    assert num_trained_weights(decoder.architecture, config) == trained
    kept = sum(each.module.base.nbytes for each in trained_weights(decoder))
    assert base_bytes(decoder.architecture, config, 4) == kept


def test_a_resumed_learner_goes_on_bit_for_bit(tmp_path, rng):
    adapter = replace(WHOLE, train_norms=True)
    steps = [groups_of(rng) for _ in range(2)]
    through, before, after = (learner_of(adapter) for _ in range(3))
    want = [through.step(groups) for groups in steps]
    before.step(steps[0])
    save_checkpoint(tmp_path, before, next_step=1, keep=1)
    assert load_latest(tmp_path, after)
    assert after.step(steps[1]) == want[1]
    states = [x.adapter_state() | x.optimizer_state() for x in (after, through)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_where_they_cannot_be_trained_they_are_refused(tmp_path, base):
    tied = save(oracle("Llama", tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(UserError, match="modules_to_save lm_head: the head of this model is tied"):
        add_adapter(load(tied), replace(WHOLE, modules_to_save=("lm_head",)), seed=0)
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert of_lora_config(lora, ADAPTER, ModelConfig(path=str(base))).modules_to_save == ("lm_head",)
    with pytest.raises(UserError, match="modules_to_save has 'lm_head', but the head is tied"):
        of_lora_config(lora, ADAPTER, ModelConfig(path=str(tied)))
    for fields, said in (
        ({"model": ModelConfig(head_format="fp8")}, r"needs model\.head_format bf16, got fp8"),
        ({"distil": DistilConfig(teacher="x", loss="jsd")}, r"needs distil\.loss policy_gradient"),
        ({"ray": RayConfig(address="auto")}, "does not work with --ray"),
    ):
        with pytest.raises(UserError, match=said):
            RunConfig(adapter=WHOLE, noise=dataclasses.replace(RunConfig().noise, schedule="none"), **fields)
    with pytest.raises(UserError, match=r"needs adapter\.kind lora"):
        AdapterConfig(kind="full", modules_to_save=TABLES)
    with pytest.raises(UserError, match=r"modules_to_save has \['embed_tokens', 'lm_head'\]"):
        write_learned(base, tmp_path / "a", seed=3, scale=0.2, r=4, modules_to_save=list(TABLES))
        config = adapter_config(str(tmp_path / "a"))
        read_adapter(str(tmp_path / "a"), replace(config, modules_to_save=()))
