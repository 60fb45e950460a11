"""Folders in the format of transformers that are no part of a base model: scorers and captioners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.log import Log
from pipeline.models.hub import (
    component_files,
    download_files,
    explain_download_errors,
    is_hub_id,
    require_access,
    require_revision,
    suggest_folder,
)
from pipeline.recipe import in_project


def resolve_folder(  # noqa: PLR0913 - all but the first three are keywords
    source: str,
    revision: str | None,
    require_complete: Callable[[Path], object],
    *,
    key: str,
    where: str,
    log: Log,
    files: tuple[str, ...] | None = None,
    weights: bool = True,
) -> Path:
    """Return the local folder of a source, which is a folder of the project or a Hub id.

    A complete snapshot on this machine is used without a request; otherwise it is downloaded.

    Args:
        source: Hub id, or a folder relative to the project root.
        revision: Branch, tag or commit of the Hub id.
        require_complete: Raises ModelError if a file is missing in a folder.
        key: Key of the source in the recipe, for messages.
        where: File and section of the recipe, for messages.
        log: Receives the progress of a download.
        files: Files to download. None means configurations, tokenizer and weights, as for a component of a
            base model.
        weights: Whether weights are downloaded too, if `files` is None.

    Raises:
        ModelError: The source does not exist, is incomplete, or cannot be downloaded.
    """
    folder = in_project(source)
    if folder.is_dir():
        if revision is not None:
            what = f"revision {revision} requires a Hub repository, but {source} is a local folder"
            raise ModelError(what, where=where, fix="remove revision")
        return folder
    if not is_hub_id(source):
        similar = suggest_folder(source)
        fix = f"set {key} to an existing folder, relative to the project root, or to a Hub id (owner/name)"
        raise ModelError(
            f"{key} must be a folder or a Hub id, got {source}, which does not exist",
            where=f"{where}, expected at {folder}",
            fix=fix if similar is None else f"did you mean {similar}?",
        )

    from huggingface_hub import HfApi, try_to_load_from_cache

    require_revision(revision, where)
    first = "config.json" if files is None else files[0]
    present = try_to_load_from_cache(source, first, revision=revision)
    if isinstance(present, str) and _is_complete(Path(present).parent, require_complete):
        return Path(present).parent
    with explain_download_errors(source, where, key=key):
        require_access(source, revision)
        stored = HfApi().list_repo_files(source, revision=revision)
        chosen = component_files(stored, "") if files is None else [each for each in files if each in stored]
        if not weights:
            chosen = [each for each in chosen if ".safetensors" not in each and ".bin" not in each]
        return download_files(source, revision, chosen, log=log)


def _is_complete(folder: Path, require_complete: Callable[[Path], object]) -> bool:
    try:
        require_complete(folder)
    except ModelError:
        return False
    return True
