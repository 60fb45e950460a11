"""A Stable Diffusion with about a million random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import TEXT_WIDTH, assemble, clip, vae, write_clip_tokenizer
from pipeline.models.families import BetaPrediction


def make_tiny(folder: Path, *, prediction_type: BetaPrediction = "epsilon", seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `StableDiffusionPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels. The
    caller's random state does not change.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        prediction_type: Prediction type in the scheduler's configuration.
        seed: Seed of the random weights.
    """
    from diffusers import DDPMScheduler

    scheduler = partial(
        DDPMScheduler,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    assemble(
        folder,
        "StableDiffusionPipeline",
        {"vae": vae, "unet": _unet, "text_encoder": clip, "scheduler": scheduler},
        tokenizers={"tokenizer": write_clip_tokenizer},
        seed=seed,
        index={
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
        },
    )


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=TEXT_WIDTH,
    )
