"""The section `diagnosis`: what is measured with the base model before training."""

from __future__ import annotations

from pydantic import Field

from pipeline.recipe.settings import Settings


class DiagnosisSettings(Settings):
    """What is measured on the dataset with the base model, before training."""

    captions: bool = Field(
        default=True,
        description="Compare the base model's loss on each image under its own caption with its loss under "
        "other captions, see docs/diagnosis.md.",
    )
