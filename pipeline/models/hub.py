"""The Hub, from which base models are fetched: which names are ids, which files, what can go wrong."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from pipeline.errors import ModelError

WEIGHT_VARIANTS = ("fp32", "fp16", "bf16")
"""In names of weight files that hold a component in another number format; the first that is there is taken
where a component has no others."""

_VARIANT_PARTS = (*WEIGHT_VARIANTS, "non_ema", "ema_only")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


@contextmanager
def explain_download_errors(name: str, where: str) -> Generator[None]:
    """Within, whatever keeps a download from the Hub becomes a `ModelError`.

    Args:
        name: The Hub id.
        where: The recipe's key that names it.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as err:  # the last is Xet's, of large files
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelError(
            f"{name} is neither a local folder nor could it be downloaded from the Hub: {reason}",
            where=where,
            fix="check the spelling, the network, and for a gated model that you have accepted its licence "
            f"and are logged in (hf auth login); or download it elsewhere and set {where.rpartition(' ')[2]} "
            "to the folder",
        ) from err


def component_files(repository_files: Iterable[str], folder: str) -> list[str]:
    """The files of one component in a repository, sorted by kind and name: nothing below.

    Weights are taken as `*.safetensors` where a component has them and as `*.bin` otherwise; where it has
    neither, those of a variant.

    Args:
        repository_files: All of the repository.
        folder: Of the component; "" for a repository that is one.
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
    others = (".json", ".txt", ".model", ".jinja")
    return weights + [name for name in usual if name.endswith(others) and ".index." not in name]


def _variant_weights(names: list[str]) -> list[str]:
    """Those of the first variant; with its index, where it is one that from_pretrained looks for."""
    for variant in WEIGHT_VARIANTS:
        of_it = [name for name in names if f".{variant}." in name or f".{variant}-" in name]
        for suffix in ("safetensors", "bin"):
            ends = (f".{suffix}", f".{suffix}.index.{variant}.json")
            if weights := [name for name in of_it if name.endswith(ends)]:
                return weights
    return []
