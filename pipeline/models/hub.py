"""The Hugging Face Hub: repository ids, access to a repository, downloads, the files of a component."""

from __future__ import annotations

import difflib
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import ModelError
from pipeline.log import Log
from pipeline.models.diffusers_folder import WEIGHT_VARIANTS
from pipeline.recipe import in_project, path_in_recipe
from pipeline.reporting.progress import progress

_VARIANT_PARTS = (*WEIGHT_VARIANTS, "non_ema", "ema_only")

_CONFIG_SUFFIXES = (".json", ".txt", ".model", ".jinja")

_MEGABYTE = 1_000_000

REQUEST_TIMEOUT_S = 20.0
"""Maximum time to wait for the Hub's first answer."""

# No repository has these owners, because the Hub has pages of these names.
_RESERVED_OWNERS = frozenset(["models", "datasets", "spaces"])


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a model in the cache of the Hub; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form owner/name; models/name is a local path, because no owner has it."""
    parts = name.split("/")
    has_form = len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)
    return has_form and parts[0] not in _RESERVED_OWNERS


def require_revision(revision: str | None, where: str) -> None:
    """Raise ModelError for a revision that is no name of a branch, tag or commit."""
    # The Hub's client reads the file of this name below its folder of revisions.
    if revision is not None and {"", ".", ".."} & set(revision.split("/")):
        what = f"a revision must be the name of a branch, tag or commit, got the path {revision}"
        raise ModelError(what, where=where, fix="use a name as the Hub shows it, such as main or a commit")


def suggest_folder(name: str) -> str | None:
    """Return the local folder with a name similar to a missing one, as a recipe writes it, or None."""
    missing = in_project(name)
    if not missing.parent.is_dir():
        return None
    names = [
        each.name for each in missing.parent.iterdir() if each.is_dir() and not each.name.startswith(".")
    ]
    closest = difflib.get_close_matches(missing.name, names, n=1)
    return path_in_recipe(missing.with_name(closest[0])) if closest else None


def require_access(name: str, revision: str | None) -> None:
    """Request the repository's description once, so that no download retries what cannot succeed.

    Raises:
        HTTPError: The Hub cannot be reached, or refuses access.
        OfflineModeIsEnabled: HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import HfApi

    # `hf_hub_download` would repeat its first request for half a minute if there is no network.
    HfApi().model_info(name, revision=revision, timeout=REQUEST_TIMEOUT_S)


def download_files(name: str, revision: str | None, files: Iterable[str], *, log: Log) -> Path:
    """Return the snapshot of a repository with the given files; the ones on this machine are not downloaded.

    `revision` is a branch, tag or commit; None for the default branch.

    Raises:
        HTTPError: The Hub cannot be reached, or refuses access.
        OSError: The file system refuses a file.
        RuntimeError: A download in chunks (Xet) failed.
    """
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    bars: list[Any] = []

    class ByteCounter(tqdm):
        """Progress bar of `snapshot_download` that counts and draws nothing."""

        monitor_interval = 0  # tqdm's monitor thread redraws bars

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "file": sink})
            if settings.get("unit") == "B":
                bars.append(self)

    # The bars count the bytes received and the bytes written; the first may be fewer.
    def num_megabytes() -> int:
        return int(max((bar.n for bar in bars), default=0)) // _MEGABYTE

    def total_megabytes() -> int:
        return int(max((bar.total or 0 for bar in bars), default=0)) // _MEGABYTE

    with (
        Path(os.devnull).open("w", encoding="utf-8") as sink,
        progress(num_megabytes, total_megabytes, f"downloading {name}", log=log, measure="MB"),
    ):
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(files), tqdm_class=ByteCounter
        )
    return Path(folder)


def resembles_folder(name: str) -> bool:
    """Return True if a Hub id may be a misspelled local path: its owner is also a folder of the project."""
    return in_project(name).parent.is_dir()


def require_known(name: str, revision: str | None, where: str) -> None:
    """Raise ModelError, which suggests a local folder, if the Hub does not have this repository."""
    with explain_download_errors(name, where):
        require_access(name, revision)


@contextmanager
def explain_download_errors(name: str, where: str, *, key: str | None = None) -> Generator[None]:
    """Raise ModelError for any error of a download in the body; the message explains the cause.

    `where` is the recipe file and the key that name the repository, such as "flowers.yaml, model.base". If it
    names a section, `key` is the key.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as err:  # Xet raises RuntimeError
        problem, fix = _explain(err, name, key=key or where.rpartition(" ")[2])
        similar_folder = suggest_folder(name)
        if similar_folder is not None:
            fix = f"did you mean the local folder {similar_folder}? Otherwise {fix}"
        raise ModelError(f"{name} is not a local folder and {problem}", where=where, fix=fix) from err


def _explain(err: Exception, name: str, *, key: str) -> tuple[str, str]:
    from huggingface_hub.errors import OfflineModeIsEnabled, RemoteEntryNotFoundError, RevisionNotFoundError

    if refusal := _explain_refusal(err, name):
        return refusal
    if isinstance(err, RevisionNotFoundError):
        what = "its repository on the Hub does not have the requested revision"
        return what, "correct the revision (a branch, tag or commit), or remove it"
    if isinstance(err, RemoteEntryNotFoundError):
        what = f"its repository on the Hub lacks a file: {_first_line(err, 'Entry Not Found')}"
        return what, f"set {key} to a complete repository"

    alternative = f"download it on another machine and set {key} to the folder"
    if isinstance(err, OfflineModeIsEnabled):
        return "cannot be downloaded because HF_HUB_OFFLINE is set", f"unset HF_HUB_OFFLINE, or {alternative}"
    what = f"could not be downloaded from the Hub: {_first_line(err.__cause__ or err)}"
    return what, f"check the network, the proxy and HF_ENDPOINT; or {alternative}"


def _explain_refusal(err: Exception, name: str) -> tuple[str, str] | None:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # A gated repository's error is also a RepositoryNotFoundError, so it comes first.
    if isinstance(err, GatedRepoError):
        return _explain_gated(name)
    if isinstance(err, RepositoryNotFoundError):
        return _explain_not_found(name)
    if isinstance(err, HfHubHTTPError) and err.response.status_code in (401, 403):
        what = f"the Hub refuses the access token of this machine: {_first_line(err)}"
        return (
            what,
            "log in again with a token that may read the repository (hf auth login), or unset HF_TOKEN",
        )
    return None


def _explain_gated(name: str) -> tuple[str, str]:
    from huggingface_hub import get_token

    page = f"https://huggingface.co/{name}"
    if get_token() is None:
        what = "its repository on the Hub is gated, and this machine is not logged in"
        return what, f"accept the licence on {page}, then log in (hf auth login, or set HF_TOKEN)"
    what = "its repository on the Hub is gated, and the account of this machine's token has no access"
    return (
        what,
        f"accept the licence on {page} with that account (hf auth whoami shows it), and wait for approval",
    )


def _explain_not_found(name: str) -> tuple[str, str]:
    from huggingface_hub import get_token

    if get_token() is None:
        what = "does not exist on the Hub, or is private, and this machine is not logged in"
        return what, f"check the spelling of {name}; for a private repository, log in (hf auth login)"
    what = "does not exist on the Hub, or is private, and the account of this machine's token has no access"
    return what, f"check the spelling of {name}; for a private repository, use a token of its owner"


def _first_line(err: BaseException, start: str = "") -> str:
    """Return the first line of the error that starts with `start`, or else its first line or type."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith(start)), lines[0] if lines else type(err).__name__)


def component_files(repository_files: Iterable[str], folder: str) -> list[str]:
    """Return the files of one component, without subfolders, sorted by kind and name.

    Configuration files are always included. Weights are the `*.safetensors` files without a variant in their
    name, or else such `*.bin` files. If neither exist, they are the files of the first variant in
    `WEIGHT_VARIANTS` that has weights, again preferring `*.safetensors`. `folder` is "" if the repository is
    a single component.
    """
    inside = [
        name for name in sorted(repository_files) if PurePosixPath(name).parent == PurePosixPath(folder)
    ]
    usual = [name for name in inside if not any(part in name for part in _VARIANT_PARTS)]

    weights = [name for name in usual if name.endswith((".safetensors", ".safetensors.index.json"))]
    weights = weights or [name for name in usual if name.endswith((".bin", ".bin.index.json"))]
    weights = weights or _variant_weights(inside)
    return weights + [name for name in usual if name.endswith(_CONFIG_SUFFIXES) and ".index." not in name]


def _variant_weights(names: list[str]) -> list[str]:
    """Return the weights of the first variant, with an index of the form that from_pretrained accepts."""
    for variant in WEIGHT_VARIANTS:
        of_variant = [name for name in names if f".{variant}." in name or f".{variant}-" in name]
        for suffix in ("safetensors", "bin"):
            endings = (f".{suffix}", f".{suffix}.index.{variant}.json")
            if weights := [name for name in of_variant if name.endswith(endings)]:
                return weights
    return []
