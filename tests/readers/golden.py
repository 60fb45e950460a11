"""Golden key maps: the weights that each key of our files changes in the readers' own code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.trained_lora.export.lora_files import Layout
from tests.readers.readings import Finding, Place

FOLDER = Path(__file__).parent / "golden"

LAYOUT: dict[str, Layout] = {"comfyui": "comfyui", "sd_scripts": "kohya", "musubi": "kohya"}
"""Layout of the file that is written for each reader."""

KeyMap = dict[str, tuple[str, Place] | None]
"""Key in the file and rows of the reader's model, by module; None for a module that the reader ignores."""


@dataclass(frozen=True)
class Golden:
    """The key maps of one reader.

    Attributes:
        reader: The reader's name for people.
        version: Version and commit of its code.
        maps: Key map by kind of model, as in `demo.tiny_models.TINY`.
        other_versions: Version of its code by kind of model, for maps of another version.
    """

    reader: str
    version: str
    maps: dict[str, KeyMap]
    other_versions: dict[str, str] = field(default_factory=dict[str, str])

    def with_maps(self, maps: dict[str, KeyMap], version: str) -> Golden:
        """Return these key maps with others from some version of the reader's code."""
        others = {kind: each for kind, each in self.other_versions.items() if kind not in maps}
        if version != self.version:
            others |= dict.fromkeys(maps, version)
        return replace(self, maps={**self.maps, **maps}, other_versions=others)


def load(reader: str) -> Golden:
    """Return the key maps of a reader, one of `LAYOUT`."""
    stored = json.loads((FOLDER / f"{reader}.json").read_text(encoding="utf-8"))
    models: dict[str, Any] = stored["models"]
    maps = {
        kind: {module: _from_json(entry) for module, entry in _resolved(models, kind).items()}
        for kind in models
    }
    return Golden(stored["reader"], stored["version"], maps, stored.get("other_versions", {}))


def save(reader: str, golden: Golden) -> None:
    """Write the key maps with one module per line; a kind with the map of an earlier one names that kind."""
    lines: list[str] = []
    earlier: dict[str, str] = {}
    for kind, key_map in golden.maps.items():
        entries = {module: _to_json(entry) for module, entry in key_map.items()}
        text = ",\n".join(
            f"   {json.dumps(module)}: {json.dumps(entry)}" for module, entry in entries.items()
        )
        same = earlier.setdefault(text, kind)
        lines.append(f"  {json.dumps(kind)}: " + (json.dumps(same) if same != kind else f"{{\n{text}\n  }}"))

    head = f' "reader": {json.dumps(golden.reader)},\n "version": {json.dumps(golden.version)},\n'
    if golden.other_versions:
        head += f' "other_versions": {json.dumps(golden.other_versions)},\n'
    text = "{\n" + head + ' "models": {\n' + ",\n".join(lines) + "\n }\n}\n"
    (FOLDER / f"{reader}.json").write_text(text, encoding="utf-8")


def key_map(findings: Iterable[Finding]) -> KeyMap:
    """Return what a reader did with a file."""
    return {
        each.module: (each.key, each.place) if each.is_read and each.place is not None else None
        for each in findings
    }


def _resolved(models: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the entries of a kind, which may be stored under another kind."""
    return models[models[kind]] if isinstance(models[kind], str) else models[kind]


def _to_json(entry: tuple[str, Place] | None) -> list[Any] | None:
    if entry is None:
        return None
    key, place = entry
    return [key, place.weight, *(number for rows in place.rows for number in rows)]


def _from_json(entry: list[Any] | None) -> tuple[str, Place] | None:
    if entry is None:
        return None
    key, weight, *numbers = entry
    return key, Place(weight, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
