"""The Hugging Face Hub: repository ids, the files of a component, and errors of downloads."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from pipeline.errors import ModelError

WEIGHT_VARIANTS = ("fp32", "fp16", "bf16")
"""Variants in names of weight files, in order of preference; used if a component has no other weights."""

_VARIANT_PARTS = (*WEIGHT_VARIANTS, "non_ema", "ema_only")

_CONFIG_SUFFIXES = (".json", ".txt", ".model", ".jinja")


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form owner/name."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


@contextmanager
def explain_download_errors(name: str, where: str) -> Generator[None]:
    """Raise ModelError for any error of a download in the body.

    Args:
        name: Hub id of the repository.
        where: Recipe file and key that name it, such as "flowers.yaml, model.base".

    Raises:
        ModelError: The download failed.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as err:  # Xet raises RuntimeError
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        key = where.rpartition(" ")[2]
        raise ModelError(
            f"{name} is not a local folder and could not be downloaded from the Hub: {reason}",
            where=where,
            fix="check the spelling and the network; for a gated model, accept its licence and log in "
            f"(hf auth login); or download it on another machine and set {key} to the folder",
        ) from err


def component_files(repository_files: Iterable[str], folder: str) -> list[str]:
    """Return the files of one component, without subfolders, sorted by kind and name.

    Configuration files are always included. Weights are the `*.safetensors` files without a variant in their
    name, or else such `*.bin` files. If neither exist, they are the files of the first variant in
    `WEIGHT_VARIANTS` that has weights, again preferring `*.safetensors`.

    Args:
        repository_files: All files of the repository.
        folder: Folder of the component; "" if the repository is a single component.
    """
    depth, pattern = (1, f"{folder}/*") if folder else (0, "*")
    inside = [
        name
        for name in sorted(repository_files)
        if fnmatch.fnmatch(name, pattern) and name.count("/") == depth
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
