"""Merging LoRA files and reducing their ranks, with the written file read back and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.errors import LoraFileError
from pipeline.log import Log, discard
from pipeline.lora_files.arithmetic import reduced, relative_error, summed
from pipeline.lora_files.layers import (
    DTYPES,
    Dtype,
    Layer,
    LoraLayers,
    file_sha256,
    read_layers,
    write_layers,
)
from pipeline.reporting.progress import progress
from pipeline.trained_lora.export.lora_files import RUN_KEY

ORIGIN_KEY = "latentline.made_from"
"""Key in a file's metadata of the files and weights that it was made from, as JSON."""

_BASE_KEYS = ("modelspec.architecture", "ss_base_model_version")
"""Keys of a file's metadata that name the kind of its base model."""

_TRIGGER_KEY = "modelspec.trigger_phrase"

# What is said of one training, such as its steps and tags, is not true of a merge.
_KEPT_PREFIXES = ("modelspec.", "ss_base_model_version", "ss_v2", "ss_network_module", "ss_sd_model_name")


@dataclass(frozen=True)
class Term:
    """One file of a merge.

    Attributes:
        weight: Number that multiplies the file's layers.
        blocks: Numbers of layers whose keys match a pattern of `fnmatch`, in place of `weight`; the last
            pattern that matches decides.
    """

    path: Path
    weight: float = 1.0
    blocks: Sequence[tuple[str, float]] = ()

    def weight_of(self, key: str) -> float:
        """Return the number that multiplies the layer with this key."""
        matching = [weight for pattern, weight in self.blocks if fnmatchcase(key, pattern)]
        return matching[-1] if matching else self.weight


@dataclass(frozen=True)
class Reduction:
    """Limits of the ranks of a result; see `reduced`."""

    max_rank: int | None = None
    energy: float | None = None


@dataclass(frozen=True)
class Combined:
    """A written and verified file.

    Attributes:
        ranks: Rank by layer.
        energies: Energy that is kept, by layer: 1 where the rank was not reduced.
        error: Largest error of a layer, relative to its size, of the file as read back to the exact sum.
    """

    path: Path
    ranks: Mapping[str, int]
    energies: Mapping[str, float]
    error: float


def combine(
    terms: Sequence[Term], path: Path, *, reduction: Reduction, dtype: Dtype | None, log: Log = discard
) -> Combined:
    """Write the weighted sum of LoRA files to a new file, and compare the file with the sum.

    Args:
        terms: Files of one layout and one kind of base model.
        path: The new file.
        reduction: Limits of the ranks; without them the result is exact, and its ranks are sums.
        dtype: Dtype of the matrices; None for the most exact one of the files.
        log: Receives progress.

    Raises:
        LoraFileError: The file exists, or the terms do not fit each other, or one is not a LoRA.
    """
    if path.exists():
        fix = "choose another name, or delete it"
        raise LoraFileError("the new file exists already", where=str(path), fix=fix)
    if path.suffix != ".safetensors":
        fix = f"use {path.name}.safetensors"
        raise LoraFileError("the new file must end in .safetensors", where=str(path), fix=fix)

    files = [read_layers(term.path) for term in terms]
    sums = _terms_by_layer(terms, files)
    results: dict[str, tuple[Layer, float]] = {}
    with progress(lambda: len(results), len(sums), "layers computed", log=log):
        for key, each in sums.items():
            results[key] = reduced(summed(each), max_rank=reduction.max_rank, energy=reduction.energy)
    dtype = dtype or next(each for each in DTYPES if any(file.dtype == each for file in files))
    layers = {key: layer for key, (layer, _) in results.items()}
    metadata = _metadata(terms, files, layers)
    write_layers(path, LoraLayers(layers, files[0].is_diffusers, dtype, metadata))

    energies = {key: energy for key, (_, energy) in results.items()}
    ranks = {key: layer.rank for key, layer in layers.items()}
    return Combined(path, ranks, energies, _verified(path, sums, energies, dtype))


def _terms_by_layer(
    terms: Sequence[Term], files: Sequence[LoraLayers]
) -> dict[str, list[tuple[float, Layer]]]:
    sums: dict[str, list[tuple[float, Layer]]] = {}
    first_file: dict[str, Path] = {}
    for term, file in zip(terms, files, strict=True):
        where = f"{terms[0].path}\n{term.path}"
        _require_same_base(files[0], file, where=where)
        for pattern, _ in term.blocks:
            if not any(fnmatchcase(key, pattern) for key in file.layers):
                fix = f"see the names in: latentline lora info {term.path} --layers"
                raise LoraFileError(f"no layer matches {pattern}", where=str(term.path), fix=fix)
        for key, layer in file.layers.items():
            others = sums.setdefault(key, [])
            first_file.setdefault(key, term.path)
            if others and others[0][1].weight_shape != layer.weight_shape:
                raise LoraFileError(
                    f"the weight of {key} has the shape {layer.weight_shape}, and in the other file "
                    f"{others[0][1].weight_shape}",
                    where=f"{first_file[key]}\n{term.path}",
                    fix="merge LoRAs of one base model",
                )
            others.append((term.weight_of(key), layer))
    return sums


def _require_same_base(first: LoraLayers, other: LoraLayers, *, where: str) -> None:
    for key in _BASE_KEYS:
        bases = first.metadata.get(key), other.metadata.get(key)
        if None not in bases and bases[0] != bases[1]:
            raise LoraFileError(
                f"the LoRAs are for different base models: {bases[0]} and {bases[1]} ({key})",
                where=where,
                fix="merge LoRAs of one base model",
            )
    if not first.layers.keys() & other.layers.keys():
        examples = [next(iter(each.layers)) for each in (first, other)]
        raise LoraFileError(
            f"the files have no layer in common; their first ones are {examples[0]} and {examples[1]}",
            where=where,
            fix="use files of one layout and base model; Latentline writes each LoRA in three layouts",
        )


def _metadata(
    terms: Sequence[Term], files: Sequence[LoraLayers], layers: Mapping[str, Layer]
) -> dict[str, str]:
    metadata = {
        name: text
        for name, text in files[0].metadata.items()
        if name.startswith(_KEPT_PREFIXES) and all(file.metadata.get(name, text) == text for file in files)
    }
    triggers = [file.metadata[_TRIGGER_KEY] for file in files if _TRIGGER_KEY in file.metadata]
    if triggers:
        metadata[_TRIGGER_KEY] = ", ".join(dict.fromkeys(triggers))
    rank = max(layer.rank for layer in layers.values())
    made_from = [
        {
            "file": term.path.name,
            "sha256": file_sha256(term.path),
            "weight": term.weight,
            **({"blocks": [list(each) for each in term.blocks]} if term.blocks else {}),
            **({"run": file.metadata[RUN_KEY]} if RUN_KEY in file.metadata else {}),
        }
        for term, file in zip(terms, files, strict=True)
    ]
    return metadata | {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": str(rank),
        ORIGIN_KEY: json.dumps(made_from, sort_keys=True, ensure_ascii=False),
    }


def _verified(
    path: Path,
    sums: Mapping[str, Sequence[tuple[float, Layer]]],
    energies: Mapping[str, float],
    dtype: Dtype,
) -> float:
    """Return the largest relative error of a layer; remove the file and raise if it is too large."""
    written = read_layers(path)
    largest = 0.0
    for key, terms in sums.items():
        error = relative_error(terms, written.layers[key])
        largest = max(largest, error)
        # Both factors are rounded. A half dtype may have to hold numbers below its smallest normal one.
        allowed = (1.0 - energies[key]) ** 0.5 + 4 * DTYPES[dtype]
        if error > allowed:
            path.unlink()
            raise LoraFileError(
                f"the file would differ from the exact result by {error:.2g} in {key}, where "
                f"{allowed:.2g} is expected",
                where=str(path),
                fix="use --dtype float32",
            )
    return largest
