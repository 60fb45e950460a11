"""The first Qwen-Image-Edit: one reference, which text encoder and transformer see in the same size."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.families.parts.references import QWEN_FIRST_EDIT_REFERENCES
from pipeline.models.families.qwen_image_edit import QWEN_IMAGE_EDIT, QwenImageEditText

# Of template and caption, and of one image of a megapixel, which has at most 1,400 tokens.
_TOKENS = 2560

QWEN_IMAGE_EDIT_FIRST = replace(
    QWEN_IMAGE_EDIT,
    name="Qwen-Image-Edit (first)",
    pipeline_classes=("QwenImageEditPipeline",),
    text=QwenImageEditText(
        "qwen2.5-vl first edit template last hidden state unpadded, 1",
        "families.qwen_image_edit:QwenImageEditConditioner",
        tokens=_TOKENS,
    ),
    architecture="qwen-image-edit",
    references=QWEN_FIRST_EDIT_REFERENCES,
)
