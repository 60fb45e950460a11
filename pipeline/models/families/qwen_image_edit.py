"""Qwen-Image-Edit 2509 and later: Qwen-Image with references that text encoder and transformer see."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.references import QWEN_EDIT_REFERENCES
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import QwenImageLatents
from pipeline.models.families.qwen_image import QWEN_IMAGE_KEYS

# Of template and caption, without images. The pipeline has no limit.
_PROMPT_TOKENS = 1024

# Of an embedding with three images, which have at most 264 tokens each.
_TOKENS = 2048


@dataclass(frozen=True)
class QwenImageEditText(LanguageModelText):
    """Hidden states of images and caption; the system message is dropped."""

    tokens: int = _TOKENS

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        return {"processor": _PROMPT_TOKENS}


QWEN_IMAGE_EDIT = FamilySpec(
    name="Qwen-Image-Edit",
    pipeline_classes=("QwenImageEditPlusPipeline",),
    components={
        "vae": "diffusers.AutoencoderKLQwenImage",
        # The complete processor would require torchvision, so its tokenizer and the PIL version of its image
        # processor are loaded. The pipeline never uses its separate tokenizer.
        "processor": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "transformer": "diffusers.QwenImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=QwenImageLatents("autoencoder-kl-qwen-image normalised, 1", patch=2),
    text=QwenImageEditText(
        "qwen2.5-vl edit template last hidden state unpadded, 1",
        "families.qwen_image_edit:QwenImageEditConditioner",
    ),
    noise=FlowNoise(),
    denoiser_call="families.qwen_image:QwenImageCall",
    lora=QWEN_IMAGE_KEYS,
    architecture="qwen-image-edit-plus",
    kohya_version="qwen_image_edit",
    guidance_scale=4.0,
    references=QWEN_EDIT_REFERENCES,
)
