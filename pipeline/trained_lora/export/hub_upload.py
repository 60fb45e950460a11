"""Uploading a published LoRA to a repository on the Hugging Face Hub.

The table of samples stays here: it has the names and captions of the images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import (
    CARD_FILE,
    LAYOUTS,
    PROVENANCE_FILE,
    SHEET_FILE,
    layout_file,
)
from pipeline.trained_lora.export.model_card import PLACE

_FRONT_MATTER = "---\n"


@dataclass(frozen=True)
class HubUpload:
    """Files to upload, by their names in the repository; a file is given by its path or its content."""

    repository: str
    files: Mapping[str, Path | bytes]
    card: str

    def num_bytes(self, name: str) -> int:
        """Return the size of a file."""
        file = self.files[name]
        return len(file) if isinstance(file, bytes) else file.stat().st_size


def prepare_upload(
    lora: Path,
    recipe_name: str,
    repository: str,
    *,
    licence: str | None,
    names: Sequence[str] | None = None,
) -> HubUpload:
    """Return the upload of a recipe's published LoRA, without a request.

    Args:
        lora: The folder `lora/`.
        recipe_name: Name of the recipe, which the names of the files contain.
        repository: Repository on the Hub, as owner/name.
        licence: Licence of the LoRA, by the Hub's identifier, such as "cc-by-4.0"; None states none.
        names: Names of the LoRA files, see `lora_file_names`; None for those of a LoRA.

    Raises:
        TrainingError: The folder has no LoRA, or the name of the repository is invalid.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        if "/" not in repository:
            raise HFValidationError("the owner is missing")
    except HFValidationError as err:
        fix = "pass it as owner/name, such as anna/flowers-lora"
        raise TrainingError(f"invalid name of a repository: {err}", where=repository, fix=fix) from err

    lora_names = names or [layout_file(layout, recipe_name) for layout in LAYOUTS]
    names = [*lora_names, PROVENANCE_FILE]
    missing = [name for name in (*names, CARD_FILE) if not (lora / name).is_file()]
    if missing:
        fix = f"train the recipe first: latentline run {recipe_name}"
        raise TrainingError(f"the LoRA to upload lacks {missing[0]}", where=str(lora), fix=fix)

    card = (lora / CARD_FILE).read_text(encoding="utf-8").replace(PLACE, json.dumps(repository))
    if licence is not None:
        card = card.replace(_FRONT_MATTER, f"{_FRONT_MATTER}license: {json.dumps(licence)}\n", 1)
    names += [SHEET_FILE] if (lora / SHEET_FILE).is_file() else []
    files: dict[str, Path | bytes] = {name: lora / name for name in names}
    return HubUpload(repository, files | {CARD_FILE: card.encode()}, card)


def upload(prepared: HubUpload, *, public: bool) -> str:
    """Create the repository if it is missing, upload the files in one commit, and return its address.

    A repository that exists stays private or public as it is. The access token is huggingface_hub's own: from
    HF_TOKEN or `hf auth login`.

    Raises:
        TrainingError: The Hub refuses the upload, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    where = f"repository {prepared.repository}"
    login = "log in with a token that may write to it: hf auth login, or set HF_TOKEN"
    if get_token() is None:
        raise TrainingError("this machine is not logged in to the Hub", where=where, fix=login)

    api = HfApi(library_name="latentline")
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=file if isinstance(file, bytes) else str(file))
        for name, file in prepared.files.items()
    ]
    try:
        address = api.create_repo(prepared.repository, private=not public, exist_ok=True)
        api.create_commit(prepared.repository, operations, commit_message="Upload LoRA of Latentline")
    except (HTTPError, OSError, ValueError, RuntimeError) as err:  # Xet raises RuntimeError
        is_refusal = isinstance(err, HfHubHTTPError) and err.response.status_code in (401, 403, 404)
        reason = next((line for line in str(err).splitlines() if line.strip()), type(err).__name__)
        verb = "refuses" if is_refusal else "could not complete"
        fix = login if is_refusal else "check the network, the proxy and HF_ENDPOINT, and upload again"
        raise TrainingError(f"the Hub {verb} the upload: {reason}", where=where, fix=fix) from err
    return str(address)
