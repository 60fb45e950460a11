"""Where the base model lies: a local folder, or a snapshot of a Hub repository.

The network is used only when a file that the model's family needs is not on this machine.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import ModelError
from pipeline.families import Family, detect, family_class
from pipeline.recipe import project_root

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_INDEX = "model_index.json"
_VARIANT_PARTS = ("fp16", "fp32", "bf16", "non_ema", "ema_only")


def resolve_base(recipe: Recipe) -> Path:
    """The diffusers folder of the recipe's base model, with every file that its family needs.

    `model.base` is a local folder, relative to the project root, when one is there, and otherwise a Hub id. A
    complete snapshot on this machine is used as it is; the network is not asked for a newer one.

    Raises:
        ModelError: It is neither, a file is missing, or it cannot be downloaded.
        FamilyError: Its pipeline class belongs to no family that is known.
    """
    base, revision = recipe.model.base, recipe.model.revision
    local = project_root() / Path(base).expanduser()
    if local.is_dir():
        _require_complete(detect(local))
        return local
    where = f"{recipe.source}, model.base"
    if local.is_file():
        raise ModelError(
            f"model.base {base} is a file",
            where=where,
            fix="set it to a diffusers folder; a single checkpoint becomes one by from_single_file(...) "
            "and save_pretrained(...) of its diffusers pipeline",
        )
    if not _looks_like_hub_id(base):
        raise ModelError(
            f"model.base {base} does not exist",
            where=f"{where}, looked for {local}",
            fix="set it to an existing diffusers folder, relative to the project root, or to a Hub id "
            "(owner/name)",
        )
    return _local_snapshot(base, revision) or _downloaded(base, revision, where)


def missing_files(folder: Path) -> str | None:
    """What the family in `folder` lacks, as one sentence; None when everything is there.

    Raises:
        FamilyError: Its pipeline class belongs to no family that is known.
    """
    try:
        _require_complete(detect(folder))
    except ModelError as err:
        if type(err) is not ModelError:
            raise
        return f"{err.what}: {err.where}"
    return None


def _require_complete(family: Family) -> None:
    for use in ("latents", "text", "denoiser"):
        for part in family.parts(use):
            for path in (*part.configs, *part.contents):
                if not path.is_file():
                    fix = "download the model again, or set model.base to a complete diffusers folder"
                    raise ModelError(f"the base model has no {path.name}", where=str(path), fix=fix)


def _looks_like_hub_id(base: str) -> bool:
    parts = base.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _local_snapshot(base: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(base, _INDEX, revision=revision)
    if not isinstance(index, str):
        return None
    folder = Path(index).parent
    return folder if missing_files(folder) is None else None


def _downloaded(base: str, revision: str | None, where: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        index = hf_hub_download(base, _INDEX, revision=revision)
        wanted = wanted_files(
            family_class(Path(index).parent), HfApi().list_repo_files(base, revision=revision)
        )
        folder = Path(snapshot_download(base, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelError(
            f"{base} is neither a local folder nor could it be downloaded from the Hub: {reason}",
            where=where,
            fix="check the spelling, the network, and for a gated model that you have accepted its licence "
            "and are logged in (hf auth login); or download it elsewhere and set model.base to the folder",
        ) from err
    missing = missing_files(folder)
    if missing is not None:
        fix = "use another base model, or another model.revision of it"
        raise ModelError(f"{base} is not complete on the Hub: {missing}", where=where, fix=fix)
    return folder


def wanted_files(family: type[Family], repository_files: Iterable[str]) -> list[str]:
    """The files of a repository that the family needs, sorted: no variants, no unused components.

    Weights are taken as `*.safetensors` where a component has them and as `*.bin` otherwise.
    """
    files = sorted(repository_files)
    wanted = [name for name in files if name == _INDEX]
    for component in family.components:
        inside = [name for name in files if fnmatch.fnmatch(name, f"{component}/*") and name.count("/") == 1]
        usual = [name for name in inside if not any(part in name for part in _VARIANT_PARTS)]
        weights = [name for name in usual if name.endswith((".safetensors", ".safetensors.index.json"))]
        weights = weights or [name for name in usual if name.endswith((".bin", ".bin.index.json"))]
        wanted += weights
        wanted += [
            name
            for name in usual
            if name.endswith((".json", ".txt", ".model", ".jinja")) and ".index." not in name
        ]
    return wanted
