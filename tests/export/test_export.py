"""Exports compute what was learned: in PEFT, in transformers, in 4 bits; and an adapter trains on."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_run
from conftest import rms_error
from learner.plain import causal
from learner.saver import save as save_checkpoint
from models.checkpoints import save_tiny
from peft_adapters import write_learned
from qerl.cli import main
from qerl.config import AdapterConfig, ModelConfig, NoiseConfig, RunConfig
from qerl.config.options import ExportOptions
from qerl.errors import RunError, UserError
from qerl.export import export, write
from qerl.learner import Learner
from qerl.models.checkpoint.encoding import SCALES
from qerl.models.checkpoint.source import base_name, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.loader import build_decoder
from qerl.models.packed_writer import write_quantized
from qerl.models.peft.adapter import adapter_tensors, add_adapter, load_adapter, publish
from qerl.models.peft.peft_reader import adapter_config, read_adapter
from qerl.models.quantize import calibration
from qerl.models.quantize.calibration import read_calibration
from qerl.models.quantize.gptq import FLOAT, GptqSettings
from qerl.models.quantize.merge_note import read_note
from qerl.tracking import progress
from stored_samples import checked_line

FAMILIES = ("llama", "qwen2")
TOKENS = torch.arange(3, 40) * 7 % 250
ADAPTER = AdapterConfig(rank=4, alpha=8.0)
BF16_ERROR = 14 * 2**-10  # 14 linears, each with weights rounded to 8 bits
# peft 0.21 with transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def decoder_of(config):
    model = config.model
    return build_decoder(
        locate(model.path).open(),
        format=model.format,
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=False,
        scales=SCALES[model.block_scales],
    )


def save_model(folder, family):
    save_tiny(folder, family, intermediate_size=128, dtype=torch.bfloat16)


def run_of(folder, family="llama", *, format="nvfp4", adapter=ADAPTER, save=save_model):
    """(the folder of a run that has learned something, its config, its policy)."""
    tiny_run.write_model(folder / "model")
    save(folder / "model", family)
    model = ModelConfig(path=str(folder / "model"), format=format, device="cpu", dtype="fp32")
    config = RunConfig(
        out=str(folder / "run"), model=model, adapter=adapter, noise=NoiseConfig(schedule="none")
    )
    decoder, rng = decoder_of(config), torch.Generator().manual_seed(1)
    add_adapter(decoder, adapter, seed=0)
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.add_(torch.randn(master.shape, generator=rng) * 0.05)
    publish(decoder)
    save_checkpoint(folder / "run" / "checkpoints", Learner(decoder, config), next_step=1, keep=1)
    (folder / "run" / "run.json").write_text(json.dumps({"config": dataclasses.asdict(config)}))
    texts = [(f"{i} plus {j} is what, and why?", f"{i + j}") for i in range(12) for j in range(4)]
    lines = [{"prompt": p, "text": t, "finish": "stop"} for p, t in texts]
    (folder / "run" / "samples.jsonl").write_bytes(b"".join(checked_line(json.dumps(line)) for line in lines))
    return folder / "run", config, decoder


def exported(folder, config, form, **options):
    out = folder / form
    export(config, ExportOptions(run=folder / "run", out=out, form=form, **options))
    return out


@torch.no_grad()
def logits_of(decoder):
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), causal))


@torch.no_grad()
def theirs(model):
    return model(TOKENS[None]).logits[0].float()


def decompressed(folder, config):
    """By compressed-tensors in bf16, with two roundings, at the first forward; then computed with in fp32."""
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs(packed)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    assert not model.load_state_dict(packed.state_dict(), strict=False).missing_keys
    return model


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_exported_adapter_names_a_base_that_any_folder_finds_and_has_its_tokenizer(tmp_path, monkeypatch):
    _, config, _ = run_of(tmp_path, "llama")
    there = Path(config.model.path)
    monkeypatch.chdir(there.parent)
    relative = dataclasses.replace(config, model=dataclasses.replace(config.model, path=there.name))
    out = exported(tmp_path, relative, "peft")
    monkeypatch.chdir(tmp_path)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    assert model.peft_config["default"].base_model_name_or_path == str(there)
    tokens, known = (AutoTokenizer.from_pretrained(f)("1 + 2")["input_ids"] for f in (out, there))
    assert tokens == known


def test_the_built_in_base_is_a_hub_id_and_a_missing_one_does_not_lose_the_adapter(tmp_path, capsys):
    assert base_name("smollm2-135m-instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert base_name("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"
    _, config, _ = run_of(tmp_path, "llama")
    gone = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tmp_path / "gone")))
    assert (exported(tmp_path, gone, "peft") / "adapter_model.safetensors").is_file()
    assert "without a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapter_with_our_logits(tmp_path, family):
    _, config, decoder = run_of(tmp_path, family)
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    with torch.no_grad():
        for name, linear in decoder.linears():
            base.get_submodule(f"model.{name}").weight.copy_(linear.weight.decode())
    model = peft.PeftModel.from_pretrained(base, exported(tmp_path, config, "peft"))
    torch.testing.assert_close(theirs(model), logits_of(decoder), rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert rms_error(theirs(model), logits_of(decoder)) > 0.1


def test_peft_loads_the_adapter_over_a_quantized_checkpoint(tmp_path):
    _, config, decoder = run_of(tmp_path)
    write_quantized(config.model.path, tmp_path / "packed", scales=SCALES[config.model.block_scales])
    model = peft.PeftModel.from_pretrained(
        decompressed(tmp_path / "packed", config), exported(tmp_path, config, "peft")
    )
    assert rms_error(theirs(model), logits_of(decoder)) < BF16_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_in_fp32_has_our_logits(tmp_path, family):
    _, config, decoder = run_of(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged", dtype="fp32"))
    assert model.dtype == torch.float32
    torch.testing.assert_close(theirs(model), logits_of(decoder), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "rounded"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_merged_is_the_exact_sum_rounded_once(tmp_path, family, dtype, rounded):
    _, config, decoder = run_of(tmp_path, family)
    stored = load_file(exported(tmp_path, config, "merged", dtype=dtype) / "model.safetensors")
    for name, linear in decoder.linears():
        exact = linear.weight.operand(torch.float32).double() * linear.weight.alpha.double()
        exact = exact + 2.0 * linear.lora_B.double() @ linear.lora_A.double()
        assert torch.equal(stored.pop(f"model.{name}.weight"), exact.to(rounded))
    source = load_file(Path(config.model.path) / "model.safetensors")
    assert stored and all(torch.equal(tensor, source[name].to(rounded)) for name, tensor in stored.items())


def test_merged_in_bf16_is_as_near_as_bf16_gets(tmp_path):
    _, config, decoder = run_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged"), dtype=torch.float32)
    assert rms_error(theirs(model), logits_of(decoder)) < BF16_ERROR


@pytest.mark.parametrize("format", ["mxfp4", "nf4", "fp8", "int8", "bf16"])
def test_every_base_merges(tmp_path, format):
    _, config, decoder = run_of(tmp_path, format=format)
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged", dtype="fp32"))
    torch.testing.assert_close(theirs(model), logits_of(decoder), rtol=1e-4, atol=1e-4)


def test_weights_that_learned_themselves_are_exported_as_they_are(tmp_path):
    adapter = AdapterConfig(kind="full", target_modules=("q_proj", "down_proj"))
    _, config, decoder = run_of(tmp_path, format="bf16", adapter=adapter)
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path, config, "merged", dtype="fp32"))
    torch.testing.assert_close(
        model.model.layers[1].mlp.down_proj.weight, decoder.layers[1].mlp.down_proj.full, rtol=0, atol=0
    )
    said = refusal(lambda: exported(tmp_path, config, "peft"))
    assert "has no adapter, as adapter.kind is full" in said


def test_gguf_ready_is_merged(tmp_path):
    _, config, _ = run_of(tmp_path)
    files = [exported(tmp_path, config, form) for form in ("merged", "gguf-ready")]
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in files]
    assert contents[0] == contents[1] and "model.safetensors" in contents[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_4_bit_export_as_we_do(tmp_path, family):
    _, config, _ = run_of(tmp_path, family)
    out = exported(tmp_path, config, "nvfp4")
    ours = decoder_of(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(out))))
    assert rms_error(theirs(decompressed(out, config)), logits_of(ours)) < BF16_ERROR
    assert "input_ids" in AutoTokenizer.from_pretrained(out)("1 plus 2")


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@torch.no_grad()
def test_the_4_bit_export_keeps_what_a_plain_one_loses(tmp_path, format):
    _, config, decoder = run_of(tmp_path, format=format)
    tokens = torch.tensor(
        AutoTokenizer.from_pretrained(config.model.path).encode("3 plus 1 is what, and why?")
    )

    def logits(path, held):
        model = ModelConfig(path=str(path), format=held)
        policy = decoder_of(dataclasses.replace(config, model=model))
        return policy.logits(policy(tokens, torch.arange(len(tokens)), causal))

    truth = decoder.logits(decoder(tokens, torch.arange(len(tokens)), causal))
    write_quantized(str(exported(tmp_path, config, "merged")), tmp_path / "plain")
    plain = rms_error(logits(tmp_path / "plain", "nvfp4"), truth)
    assert rms_error(logits(exported(tmp_path, config, "nvfp4"), "nvfp4"), truth) < 0.4 * plain


@pytest.mark.parametrize(
    ("gb", "asked", "tokens"), [(0, {}, 8192), (141, {}, 65_536), (141, {"calibration_tokens": 99}, 99)]
)
def test_the_4_bit_export_calibrates_on_as_many_tokens_as_the_memory_allows(
    tmp_path, monkeypatch, gb, asked, tokens
):
    _, config, _ = run_of(tmp_path)
    counts, read = [], read_calibration

    def counted(*arguments, max_tokens, **place):
        counts.append(max_tokens)
        return read(*arguments, max_tokens=max_tokens, **place)

    monkeypatch.setattr(calibration, "memory_bytes", lambda device: gb * 1e9)
    monkeypatch.setattr(write, "read_calibration", counted)
    exported(tmp_path, config, "nvfp4", **asked)
    assert counts == [tokens]


@pytest.mark.parametrize(
    ("held", "form", "usual"),
    [("nvfp4", "nvfp4", GptqSettings()), ("bf16", "nvfp4", FLOAT), ("nvfp4", "mxfp4", FLOAT)],
)
def test_weights_of_another_format_are_rounded_as_a_float_model_is(held, form, usual):
    settings = write.four_bit_settings(held, form)
    assert (settings.kind.name, settings.float_share, settings.damping) == (
        form,
        usual.float_share,
        usual.damping,
    )


def test_an_export_without_memory_names_the_option(tmp_path, monkeypatch):
    def full(*arguments, **settings):
        raise torch.OutOfMemoryError

    _, config, _ = run_of(tmp_path)
    monkeypatch.setattr(write, "requantize", full)
    with pytest.raises(RunError, match=r"8,192 tokens need more memory .* fewer --calibration-tokens"):
        exported(tmp_path, config, "nvfp4")
    assert not (tmp_path / "nvfp4").exists()


def test_the_4_bit_export_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    _, config, _ = run_of(tmp_path)
    capsys.readouterr()
    exported(tmp_path, config, "nvfp4")
    said = capsys.readouterr().err
    layers = re.findall(r"^nvfp4: quantizing: (\d) of 2 layers, ", said, flags=re.MULTILINE)
    assert said.startswith("loading ") and layers[:2] == ["1", "2"]


def test_linears_that_are_fused_elsewhere_share_their_global_scale(tmp_path):
    _, config, _ = run_of(tmp_path, format="bf16")
    stored = load_file(exported(tmp_path, config, "nvfp4") / "model.safetensors")
    scales = {
        name.split(".")[-2]: v.item() for name, v in stored.items() if "1." in name and "global" in name
    }
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["gate_proj"] == scales["up_proj"] != scales["down_proj"]


def test_the_same_run_gives_the_same_4_bits(tmp_path):
    _, config, _ = run_of(tmp_path)
    first = (exported(tmp_path, config, "nvfp4") / "model.safetensors").read_bytes()
    (tmp_path / "nvfp4").rename(tmp_path / "first")
    assert (exported(tmp_path, config, "nvfp4") / "model.safetensors").read_bytes() == first


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    _, config, _ = run_of(tmp_path)
    before = sorted(tmp_path.iterdir())
    for form, place in (("peft", "qerl.export.write"), ("merged", "qerl.models.hf_writer")):
        with monkeypatch.context() as patch:
            patch.setattr(f"{place}.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
            with pytest.raises(RunError, match=f"{form}: cannot be written: full"):
                exported(tmp_path, config, form)
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_exported_is_refused(tmp_path):
    run, config, _ = run_of(tmp_path)
    (tmp_path / "nvfp4").mkdir()
    (tmp_path / "nvfp4" / "note").touch()
    assert "is not an empty folder" in refusal(lambda: exported(tmp_path, config, "nvfp4"))
    (run / "samples.jsonl").write_text("")
    (tmp_path / "nvfp4" / "note").unlink()
    assert "holds no samples" in refusal(lambda: exported(tmp_path, config, "nvfp4"))
    (run / "checkpoints").rename(run / "gone")
    for form in ("peft", "merged"):
        assert "holds no checkpoint" in refusal(lambda form=form: exported(tmp_path, config, form))
    said = refusal(lambda: exported(tmp_path, config, "peft", dtype="fp32"))
    assert said == "--dtype fp32 needs --as merged, gguf-ready or base, got peft"


def qerl(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["qerl", *map(str, arguments)])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_command_exports_a_run_and_names_what_is_none(monkeypatch, capsys, tmp_path):
    run, *_ = run_of(tmp_path)
    assert qerl(monkeypatch, "export", run, tmp_path / "out", "--as", "merged") == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'out'}\n")
    assert qerl(monkeypatch, "export", tmp_path / "model", tmp_path / "other") == 2
    assert "not the folder of a run (it has no run.json)" in capsys.readouterr().err


def peft_adapter(folder, path, **changes):
    """One that PEFT itself made and wrote, with something learned."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(ADAPTER.target_modules)} | changes
    return write_learned(path, folder, seed=2, scale=0.1, **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_from_peft_has_its_logits_here(tmp_path, family):
    _, config, _ = run_of(tmp_path, family, format="bf16")
    model = peft_adapter(tmp_path / "adapter", config.model.path)
    decoder = decoder_of(config)
    add_adapter(decoder, ADAPTER, seed=0)
    assert rms_error(logits_of(decoder), theirs(model)) > 0.1
    load_adapter(decoder, read_adapter(str(tmp_path / "adapter"), ADAPTER))
    torch.testing.assert_close(logits_of(decoder), theirs(model), rtol=1e-4, atol=1e-4)


def test_a_run_goes_on_from_an_exported_adapter(monkeypatch, capsys, tmp_path):
    files = tiny_run.write_files(tmp_path)

    def train(out, *more):
        given = [*tiny_run.options(files, tmp_path / out), "--num-steps", "3", "--json", *more]
        assert qerl(monkeypatch, "train", "demo_long", *given) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    first = train("first")
    assert qerl(monkeypatch, "export", tmp_path / "first", tmp_path / "adapter") == 0
    second = train("second", "--adapter.init-from", tmp_path / "adapter")
    for figure in ("accuracy", "greedy"):
        assert second[f"{figure}_before"] == first[f"{figure}_after"]
    assert (second["accuracy_before"], second["greedy_before"]) != (
        first["accuracy_before"],
        first["greedy_before"],
    )


def test_training_continues_from_an_adapter_of_another_rank_alpha_and_targets(monkeypatch, capsys, tmp_path):
    files = tiny_run.write_files(tmp_path)
    narrow = (
        "--adapter.rank",
        "3",
        "--adapter.alpha",
        "5",
        "--adapter.target-modules",
        "q_proj",
        "down_proj",
    )
    given = [*tiny_run.options(files, tmp_path / "first"), "--num-steps", "3"]
    given = given[: given.index("--adapter.rank")] + given[given.index("--adapter.rank") + 2 :]
    assert qerl(monkeypatch, "train", "demo_long", *given, *narrow, "--json") == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert qerl(monkeypatch, "export", tmp_path / "first", tmp_path / "adapter") == 0
    given[given.index("--out") + 1] = tmp_path / "second"
    capsys.readouterr()
    assert (
        qerl(monkeypatch, "train", "demo_long", "--init-adapter", tmp_path / "adapter", *given, "--json") == 0
    )
    second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (second["accuracy_before"], second["greedy_before"]) == (
        first["accuracy_after"],
        first["greedy_after"],
    )
    said = json.loads((tmp_path / "second" / "run.json").read_text())["config"]["adapter"]
    assert (said["rank"], said["alpha"], said["target_modules"]) == (3, 5.0, ["down_proj", "q_proj"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": "4"}, "r and lora_alpha must be numbers, got '4' and 8.0"),
        ({"target_modules": 3}, "target_modules must be a list of names, got 3"),
        ({"use_dora": True}, "use_dora is True; only plain LoRA is supported"),
    ],
)
def test_what_import_cannot_take_over_is_named(tmp_path, changes, said):
    _, config, _ = run_of(tmp_path)
    adapter = exported(tmp_path, config, "peft")
    described = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    assert said in refusal(lambda: adapter_config(str(adapter)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 8}, "r is 8, adapter.rank is 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16.0, adapter.alpha is 8.0"),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            "target_modules ['q_proj', 'v_proj'] are not those of the tensors, which have model.layers.0.",
        ),
        ({"use_dora": True}, "use_dora is True; only plain LoRA is supported, which leaves it unset"),
        ({"use_rslora": True}, "lora_alpha is 16.0, adapter.alpha is 8.0"),
        ({"bias": "all"}, "bias is 'all'; only plain LoRA is supported, 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; only plain LoRA is supported, True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head', of which the file has no tensor"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, changes, said):
    _, config, _ = run_of(tmp_path)
    adapter = exported(tmp_path, config, "peft")
    described = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    assert said in refusal(lambda: read_adapter(str(adapter), ADAPTER))


def test_an_adapter_of_another_base_is_refused(tmp_path):
    _, config, decoder = run_of(tmp_path)
    file = exported(tmp_path, config, "peft") / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj.lora_A" in name)
    save_file(tensors | {name: torch.zeros(4, 96)}, file)
    said = refusal(lambda: load_adapter(decoder, read_adapter(str(file.parent), ADAPTER)))
    assert "must have the shape (4, 128), got (4, 96)" in said
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    assert "lacks tensor" in refusal(lambda: load_adapter(decoder, read_adapter(str(file.parent), ADAPTER)))


def test_what_is_no_adapter_is_refused(tmp_path):
    _, config, _ = run_of(tmp_path)
    assert "adapter_config.json is missing" in refusal(lambda: read_adapter(config.model.path, ADAPTER))
    adapter = exported(tmp_path, config, "peft")
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    assert "not a safetensors file" in refusal(lambda: read_adapter(str(adapter), ADAPTER))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "pickled adapters are never loaded" in refusal(lambda: read_adapter(str(adapter), ADAPTER))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_merged_model_has_a_note_of_what_the_run_learned(tmp_path, kind):
    run, config, _decoder = run_of(
        tmp_path,
        format="bf16" if kind == "full" else "nvfp4",
        adapter=dataclasses.replace(ADAPTER, kind=kind),
    )
    note = read_note(exported(tmp_path, config, "merged"), 320)
    assert (note.run, note.base, note.base_format) == (str(run), config.model.path, config.model.format)
    assert note.adapter["kind"] == kind and note.base_kl > 0.05 and note.merged_kl < 0.01 * note.base_kl
    text = [*load_tokenizer(config.model.path).encode("11 plus 3 is what, and why?14"), 257]
    assert list(note.probes[0].tokens_T) == text[:-1] and note.probes[0].start == len(text) - 4


def test_a_run_without_samples_has_no_note(tmp_path):
    run, config, _ = run_of(tmp_path)
    (run / "samples.jsonl").unlink()
    assert read_note(exported(tmp_path, config, "merged"), 320) is None
