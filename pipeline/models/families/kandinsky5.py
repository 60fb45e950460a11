"""Kandinsky 5, its image model: a Qwen2.5-VL and a pooled CLIP, a transformer for videos of one frame."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import LoraKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import WITH_FTFY, LanguageModelText, Shapes
from pipeline.models.families.parts.vae import LatentSpec

TOKENS = 512
"""`max_sequence_length` of the pipeline's call, template not included."""

TEMPLATE_TOKENS = 40
"""Tokens of the pipeline's template before the caption; their hidden states are dropped."""

# Number of rows, and of columns, of patches that the transformer has positions for.
_POSITIONS = 128

_ATTENTION = ("to_query", "to_key", "to_value", "out_layer")


@dataclass(frozen=True)
class QwenAndClipText(LanguageModelText):
    """Qwen's hidden states of the caption's tokens and CLIP's pooled output."""

    # CLIP's own limit does not count, because CLIP contributes only a pooled vector.

    def shapes(self, model: ModelFolder) -> Shapes:
        pooled = int(model.config("text_encoder_2")["hidden_size"])
        return {**super().shapes(model), "pooled_text_embedding": (pooled,)}


KANDINSKY5 = FamilySpec(
    name="Kandinsky 5 (image)",
    pipeline_classes=("Kandinsky5T2IPipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        # The processor is not loaded: captions need no images, and its image processor requires torchvision.
        "tokenizer": "transformers.AutoTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "text_encoder_2": "transformers.CLIPTextModel",
        "transformer": "diffusers.Kandinsky5Transformer3DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec(
        "autoencoder-kl scaled, 1",
        patch=lambda model: int(model.config("transformer")["patch_size"][1]),
        max_patches=lambda model: _POSITIONS,
        uses_shift=False,
    ),
    text=QwenAndClipText(
        "qwen2.5-vl template unpadded and clip pooled, 1" + WITH_FTFY,
        "families.kandinsky5:QwenAndClipConditioner",
        tokens=TOKENS,
        template_tokens=TEMPLATE_TOKENS,
    ),
    noise=FlowNoise(),
    denoiser_call="families.kandinsky5:Kandinsky5Call",
    drawing="families.kandinsky5:Kandinsky5Drawing",
    lora=LoraKeys(
        [
            *(f"{kind}_attention.{end}" for kind in ("self", "cross") for end in _ATTENTION),
            *("feed_forward.in_layer", "feed_forward.out_layer"),
        ]
    ),
    architecture="kandinsky-5-image",
    kohya_version="kandinsky5",
    guidance_scale=3.5,
)
