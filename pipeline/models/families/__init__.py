"""The model families that can be trained, one file each, found by a base model's `model_index.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families.aura_flow import AuraFlow
from pipeline.models.families.base import (
    BetaPrediction,
    Density,
    Layer,
    Prediction,
    Shapes,
    Use,
)
from pipeline.models.families.bria_fibo import BriaFibo
from pipeline.models.families.chroma import Chroma
from pipeline.models.families.cogview4 import CogView4
from pipeline.models.families.diffusers_family import DiffusersFamily as Family
from pipeline.models.families.ernie_image import ErnieImage
from pipeline.models.families.flux import Flux
from pipeline.models.families.flux2 import Flux2Klein
from pipeline.models.families.flux2_dev import Flux2Dev
from pipeline.models.families.hidream import HiDream
from pipeline.models.families.ideogram4 import Ideogram4
from pipeline.models.families.kandinsky5 import Kandinsky5
from pipeline.models.families.kolors import Kolors
from pipeline.models.families.krea2 import Krea2
from pipeline.models.families.lumina2 import Lumina2
from pipeline.models.families.qwen_image import QwenImage
from pipeline.models.families.sana import Sana
from pipeline.models.families.sd import StableDiffusion
from pipeline.models.families.sd3 import StableDiffusion3
from pipeline.models.families.sdxl import StableDiffusionXL
from pipeline.models.families.z_image import ZImage

FamilySpec = type[Family]

FAMILIES: tuple[FamilySpec, ...] = (
    StableDiffusion,
    StableDiffusionXL,
    StableDiffusion3,
    Flux,
    Flux2Klein,
    Flux2Dev,
    QwenImage,
    ZImage,
    Chroma,
    Lumina2,
    Sana,
    AuraFlow,
    HiDream,
    Kolors,
    CogView4,
    ErnieImage,
    Krea2,
    Ideogram4,
    Kandinsky5,
    BriaFibo,
)
"""In the order in which they are listed to users."""

__all__ = [
    "FAMILIES",
    "BetaPrediction",
    "Density",
    "Family",
    "FamilySpec",
    "Layer",
    "Prediction",
    "Shapes",
    "Use",
    "detect",
    "family_spec",
]


def family_spec(folder: Path) -> FamilySpec:
    """The family whose pipeline class `folder/model_index.json` names; no other file is read.

    Raises:
        FamilyError: The class belongs to no family here; the text lists those that exist.
        ModelError: There is no readable `model_index.json`.
    """
    index = folder / "model_index.json"
    named = read_json(index).get("_class_name")
    for family in FAMILIES:
        if named in family.pipeline_classes:
            return family
    known = ", ".join(f"{family.name} ({'/'.join(family.pipeline_classes)})" for family in FAMILIES)
    raise FamilyError(
        f"the base model's pipeline class {named!r} belongs to no family that Latentline knows",
        where=f"{index}, _class_name",
        fix=f"set model.base to a model of one of these families: {known}",
    )


def detect(folder: Path, elsewhere: Mapping[str, Path] | None = None) -> Family:
    """The family of the diffusers folder, ready to answer from its configurations; imports no torch.

    Args:
        folder: Holds `model_index.json`.
        elsewhere: Folders of the components that are not taken from there.

    Raises:
        FamilyError: As `family_spec`, or a configuration asks for what the family cannot do.
        ModelError: A file that the family needs is missing or unreadable.
    """
    return family_spec(folder)(folder, elsewhere)
