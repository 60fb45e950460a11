"""The networks, the tokenizer and the noise schedule of the demo's base model, before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from demo.tiny_models.parts import write_clip_tokenizer
from demo.world import BACKGROUNDS, COLOURS, SHAPES

MAX_TOKENS = 24
"""Number of tokens that each caption is padded to."""

_TEXT_WIDTH = 96
_LATENT_PX = 16


def write_tokenizer(folder: Path) -> Any:
    """Write a `CLIPTokenizer` into `folder` and return it.

    Each word of the captions is one token. Other words, such as the concept's name, are spelled.
    """
    words = " ".join(["a an on background", *SHAPES, *COLOURS, *BACKGROUNDS])
    write_clip_tokenizer(folder, words, max_length=MAX_TOKENS)
    return CLIPTokenizer.from_pretrained(folder)


def new_vae() -> Any:
    """Return an `AutoencoderKL` of 4 channels and factor 4."""
    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (16, 32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 4 * _LATENT_PX,
        "mid_block_add_attention": False,
    }
    return AutoencoderKL(**sizes)


def new_text_encoder(tokenizer: Any) -> Any:
    """Return a `CLIPTextModel` for the tokenizer."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=4 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=_TEXT_WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_unet() -> Any:
    """Return a `UNet2DConditionModel` with attention at half the latent's resolution."""
    return UNet2DConditionModel(
        sample_size=_LATENT_PX,
        block_out_channels=(64, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=8,
        cross_attention_dim=_TEXT_WIDTH,
    )


def new_scheduler() -> Any:
    """Return Stable Diffusion's noise schedule with v-prediction and zero terminal SNR, for DDIM."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
