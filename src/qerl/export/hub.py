"""Upload an exported folder to the Hugging Face hub, or to the server that HF_ENDPOINT names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from qerl.errors import RunError, UserError

# HTTPError of httpx or of its successor, whose kinds a lost connection raises too
_NETWORK_ERRORS: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError)


def create_repo(repo_id: str, *, is_public: bool) -> str:
    """Create the repository of a model unless it exists; return its whole id, OWNER/NAME.

    Called before an export, which may take minutes: raise UserError where the hub would refuse the upload.
    A repository that exists keeps its visibility."""
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--push-to-hub {repo_id}: no token of the hub; run hf auth login, or set HF_TOKEN, with a token"
            " that may write"
        )
    with _one_line_errors(repo_id):
        url = huggingface_hub.HfApi().create_repo(repo_id, private=not is_public, exist_ok=True)
        return url.repo_id


def upload_folder(folder: Path, repo_id: str) -> str:
    """Upload all files of a folder in one commit; return the repository's address."""
    with _one_line_errors(repo_id):
        api = huggingface_hub.HfApi()
        api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message="Upload by qerl export")
        return f"{api.endpoint}/{repo_id}"


@contextlib.contextmanager
def _one_line_errors(repo_id: str) -> Iterator[None]:
    """Raise UserError for an id or a token that the hub refuses, RunError for a hub that does not answer."""
    place = f"--push-to-hub {repo_id}"
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise UserError(
                f"{place}: the hub refused the token (401); run hf auth login, or set HF_TOKEN to another one"
            ) from error
        if status == 403:
            raise UserError(
                f"{place}: the token may not write there (403); take a token with write access, and an OWNER"
                " that is you or an organization of yours"
            ) from error
        reason = (str(error).splitlines() or [""])[0]
        raise RunError(f"{place}: the hub answered {status}: {reason}") from error
    except ValueError as error:  # HFValidationError: no id of a repository
        raise UserError(f"{place}: {(str(error).splitlines() or [''])[0]}") from error
    except _NETWORK_ERRORS as error:
        endpoint = huggingface_hub.constants.ENDPOINT
        raise RunError(f"{place}: {endpoint} cannot be reached: {error}") from error
