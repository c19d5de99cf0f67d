"""Write a model object, or a tokenizer that is not its model's, to a folder that `model.path` can name.

The folder's name has a hash of what is in it: other weights are another run.
"""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.config import AdapterConfig
from qerl.errors import UserError, require
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.peft.peft_reader import adapter_config


def write_model(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> Path:
    """Write a PreTrainedModel, or the base of a PeftModel, without its adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tensors = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name and "lora_magnitude_vector" not in name
    }
    digest = hashlib.sha256(base.config.to_json_string().encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(-1).float().numpy().tobytes())
    path = folder / f"model-{digest.hexdigest()[:12]}"
    if not path.exists():
        tokenizer = tokenizer or load_tokenizer(base.config.name_or_path)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        base.save_pretrained(unfinished, state_dict=tensors)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(path)
    return path


def write_start_adapter(model: Any, folder: Path) -> AdapterConfig:
    """Write the adapter of a PeftModel; return the config that continues from it."""
    path = folder / "start-adapter"
    model.save_pretrained(path)
    return adapter_config(str(path))


def with_template(model: Any, tokenizer: Any, template: str | None, eos_token: str | None) -> Any:
    """Return the tokenizer, or the model's own, with this chat template and end of sequence.

    template: a .jinja or .j2 file, or a folder or hub id whose tokenizer has one; None: nothing changes."""
    if template is None and eos_token is None:
        return tokenizer
    if tokenizer is None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config.name_or_path)
    if template is not None and Path(template).suffix in (".jinja", ".j2"):
        require(Path(template).is_file(), f"chat_template_path: there is no file {template}")
        tokenizer.chat_template = Path(template).read_text()
    elif template is not None:
        try:
            source = AutoTokenizer.from_pretrained(template, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"chat_template_path: {template} has no tokenizer: {error}") from None
        require(bool(source.chat_template), f"chat_template_path: {template} has no chat template")
        used = {token for token in source.get_added_vocab() if token in str(source.chat_template)}
        unknown = sorted({*used, source.eos_token} - {*tokenizer.get_vocab(), None})
        require(not unknown, f"chat_template_path: the model has no token {', '.join(unknown)} of {template}")
        tokenizer.chat_template, tokenizer.eos_token = source.chat_template, source.eos_token
    if eos_token is not None:
        require(eos_token in tokenizer.get_vocab(), f"eos_token: {eos_token!r} is not in the vocabulary")
        tokenizer.eos_token = eos_token
    return tokenizer


def with_tokenizer(model: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Return the model's name if this is its tokenizer, else a folder with this one and links to the rest."""
    source = locate(model)
    if _facts(load_tokenizer(model)) == _facts(tokenizer):
        return model
    require(not source.is_gguf, "processing_class: a GGUF model keeps its own tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder))
    tokenizer.save_pretrained(unfinished)
    digest = hashlib.sha256(str(source.path.resolve()).encode())
    for file in sorted(unfinished.iterdir()):
        digest.update(file.read_bytes())
    for file in source.path.iterdir():
        is_of_model = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if is_of_model or file.name in ("config.json", "generation_config.json"):
            (unfinished / file.name).symlink_to(file.resolve())
    path = folder / f"model-{digest.hexdigest()[:12]}"
    if not path.exists():
        return str(unfinished.rename(path))
    for file in unfinished.iterdir():
        file.unlink()
    unfinished.rmdir()
    return str(path)


def _facts(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """Return what a run reads of a tokenizer."""
    return (
        tokenizer.get_vocab(),
        tokenizer.chat_template,
        tokenizer.eos_token_id,
        tokenizer("a B  1+1.")["input_ids"],
    )
