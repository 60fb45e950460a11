from __future__ import annotations

import pytest

from pipeline.models.families import FAMILIES, FamilySpec
from pipeline.models.worker.denoiser import DenoiserCall
from pipeline.models.worker.family import part_class
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.noise import NoiseProcess
from pipeline.models.worker.text import TextConditioner
from pipeline.models.worker.vae import VaeCodec


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.name)
def test_every_import_path_of_a_declaration_names_a_part_of_its_kind(spec: FamilySpec) -> None:
    assert issubclass(part_class(spec.latents.codec), VaeCodec)
    assert issubclass(part_class(spec.text.conditioner), TextConditioner)
    assert issubclass(part_class(spec.denoiser_call), DenoiserCall)
    assert issubclass(part_class(spec.noise.process), NoiseProcess)
    assert issubclass(part_class(spec.drawing), PipelineDrawing)


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.name)
def test_no_part_has_more_than_three_project_ancestors(spec: FamilySpec) -> None:
    paths = (spec.latents.codec, spec.text.conditioner, spec.denoiser_call, spec.noise.process, spec.drawing)
    kinds = [part_class(path) for path in paths]
    kinds += [type(part) for part in (spec.latents, spec.text, spec.noise, spec.lora)]
    for kind in kinds:
        ancestors = [base for base in kind.__mro__[1:] if base.__module__.startswith("pipeline.")]
        assert len(ancestors) <= 3, kind
