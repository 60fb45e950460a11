"""The model families that can be trained, one declaration per file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder, index_file, read_json
from pipeline.models.families.anima import ANIMA
from pipeline.models.families.aura_flow import AURA_FLOW
from pipeline.models.families.bria_fibo import BRIA_FIBO
from pipeline.models.families.bria_fibo2 import BRIA_FIBO2
from pipeline.models.families.chroma import CHROMA
from pipeline.models.families.cogview4 import COGVIEW4
from pipeline.models.families.ernie_image import ERNIE_IMAGE
from pipeline.models.families.family import Family, FamilySpec, Use
from pipeline.models.families.flux import FLUX
from pipeline.models.families.flux2 import FLUX2_KLEIN
from pipeline.models.families.flux2_dev import FLUX2_DEV
from pipeline.models.families.flux_kontext import FLUX_KONTEXT
from pipeline.models.families.hidream import HIDREAM
from pipeline.models.families.ideogram4 import IDEOGRAM4
from pipeline.models.families.kandinsky5 import KANDINSKY5
from pipeline.models.families.kolors import KOLORS
from pipeline.models.families.krea2 import KREA2
from pipeline.models.families.lumina2 import LUMINA2
from pipeline.models.families.parts.lora_keys import Layer
from pipeline.models.families.parts.noise import BetaPrediction, Density, Prediction
from pipeline.models.families.parts.text import Shapes
from pipeline.models.families.qwen_image import QWEN_IMAGE
from pipeline.models.families.qwen_image21 import QWEN_IMAGE21
from pipeline.models.families.qwen_image_edit import QWEN_IMAGE_EDIT
from pipeline.models.families.qwen_image_edit_first import QWEN_IMAGE_EDIT_FIRST
from pipeline.models.families.sana import SANA
from pipeline.models.families.sd import STABLE_DIFFUSION
from pipeline.models.families.sd3 import STABLE_DIFFUSION_3
from pipeline.models.families.sdxl import STABLE_DIFFUSION_XL
from pipeline.models.families.wan import WAN
from pipeline.models.families.z_image import Z_IMAGE

FAMILIES: tuple[FamilySpec, ...] = (
    STABLE_DIFFUSION,
    STABLE_DIFFUSION_XL,
    STABLE_DIFFUSION_3,
    FLUX,
    FLUX_KONTEXT,
    FLUX2_KLEIN,
    FLUX2_DEV,
    QWEN_IMAGE,
    QWEN_IMAGE_EDIT,
    QWEN_IMAGE_EDIT_FIRST,
    QWEN_IMAGE21,
    Z_IMAGE,
    CHROMA,
    LUMINA2,
    SANA,
    AURA_FLOW,
    HIDREAM,
    KOLORS,
    COGVIEW4,
    ERNIE_IMAGE,
    KREA2,
    ANIMA,
    IDEOGRAM4,
    KANDINSKY5,
    BRIA_FIBO,
    BRIA_FIBO2,
    WAN,
)
"""All families, in the order in which they are listed to users."""

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
    """Return the family of the pipeline class in the index of a folder; reads no other file.

    Raises:
        FamilyError: No family has this pipeline class, and the message lists all families; or the family does
            not support all models of the class.
        ModelError: The index is missing or unreadable.
    """
    index = index_file(folder)
    contents = read_json(index)
    pipeline_class = contents.get("_class_name")
    for spec in FAMILIES:
        if pipeline_class in spec.pipeline_classes:
            spec.require_supported(contents, index)
            return spec
    families = ", ".join(f"{spec.name} ({'/'.join(spec.pipeline_classes)})" for spec in FAMILIES)
    raise FamilyError(
        f"the base model's pipeline class {pipeline_class!r} is not supported",
        where=f"{index}, _class_name",
        fix=f"set model.base to a model of one of these families: {families}",
    )


def detect(folder: Path, replaced: Mapping[str, Path] | None = None) -> Family:
    """Return the base model in a diffusers folder with its family; raises like `family_spec`.

    `replaced` has the folders of the components that replace the ones in `folder`, by component.
    """
    return Family(family_spec(folder), ModelFolder(folder, replaced))
