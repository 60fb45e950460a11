"""A family whose denoiser sees references, for tests of the stages up to the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.images.geometry import Size
from pipeline.models import families
from pipeline.models.families.parts.references import ReferenceSpec


def multiples_of_16(_model: object, original: Size) -> Size:
    """Return the size with its edges cut to multiples of 16."""
    return Size(*(edge // 16 * 16 for edge in original))


def with_references(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Make Stable Diffusion a family that sees up to two references, cropped to multiples of 16."""
    spec = ReferenceSpec(**{"max_number": 2, "size": multiples_of_16, "crops": True, **values})
    changed = tuple(
        replace(each, references=spec) if "StableDiffusionPipeline" in each.pipeline_classes else each
        for each in families.FAMILIES
    )
    monkeypatch.setattr("pipeline.models.families.FAMILIES", changed)
