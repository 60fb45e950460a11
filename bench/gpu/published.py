"""Published configurations of SDXL 1.0, FLUX.1 dev and FLUX.2 dev, and numbers of weights.

Missing keys have the defaults of diffusers or transformers. Tokenizers are not included: the time of an
encoder with random weights does not depend on the token ids.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_VAE: Config = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "force_upcast": True,
}

_CLIP_L: Config = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

SDXL: dict[str, Config] = {
    "vae": {**_VAE, "latent_channels": 4, "scaling_factor": 0.13025},
    "text_encoder": _CLIP_L,
    "text_encoder_2": {
        **_CLIP_L,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "hidden_act": "gelu",
        "projection_dim": 1280,
    },
    "unet": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "cross_attention_dim": 2048,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "scheduler": {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "timestep_spacing": "leading",
    },
}
"""Of stabilityai/stable-diffusion-xl-base-1.0, by component."""

FLUX: dict[str, Config] = {
    "vae": {
        **_VAE,
        "latent_channels": 16,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    },
    "text_encoder": _CLIP_L,
    "text_encoder_2": {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "transformer": {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
}
"""Of black-forest-labs/FLUX.1-dev, by component."""

FLUX2_DEV: dict[str, Config] = {
    "transformer": {
        "in_channels": 128,
        "num_layers": 8,
        "num_single_layers": 48,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
        "timestep_guidance_channels": 256,
    },
}
"""Denoiser of black-forest-labs/FLUX.2-dev."""

NUM_WEIGHTS = {
    "SDXL": {
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
        "unet": 2_567_463_684,
    },
    "FLUX.1": {
        "vae": 83_819_683,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "transformer": 11_901_408_320,
    },
}
"""Of the published networks."""
