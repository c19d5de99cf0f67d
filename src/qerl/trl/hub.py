"""Push a saved adapter to the Hugging Face hub, with a model card."""

from pathlib import Path
from typing import Any

import huggingface_hub

from qerl.export.adapter_card import card_text


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    card: str,
    token: str | None,
    private: bool | None,
    revision: str | None,
    commit_message: str,
) -> Any:
    """Create the repository if it is not there, upload the folder, return the hub's answer."""
    api = huggingface_hub.HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision not in (None, "main"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    (folder / "README.md").write_text(card)
    return api.upload_folder(
        repo_id=repo_id, folder_path=str(folder), commit_message=commit_message, revision=revision
    )


def model_card(
    name: str, *, base_model: str, dataset: str | None, method: str, tags: list[str], base: str | None
) -> str:
    """Return a README.md; base_model is named if it is no local folder. base: the section about an adapter's
    base; None if weights of the model itself were trained."""
    what, library = ("A LoRA adapter for", "peft") if base is not None else ("A model from", "transformers")
    named = {} if Path(base_model).expanduser().exists() else {"base_model": base_model}
    facts = {"library_name": library, **named, **({"datasets": [dataset]} if dataset else {}), "tags": tags}
    return card_text(name, facts, f"{what} {base_model}, trained with {method} by qerl.\n{base or ''}")
