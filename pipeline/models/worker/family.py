"""A base model with the parts that need torch; the entry point of worker processes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families import Family, FamilySpec, family_spec
from pipeline.models.worker.denoiser import DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.noise import NoiseProcess
from pipeline.models.worker.text import TextConditioner
from pipeline.models.worker.vae import VaeCodec


class WorkerFamily(Family):
    """A base model with its torch side, the parts that the declaration names; no weights are loaded yet."""

    def __init__(self, spec: FamilySpec, model: ModelFolder) -> None:
        super().__init__(spec, model)
        self.vae: VaeCodec = part_class(spec.latents.codec)(self)
        self.text: TextConditioner = part_class(spec.text.conditioner)(self)
        self.denoiser: DenoiserCall = part_class(spec.denoiser_call)(self)
        self.noise: NoiseProcess = part_class(spec.noise.process)(self)
        self.drawing: PipelineDrawing = part_class(spec.drawing)(self, self.vae, self.text, self.denoiser)


def part_class(path: str) -> Any:
    """Return the class of an import path below this package, such as "vae:KLCodec"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"pipeline.models.worker.{module}"), name)


def load_family(folder: Path, replaced: Mapping[str, Path] | None = None) -> WorkerFamily:
    """Return the base model in a diffusers folder with its torch side, as `families.detect`."""
    return WorkerFamily(family_spec(folder), ModelFolder(folder, replaced))
