"""The section `diagnosis`: what is measured with the base model before training."""

from __future__ import annotations

from pydantic import Field

from pipeline.recipe.settings import Settings

MIN_OTHERS, NUM_OTHERS = 3, 32
"""Minimum and maximum number of other captions of an image. Fewer have no spread to compare with."""


class DiagnosisSettings(Settings):
    """What is measured on the dataset with the base model, before training."""

    captions: bool = Field(
        default=True,
        description="Compare the base model's loss on each image under its own caption with its loss under "
        "other captions, see docs/diagnosis.md.",
    )
    others: int = Field(
        default=NUM_OTHERS,
        ge=MIN_OTHERS,
        le=NUM_OTHERS,
        description="Number of other captions that are measured for each image. Fewer than 32 are those that "
        "fit best by the gradient of the loss: 8 take less than half of the time and find a little less.",
    )
