"""Qwen-Image: a Qwen2.5-VL, a double-stream transformer, a video VAE of 16 channels."""

from __future__ import annotations

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.families.parts.vae import QwenImageLatents

TOKENS = 512
"""`max_sequence_length` of the pipeline's call, template not included."""

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")
_TEXT_LAYERS = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")


def _targets(model: ModelFolder) -> list[str]:
    image = [*(f"attn.{end}" for end in _ATTENTION), "img_mlp.net.0.proj", "img_mlp.net.2"]

    # The last block's text output is dropped, so the text query and the layers behind it would never get a
    # gradient there.
    blocks = range(int(model.config("transformer")["num_layers"]) - 1)
    return [*image, *(f"{block}.{layer}" for block in blocks for layer in _TEXT_LAYERS)]


QWEN_IMAGE_KEYS = LoraKeys(_targets, kohya_readable=True)

QWEN_IMAGE = FamilySpec(
    name="Qwen-Image",
    pipeline_classes=("QwenImagePipeline",),
    components={
        "vae": "diffusers.AutoencoderKLQwenImage",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "transformer": "diffusers.QwenImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=QwenImageLatents("autoencoder-kl-qwen-image normalised, 1", patch=2),
    text=LanguageModelText(
        "qwen2.5-vl template last hidden state unpadded, 2",
        "families.qwen_image:QwenConditioner",
        tokens=TOKENS,
        template_tokens=34,
    ),
    noise=FlowNoise(),
    denoiser_call="families.qwen_image:QwenImageCall",
    lora=QWEN_IMAGE_KEYS,
    architecture="qwen-image",
    kohya_version="qwen_image",
    guidance_scale=4.0,
)
