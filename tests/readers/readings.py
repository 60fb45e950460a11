"""What a program reads from a LoRA file, compared module by module with what diffusers applies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.trained_lora.export.lora_files import Layout
from tests.pipeline.models.convert.state_dicts import State
from tests.readers.exported import Exported

TOLERANCE = 1e-5
"""Largest difference of a delta weight, relative to its largest number. Readers multiply float32 factors."""


@dataclass(frozen=True)
class Reading:
    """What a program did with a file.

    Attributes:
        weights: Delta weight (out, in) of each weight that the program changed, by the weight's name.
        targets: Name of the weight that each used key of the file changed; the key is without
            `.lora_down.weight` and the like.
        names: Names of all weights of the program's model.
    """

    weights: Mapping[str, Tensor]
    targets: Mapping[str, str]
    names: Set[str]


class Place(NamedTuple):
    """Rows of one of the program's weights that hold a module's weight.

    Attributes:
        weight: Name of the program's weight.
        rows: Ranges (start, end) of its rows; several if the original code orders the rows in another way.
    """

    weight: str
    rows: tuple[tuple[int, int], ...]

    def of(self, weight: Tensor) -> Tensor:
        """Return the module's rows of a matrix."""
        return torch.cat([weight[start:end] for start, end in self.rows])


class Finding(NamedTuple):
    """A module and the key of its adapter in the file, as the program reads it.

    Attributes:
        module: Path in diffusers' model, after the name of a text encoder.
        key: Key in the file, without `.lora_down.weight` and the like.
        place: Rows of the program's model that hold the module's weight; None if it has no such weight.
        target: Weight that the program changes for this key; None if it ignores the key.
        error: Largest difference of the delta weight in these rows, relative to its largest number.
    """

    module: str
    key: str
    place: Place | None
    target: str | None
    error: float

    @property
    def is_read(self) -> bool:
        """Whether the program applies the trained delta weight to the module's rows."""
        return self.place is not None and self.target == self.place.weight and self.error <= TOLERANCE


def places(state: State, originals: State) -> dict[str, Place]:
    """Return where a model's weights are in a checkpoint of its original code, by module.

    The weights of `state`, a diffusers model, must have unique rows.

    Args:
        state: Weights of the diffusers model.
        originals: The same weights under the names of the original code, which may stack several in one.
    """
    rows = {
        row.numpy().tobytes(): (name, number)
        for name, weight in originals.items()
        if name.endswith("weight") and weight.ndim > 1
        for number, row in enumerate(weight.flatten(1))
    }
    found: dict[str, Place] = {}
    for name, weight in state.items():
        if not name.endswith(".weight") or weight.ndim < 2:
            continue
        origins = [rows.get(row.numpy().tobytes()) for row in weight.flatten(1)]
        numbers = [origin[1] for origin in origins if origin is not None]
        names = {origin[0] for origin in origins if origin is not None}
        if len(numbers) == len(weight) and len(names) == 1:
            found[name.removesuffix(".weight")] = Place(names.pop(), _ranges(numbers))
    return found


def _ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the ranges (start, end) of consecutive numbers, in order."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    ends = [*starts[1:], len(numbers)]
    return tuple((numbers[start], numbers[end - 1] + 1) for start, end in zip(starts, ends, strict=True))


def text_places(exported: Exported, encoders: Mapping[str, str]) -> dict[str, Place]:
    """Return where the weights of adapted text encoders are, by module.

    Args:
        exported: The files.
        encoders: Prefix of the names in the reader's code, by component of the diffusers pipeline.
    """
    found: dict[str, Place] = {}
    for module in exported.modules:
        role, _, path = module.name.partition(".")
        if role in encoders:
            weight = f"{encoders[role]}text_model.{path.removeprefix('text_model.')}.weight"
            found[module.name] = Place(weight, ((0, module.out_features),))
    return found


def findings(
    exported: Exported, layout: Layout, where: Mapping[str, Place], reading: Reading
) -> list[Finding]:
    """Return one finding per adapted module.

    Args:
        exported: The files.
        layout: Layout of the file that was read.
        where: Result of `places` for the reader's code.
        reading: What the reader did with the file.
    """
    results: list[Finding] = []
    for module in exported.modules:
        key = stem(module.keys(layout)[0])
        place = where.get(module.name)
        if place is not None and place.weight not in reading.names:
            place = None
        delta = None if place is None else reading.weights.get(place.weight)

        error = torch.inf
        if place is not None and delta is not None:
            rows, expected = place.of(delta), exported.deltas[module.name]
            if rows.shape == expected.shape:
                error = float((rows - expected).abs().max() / expected.abs().max())
        results.append(Finding(module.name, key, place, reading.targets.get(key), error))
    return results


def unexplained(where: Mapping[str, Place], results: list[Finding], reading: Reading) -> Iterator[str]:
    """Yield the weights that the program changed outside of the rows of adapted modules."""
    adapted = [where[result.module] for result in results if result.module in where]
    for name, delta in reading.weights.items():
        rest = delta.clone()
        for place in adapted:
            if place.weight == name:
                for start, end in place.rows:
                    rest[start:end] = 0
        if rest.any():
            yield name


def stem(key: str) -> str:
    """Return a key of a file without the name of its tensor."""
    return re.sub(r"\.(lora_(down|up|A|B)\.weight|alpha|dora_scale)$", "", key)
