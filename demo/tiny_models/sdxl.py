"""A Stable Diffusion XL with about a million random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from demo.tiny_models.parts import TEXT_WIDTH, assemble, clip, vae, write_clip_tokenizer
from demo.tiny_models.sized_unet import sized_unet
from pipeline.models.families import BetaPrediction

_POOLED_WIDTH = 48
"""Width of the second encoder's projection; differs from its hidden width so that tests tell them apart."""

_SECOND_WIDTH = 40


def make_tiny_sdxl(folder: Path, *, prediction_type: BetaPrediction = "epsilon", seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `StableDiffusionXLPipeline.from_pretrained(folder)` loads it, and it draws pictures of 64x64 pixels. The
    caller's random state does not change.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        prediction_type: Prediction type in the scheduler's configuration.
        seed: Seed of the random weights.
    """
    from diffusers import EulerDiscreteScheduler

    scheduler = partial(
        EulerDiscreteScheduler,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
        prediction_type=prediction_type,
    )
    second = partial(
        clip,
        "CLIPTextModelWithProjection",
        width=_SECOND_WIDTH,
        layers=3,
        projection=_POOLED_WIDTH,
        hidden_act="gelu",
    )
    assemble(
        folder,
        "StableDiffusionXLPipeline",
        {
            "vae": partial(vae, scaling_factor=0.13025),
            "unet": partial(sized_unet, text_width=TEXT_WIDTH + _SECOND_WIDTH, pooled_width=_POOLED_WIDTH),
            "text_encoder": clip,
            "text_encoder_2": second,
            "scheduler": scheduler,
        },
        tokenizers={"tokenizer": write_clip_tokenizer, "tokenizer_2": write_clip_tokenizer},
        seed=seed,
        index={
            "feature_extractor": [None, None],
            "force_zeros_for_empty_prompt": True,
            "image_encoder": [None, None],
        },
    )
