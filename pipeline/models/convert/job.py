"""What the converting process is told: one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.storage.atomic import write_text

How = Literal["denoiser", "vae", "text_encoder"]


@dataclass(frozen=True)
class PartOrder:
    """A component to convert.

    Attributes:
        how: What kind of network it is.
        prefix: Of its tensors' names in the file.
        dtype: In which it is written, as torch names it.
        num_values: Of the tensors that the network must take; None where that is not known.
    """

    how: How
    prefix: str
    dtype: str
    num_values: int | None = None


@dataclass(frozen=True)
class Order:
    """Components of one file to convert.

    Attributes:
        file: The single file.
        like: A diffusers folder that has the configuration of each.
        folder: Where each gets a folder of its name; it exists.
        parts: By component.
    """

    file: Path
    like: Path
    folder: Path
    parts: Mapping[str, PartOrder]

    def write(self, path: Path) -> None:
        """Leave it for `read_order`."""
        write_text(path, json.dumps(asdict(self), default=str))


def read_order(path: Path) -> Order:
    """The order that `Order.write` left."""
    said = json.loads(path.read_text(encoding="utf-8"))
    parts = {role: PartOrder(**each) for role, each in said["parts"].items()}
    return Order(Path(said["file"]), Path(said["like"]), Path(said["folder"]), parts)
