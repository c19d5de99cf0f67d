"""Export what a run learned: a PEFT adapter, or a merged model."""

import shlex
import sys

from qerl.cli.arguments import announce, parse_options
from qerl.config.options import ExportOptions
from qerl.config.stored import read_config_file
from qerl.errors import UserError, did_you_mean_folder


def run(arguments: list[str]) -> None:
    options = parse_options(ExportOptions, arguments, "export", help=__doc__)
    run_json = options.run / "run.json"
    if not run_json.is_file():
        near = "" if options.run.exists() else did_you_mean_folder(options.run)
        raise UserError(f"{options.run}: not the folder of a run (it has no run.json){near}")
    announce(f"export {options.run}: {options.form}, {options.out}", sys.stderr)
    from qerl.export import export
    from qerl.export.adapter_card import trained_on
    from qerl.export.hub import create_repo, upload_folder
    from qerl.models.checkpoint.source import base_name
    from qerl.models.hf_writer import check_output_folder

    config = read_config_file(run_json)
    check_output_folder(options.out)
    repo = options.push_to_hub and create_repo(options.push_to_hub, is_public=options.public)
    export(config, options)
    is_published = trained_on(config.model) is None
    for line in usage_lines(options, base_name(config.model.path) if is_published else None):
        print(line, file=sys.stderr)
    if repo:
        announce(f"uploading {options.out} to {repo}", sys.stderr)
        announce(f"uploaded to {upload_folder(options.out, repo)}", sys.stderr)
    print(options.out)


def usage_lines(options: ExportOptions, base: str | None) -> list[str]:
    """Return what was written, and how other programs use it. base: the model on which an adapter was
    trained; None: its weights as the run quantized them, which the adapter's README.md says how to write."""
    size_mb = sum(file.stat().st_size for file in options.out.iterdir() if file.is_file()) / 1e6
    out = shlex.quote(str(options.out))
    kind = "a PEFT adapter" if options.form == "peft" else f"a model ({options.form})"
    lines = [f"wrote {kind}, {size_mb:,.1f} MB, to {out}"]
    if options.form == "peft":
        if base is None:
            return [*lines, f"  PEFT, vLLM   {out}/README.md says how to load it on that base"]
        from qerl.export.adapter_card import read_written_adapter, vllm_obstacle, vllm_options

        load = f'AutoModelForCausalLM.from_pretrained("{base}")'
        adapter = read_written_adapter(options.out)
        obstacle = vllm_obstacle(adapter)
        served = f"--lora-modules {shlex.quote(options.out.name)}={out}"
        serve = obstacle or f"vllm serve {shlex.quote(base)} {vllm_options(adapter)} {served}"
        return [
            *lines,
            f'  PEFT   PeftModel.from_pretrained({load}, "{options.out}")',
            f"  vLLM   {serve}",
        ]
    if options.form == "gguf-ready":
        return [*lines, f"  llama.cpp   python convert_hf_to_gguf.py {out}"]
    return [*lines, f"  vLLM   vllm serve {out}", f"  qerl   qerl serve {out}"]
