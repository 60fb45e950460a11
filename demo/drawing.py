"""Pictures that a Stable Diffusion pipeline of diffusers draws for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from demo.world import SIZE_PX, Array

STEPS = 12
GUIDANCE_SCALE = 2.5
_BATCH = 32


def draw_prompts(pipeline: Any, prompts: Sequence[str], *, seed: int) -> list[Array]:
    """Return a uint8 picture (`SIZE_PX`, `SIZE_PX`, 3) for each prompt.

    Each picture has its own noise, which depends on `seed` and on the prompt's position.
    """
    return draw_seeded(pipeline, [(prompt, (seed << 32) + number) for number, prompt in enumerate(prompts)])


def draw_seeded(pipeline: Any, prompts: Sequence[tuple[str, int]], *, num_steps: int = STEPS) -> list[Array]:
    """Return a uint8 picture (`SIZE_PX`, `SIZE_PX`, 3) for each prompt and the seed of its noise."""
    pictures: list[Array] = []
    pipeline.set_progress_bar_config(disable=True)
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        drawn = pipeline(
            [prompt for prompt, _ in batch],
            height=SIZE_PX,
            width=SIZE_PX,
            num_inference_steps=num_steps,
            guidance_scale=GUIDANCE_SCALE,
            generator=[torch.Generator().manual_seed(seed) for _, seed in batch],
            output_type="np",
        ).images
        pictures += list((drawn * 255).round().astype(np.uint8))
    return pictures
