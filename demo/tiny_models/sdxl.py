"""A Stable Diffusion XL of about a million random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from demo.tiny_models.parts import TEXT_WIDTH, assemble, clip, vae, write_clip_tokenizer
from demo.tiny_models.sized_unet import sized_unet
from pipeline.models.families import BetaPrediction

_POOLED_WIDTH = 48
"""Of the second encoder's projection; not its hidden width, so that no test mistakes one for the other."""

_SECOND_WIDTH = 40


def make_tiny_sdxl(folder: Path, *, prediction_type: BetaPrediction = "epsilon", seed: int = 0) -> None:
    """Write the model as a diffusers folder; the same bytes for the same arguments.

    It is read by `StableDiffusionXLPipeline.from_pretrained(folder)` and draws pictures of 64x64 pixels. The
    caller's random state is left as it was.

    Args:
        folder: Made with its parents; files that are there already are replaced.
        prediction_type: What the scheduler's configuration says.
        seed: Of the random weights.
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
