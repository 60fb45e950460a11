"""Stable Diffusion 3 and 3.5: two CLIPs and, if the model has it, T5; a transformer; a VAE of 16 channels."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import BlockNames, StackedKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import Shapes, TextSpec, clip_length
from pipeline.models.families.parts.vae import LatentSpec

T5_TOKENS = 256
"""`max_sequence_length` of the pipeline; these tokens are zeros in a model without T5."""

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

_BLOCKS = BlockNames(
    "transformer_blocks",
    {
        "x_block_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "x_block_attn_proj": ("attn.to_out.0",),
        "x_block_attn2_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
        "x_block_attn2_proj": ("attn2.to_out.0",),
        "x_block_mlp_fc1": ("ff.net.0.proj",),
        "x_block_mlp_fc2": ("ff.net.2",),
        "context_block_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "context_block_attn_proj": ("attn.to_add_out",),
        "context_block_mlp_fc1": ("ff_context.net.0.proj",),
        "context_block_mlp_fc2": ("ff_context.net.2",),
    },
    original="joint_blocks",
)


@dataclass(frozen=True)
class ClipAndT5Text(TextSpec):
    """CLIP's tokens followed by T5's, as wide as the transformer takes them, and both CLIPs' projections."""

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        limits = {role: clip_length(model, role) for role in ("tokenizer", "tokenizer_2")}
        return {**limits, "tokenizer_3": T5_TOKENS} if model.has("text_encoder_3") else limits

    def shapes(self, model: ModelFolder) -> Shapes:
        encoders = ("text_encoder", "text_encoder_2")
        return {
            "text_embedding": (
                clip_length(model) + T5_TOKENS,
                int(model.config("transformer")["joint_attention_dim"]),
            ),
            "pooled_text_embedding": (sum(int(model.config(role)["projection_dim"]) for role in encoders),),
        }


def _architecture(model: ModelFolder) -> str:
    # 3.5 normalises queries and keys, and 3.5 medium has dual attention.
    config = model.config("transformer")
    if not config.get("qk_norm"):
        return "stable-diffusion-v3-medium"
    return f"stable-diffusion-3.5-{'medium' if config.get('dual_attention_layers') else 'large'}"


def _kohya_version(model: ModelFolder) -> str:
    # sd-scripts writes medium, 5-medium or 5-large.
    return _architecture(model).removeprefix("stable-diffusion-").removeprefix("v3-").removeprefix("3.")


STABLE_DIFFUSION_3 = FamilySpec(
    name="Stable Diffusion 3 and 3.5",
    pipeline_classes=("StableDiffusion3Pipeline",),
    components={
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "tokenizer_3": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "transformer": "diffusers.SD3Transformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=LatentSpec(
        "autoencoder-kl shifted scaled, 1",
        max_patches=lambda model: int(model.config("transformer")["pos_embed_max_size"]),
    ),
    text=ClipAndT5Text("two clips penultimate and t5 padded, 1", "families.sd3:ClipAndT5Conditioner"),
    noise=FlowNoise(),
    denoiser_call="families.sd3:StableDiffusion3Call",
    lora=StackedKeys(
        [
            *(f"attn.{end}" for end in (*_ATTENTION, *_JOINT_ATTENTION)),
            *(f"attn2.{end}" for end in _ATTENTION),
        ],
        blocks=(_BLOCKS,),
    ),
    architecture=_architecture,
    kohya_version=_kohya_version,
    guidance_scale=7.0,
)
