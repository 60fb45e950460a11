"""Configurations of published base models, as diffusers folders without weights.

The memory forecast reads nothing else of a model. Keys that equal the defaults of diffusers or transformers
are omitted here and added in the files. The transformers of FLUX.1, Qwen-Image, Z-Image and FLUX.2 dev have
the defaults of their classes in diffusers 0.42. The other values are those that the repositories on the Hub
are known to have; they were written without access to the Hub, and a test compares numbers of weights with
the published sizes of six denoisers.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu.published import FLUX, FLUX2_DEV, SDXL, Config
from pipeline.models.families import FAMILIES, FamilySpec

_CLIP_L_PROJECTED: Config = {**SDXL["text_encoder"], "projection_dim": 768}
_CLIP_G: Config = SDXL["text_encoder_2"]
_T5_XXL: Config = FLUX["text_encoder_2"]
_FLUX_VAE: Config = FLUX["vae"]

_QWEN3_4B: Config = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

_QWEN2_5_VL_7B: Config = {
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_window_layers": 28,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
}

_MISTRAL_SMALL_24B: Config = {
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "vision_config": {"model_type": "pixtral"},
}

_SD15_UNET: Config = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}

_SD_VAE: Config = {**SDXL["vae"], "sample_size": 512, "scaling_factor": 0.18215}

_SD3_TEXT: dict[str, Config] = {
    "text_encoder": _CLIP_L_PROJECTED,
    "text_encoder_2": _CLIP_G,
    "text_encoder_3": _T5_XXL,
}

_MMDIT: Config = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}


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
            elif role.startswith("tokenizer"):
                name, config = "tokenizer_config.json", {"tokenizer_class": kind, "model_max_length": 77}
            elif library.startswith("transformers"):
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
        {"vae": _SD_VAE, "text_encoder": SDXL["text_encoder"], "unet": _SD15_UNET},
    ),
    Published(
        "SDXL",
        "stabilityai/stable-diffusion-xl-base-1.0",
        "StableDiffusionXLPipeline",
        {role: SDXL[role] for role in ("vae", "text_encoder", "text_encoder_2", "unet")},
    ),
    Published(
        "SD3 medium",
        "stabilityai/stable-diffusion-3-medium-diffusers",
        "StableDiffusion3Pipeline",
        {**_SD3_TEXT, "vae": _FLUX_VAE, "transformer": {**_MMDIT, "pos_embed_max_size": 192}},
    ),
    Published(
        "SD3.5 medium",
        "stabilityai/stable-diffusion-3.5-medium",
        "StableDiffusion3Pipeline",
        {
            **_SD3_TEXT,
            "vae": _FLUX_VAE,
            "transformer": {
                **_MMDIT,
                "pos_embed_max_size": 384,
                "dual_attention_layers": tuple(range(13)),
                "qk_norm": "rms_norm",
            },
        },
    ),
    Published(
        "Z-Image",
        "Tongyi-MAI/Z-Image",
        "ZImagePipeline",
        {"vae": _FLUX_VAE, "text_encoder": _QWEN3_4B},
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
        "FLUX.2 klein base 4B",
        "black-forest-labs/FLUX.2-klein-base-4B",
        "Flux2KleinPipeline",
        {
            "text_encoder": _QWEN3_4B,
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
        "Qwen-Image",
        "Qwen/Qwen-Image",
        "QwenImagePipeline",
        {"text_encoder": _QWEN2_5_VL_7B},
    ),
    Published(
        "FLUX.2 dev",
        "black-forest-labs/FLUX.2-dev",
        "Flux2Pipeline",
        {"text_encoder": _MISTRAL_SMALL_24B, **FLUX2_DEV},
    ),
)
"""Models of the table in docs/hardware.md, smallest first."""
