"""Job file of the conversion process: JSON with the components to convert."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.storage.atomic import write_text

Network = Literal["denoiser", "vae", "text_encoder", "same_names"]
"""How a component is read: by diffusers in three ways, or under the names that it has in diffusers too."""


@dataclass(frozen=True)
class ComponentJob:
    """A component to convert.

    Attributes:
        prefix: Prefix of its tensors' names in the file.
        dtype: Torch name of the dtype in which it is written.
        num_values: Number of values that the network must take from the file; None if unknown.
        without: Longer prefixes of other components.
    """

    network: Network
    prefix: str
    dtype: str
    num_values: int | None = None
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConversionJob:
    """Components of one file to convert, by role.

    Attributes:
        reference: Diffusers folder with the configuration of each component.
        folder: Existing folder in which each component gets a folder of its name.
    """

    file: Path
    reference: Path
    folder: Path
    components: Mapping[str, ComponentJob]


def write_job(job: ConversionJob, path: Path) -> None:
    """Write a job for `read_job`."""
    write_text(path, json.dumps(asdict(job), default=str))


def read_job(path: Path) -> ConversionJob:
    """Return the job written by `write_job`."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    components = {role: ComponentJob(**component) for role, component in fields["components"].items()}
    return ConversionJob(Path(fields["file"]), Path(fields["reference"]), Path(fields["folder"]), components)
